"""Code that all adapters share: tested versions, vocabularies, draft chains and settings."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from logging import getLogger
from typing import Annotated, Final

import numpy as np
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion
from pydantic import ConfigDict, Field, ValidationError

from decoder.engines.contract import installed
from indexer.reader import Vocabulary
from retriever.client.strict import RemoteDrafter
from retriever.drafter import Drafter, keeps_tenants
from retriever.errors import RetrieverError, SettingsError, VocabularyMismatchError
from retriever.operations.resolving import resolve, variable_of
from retriever.operations.settings import ClientSettings, EmbeddedSettings, Settings
from retriever.tree import ROOT, DraftTree

_log = getLogger(__name__)

_LEAST_SHARE: Final = 0.9
"""Least share of a model's embeddings that belong to tokens; the rest is padding."""

_told: set[tuple[str, str, str]] = set()


def check_version(tested: str, *distributions: str) -> bool:
    """Return whether the adapter was tested with the installed version of its engine.

    Other versions are used too, with one warning that names the tested range.

    Args:
        tested: range of versions, such as `>=5.0,<6`; pre-releases may be within it.
        distributions: names under which the engine may be installed; the first name found counts.
    """
    name, found = installed(distributions)
    is_tested = _is_within(found, tested)
    if not is_tested and (name, found, tested) not in _told:
        _told.add((name, found, tested))
        _log.warning("drafts were tested with %s %s, and this is %s", name, tested, found)
    return is_tested


def _is_within(found: str, tested: str) -> bool:
    try:
        return SpecifierSet(tested).contains(found, prereleases=True)
    except InvalidVersion:
        return False


def vocabulary_of_drafter(drafter: Drafter) -> Vocabulary | None:
    """Return the vocabulary for which a drafter was made; `None` if it is unknown.

    The vocabulary of a service is that of its indexes; if the service is unreachable or has no
    indexes, it is unknown.
    """
    stated = getattr(drafter, "vocabulary", None)  # an embedded drafter has this
    if isinstance(stated, Vocabulary):
        return stated
    if isinstance(drafter, RemoteDrafter):
        with suppress(RetrieverError):
            for index in drafter.list_indexes():
                return Vocabulary(index.vocabulary_size, index.vocabulary_fingerprint)
    return None


def checked_vocabulary_size(
    drafter: Drafter, model_vocabulary: int, own: Vocabulary | None = None
) -> int | None:
    """Return the size of a drafter's vocabulary; `None` if it is unknown.

    Args:
        drafter: the drafter to check.
        model_vocabulary: number of the model's embeddings.
        own: vocabulary of the model's tokenizer, if it is known.

    Raises:
        VocabularyMismatchError: the drafter was made for another tokenizer.
    """
    theirs = vocabulary_of_drafter(drafter)
    if theirs is None:
        return None if own is None else own.size
    if own is not None and own.fingerprint != theirs.fingerprint:
        raise VocabularyMismatchError(
            f"drafts are for a different tokenizer ({theirs.describe()}) from the model's "
            f"({own.describe()}): "
            "draft from an index built with the model's own tokenizer"
        )
    is_padded = model_vocabulary * _LEAST_SHARE <= theirs.size <= model_vocabulary
    if own is None and not is_padded:
        _log.warning(
            "drafts are for a tokenizer of %d tokens, but the model has %d: this seems to be "
            "another tokenizer, so drafts will fail or hardly be accepted; name the model's own "
            "(tokenizer= or vocabulary=) to be sure",
            theirs.size,
            model_vocabulary,
        )
    return theirs.size


def check_tenants(tenants: Sequence[str], drafter: Drafter) -> None:
    """Refuse settings that name tenants if the drafter cannot keep tenants apart.

    Args:
        tenants: names of the tenants in the settings.
        drafter: the drafter that the settings describe.

    Raises:
        SettingsError: the drafter does not keep tenants apart.
    """
    if tenants and not keeps_tenants(drafter):
        raise SettingsError(
            "tenants: a service knows the tenant by the client's credentials: draft in this "
            "process, or run an engine for each tenant"
        )


def chain_for(tree: DraftTree, max_tokens: int, model_vocabulary: int) -> DraftTree:
    """Return the best chain in a tree, up to the first token that the model lacks.

    Args:
        tree: the draft tree.
        max_tokens: most tokens of the chain.
        model_vocabulary: number of tokens that the model has; an engine may crash on other tokens.
    """
    chain = tree.best_chain(max_tokens)
    unknown = np.flatnonzero((chain.token_ids < 0) | (chain.token_ids >= model_vocabulary))
    return chain.prefix(int(unknown[0])) if len(unknown) else chain


def within_vocabulary(tree: DraftTree, model_vocabulary: int) -> DraftTree:
    """Return a tree without the tokens that the model lacks, and without their descendants.

    Args:
        tree: the draft tree.
        model_vocabulary: number of tokens that the model has.
    """
    kept = (tree.token_ids >= 0) & (tree.token_ids < model_vocabulary)
    if kept.all():
        return tree
    for node, parent in enumerate(tree.parents.tolist()):
        kept[node] &= parent == ROOT or kept[parent]
    return tree.among(kept)


class EngineSettings(ClientSettings, EmbeddedSettings):
    """The sources of drafts inside an engine, and limits on the time for drafts.

    A field `name` is set by the key `name` in the TOML file that `FOREDRAFT_CONFIG` names, or by
    the environment variable `FOREDRAFT_NAME`; lists are written like `PATH`. Settings that a
    service also has mean the same. With one server, the drafter in this process takes over while
    the server is unreachable.
    """

    model_config = ConfigDict(title="Engine")

    deadline_s: Annotated[
        float | None,
        Field(
            gt=0,
            allow_inf_nan=False,
            description="Longest wait for the drafts of a step, in seconds. Default: 0.02 in "
            "process; for a service a quarter of the engine's own time, at most 0.02.",
        ),
    ] = None
    budget_nodes: Annotated[
        int,
        Field(ge=1, le=256, description="Most nodes of the draft tree with the proposed chain."),
    ] = 64
    min_probability: Annotated[
        float, Field(ge=0, le=1, description="Least acceptance probability of a token.")
    ] = 0.0
    idle_session_s: Annotated[
        float, Field(gt=0, description="Seconds after which an unseen sequence counts as ended.")
    ] = 10.0
    tenants: Annotated[
        list[str],
        Field(
            description="Tenants that a request may name, if the engine lets requests carry a "
            "name; * for any. A request that names another tenant gets no drafts."
        ),
    ] = []  # noqa: RUF012  as pydantic copies it
    measure: Annotated[
        bool,
        Field(
            description="Whether to time passes, if the engine allows shorter drafts, so that "
            "only as many tokens are proposed as pay off."
        ),
    ] = True
    always_propose: Annotated[
        bool,
        Field(
            description="Whether to pad every proposal to its full length, as models "
            "with gated delta nets need in vLLM; drafts are then never shortened."
        ),
    ] = False
    threads: Annotated[
        int,
        Field(
            ge=1,
            le=256,
            description="Most threads for the drafts of a step, in process. Give as many as there "
            "are processors that are otherwise idle at that time.",
        ),
    ] = 1


_SERVICE_ALONE: Final = {
    variable_of(name) for name in Settings.model_fields if name not in EngineSettings.model_fields
}


def resolve_settings(
    given: Mapping[str, object], environment: Mapping[str, str], where: str
) -> EngineSettings:
    """Return the settings of a file, overridden by the environment, then by the engine.

    Args:
        given: settings by name, from the engine's own configuration.
        environment: environment variables. Variables that only a service uses are ignored, because
            a service may run in the same environment.
        where: name of the engine's own configuration, for messages.

    Raises:
        SettingsError: a name is unknown, or a value is invalid.
    """
    ours = {name: value for name, value in environment.items() if name not in _SERVICE_ALONE}
    settings = resolve(EngineSettings, {}, ours).settings
    try:
        return EngineSettings.model_validate(settings.model_dump() | dict(given))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(str(part) for part in first["loc"])
        reason = "there is no such setting" if first["type"] == "extra_forbidden" else first["msg"]
        raise SettingsError(f"{where}: {name}: {reason}") from error
