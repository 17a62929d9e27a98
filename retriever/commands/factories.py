"""The drafter of a replay: our own, or one that another module names."""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from indexer.reader import Index, Vocabulary
from retriever.client.connecting import connect
from retriever.client.credentials import Credentials
from retriever.client.resilient import ResilientDrafter
from retriever.client.strict import RemoteDrafter
from retriever.drafter import Drafter, TokenIds
from retriever.errors import RetrieverError
from retriever.predict.phrases import ListedPhrases
from retriever.sessions.embedded import EmbeddedDrafter

DrafterFactory = Callable[[Sequence[Index], Sequence[TokenIds], int], Drafter]
"""Function that makes a drafter from open indexes, outputs (int32[n] each) that count as recent
generations, and the largest budget of its requests, in nodes."""

_PATIENCE_S: Final = 1.0
"""Longest wait of a replay for services. It is longer than a decoder's, because a replay measures
drafts, not networks."""

OWN: Final = "foredraft"
"""Name of our own drafter."""

RULES: Final = ("decoder.plugins.contenders.drafting_rules", "benchmarks.papers")
"""Modules whose drafters can be named without the module; the second exists only in a checkout."""

_CHECKOUT: Final = Path(__file__).parents[2]
"""The folder of these packages: a checkout, or the folder of installed packages."""


class UnknownDrafterError(RetrieverError):
    """There is no drafter of this name."""


def own_drafter(
    indexes: Sequence[Index],
    outputs: Sequence[TokenIds],
    _max_budget: int,
    *,
    vocabulary: Vocabulary | None = None,
    phrases: ListedPhrases | None = None,
    tokenizer: Callable[[], Any] | None = None,
) -> EmbeddedDrafter:
    """Return the compiled embedded drafter, with the outputs as recent generations.

    Raises:
        InvalidRequestError: the indexes have different vocabularies.
    """
    drafter = EmbeddedDrafter(indexes, vocabulary=vocabulary, phrases=phrases, tokenizer=tokenizer)
    drafter.warm()
    for output in outputs:
        drafter.remember(output)
    return drafter


def remote_drafter(
    addresses: Sequence[str],
    outputs: Sequence[TokenIds],
    vocabulary: Vocabulary | None,
    credentials: Credentials | None,
) -> RemoteDrafter | ResilientDrafter:
    """Return a client of one or more services, which store the outputs as recent generations.

    Raises:
        RetrieverError: a service refuses an output.
    """
    fingerprint = vocabulary.fingerprint if vocabulary is not None else ""
    drafter = connect(
        addresses,
        deadline_s=_PATIENCE_S,
        vocabulary_fingerprint=fingerprint,
        credentials=credentials,
    )
    for number, output in enumerate(outputs):
        drafter.open(f"output-{number}", output[:0])
        drafter.close(f"output-{number}", output)
    return drafter


def find_factory(name: str) -> DrafterFactory:
    """Return the factory with a name; see `find_drafter`.

    Raises:
        UnknownDrafterError: there is no such drafter.
    """
    factory: DrafterFactory = find_drafter(name)
    if not callable(factory):
        raise UnknownDrafterError(
            f"{name} drafts with a model, so recordings cannot be replayed with it: decode "
            "with it using `foredraft bench --contender`"
        )
    return factory


def find_drafter(name: str, modules: Sequence[str] = RULES) -> Any:
    """Return the entry of a name in the mapping `DRAFTERS` of a module.

    Args:
        name: `MODULE:NAME`, where the module may be in the current folder; or the name of our own
            drafter; or a bare `NAME` that one of `modules` has.
        modules: dotted names of modules; see `known_drafters`.

    Raises:
        UnknownDrafterError: the module cannot be imported, or there is no such drafter.
    """
    if name == OWN:
        return own_drafter
    module, _, own = name.rpartition(":")
    known, missing = (_drafters_of(module, Path.cwd()), []) if module else known_drafters(modules)
    if own not in known:
        listed = f"no drafter {own!r}: choose from {', '.join(known)}"
        raise UnknownDrafterError("; ".join([listed, *missing]))
    return known[own]


def known_drafters(modules: Sequence[str] = RULES) -> tuple[dict[str, Any], list[str]]:
    """Return drafters by name, our own first, and why the drafters of a module are unavailable.

    Args:
        modules: dotted names of modules in this package or its checkout.
    """
    known: dict[str, Any] = {OWN: own_drafter}
    missing = []
    for module in modules:
        try:
            known |= _drafters_of(module, _CHECKOUT)
        except UnknownDrafterError as error:
            missing.append(str(error))
    return known, missing


def _drafters_of(module: str, folder: Path) -> Mapping[str, Any]:
    """Return the mapping `DRAFTERS` of a module, which may be in a folder.

    Raises:
        UnknownDrafterError: the module cannot be imported, or has no such mapping.
    """
    sys.path.append(str(folder))
    try:
        drafters: Mapping[str, Any] = import_module(module).DRAFTERS
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise UnknownDrafterError(
            f"{module} names no drafters ({error}): rules of papers are there in a checkout, and "
            "others are MODULE:NAME of a module with a mapping DRAFTERS"
        ) from error
    finally:
        sys.path.pop()
    return drafters
