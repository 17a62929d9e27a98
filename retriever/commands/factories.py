"""Which drafter a replay is made with: our own, or one that another module names."""

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
"""Makes a drafter of open indexes, outputs (int32[n] each) that count as recent generations, and
the most nodes that it will be asked for."""

_PATIENCE_S: Final = 1.0
"""A replay waits for late services as no decoder would: it measures drafts, not networks."""

OWN: Final = "foredraft"
"""The name of our own drafter."""

RULES: Final = ("decoder.plugins.contenders.drafting_rules", "benchmarks.papers")
"""Modules whose drafters are known by their names alone; the latter is there in a checkout."""

_CHECKOUT: Final = Path(__file__).parents[2]
"""The folder that these packages lie in: one of installed packages if it is no checkout."""


class UnknownDrafterError(RetrieverError):
    """No drafter of this name is to be had."""


def own_drafter(
    indexes: Sequence[Index],
    outputs: Sequence[TokenIds],
    _max_budget: int,
    *,
    vocabulary: Vocabulary | None = None,
    phrases: ListedPhrases | None = None,
    tokenizer: Callable[[], Any] | None = None,
) -> EmbeddedDrafter:
    """Return the embedded drafter, compiled, with the outputs as recent generations.

    Raises:
        InvalidRequestError: the indexes are of different vocabularies.
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
    """Return a client of one or more services, which keep the outputs as recent generations.

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
    """Return the factory of a name; see `find_drafter`.

    Raises:
        UnknownDrafterError: the name stands for none.
    """
    factory: DrafterFactory = find_drafter(name)
    if not callable(factory):
        raise UnknownDrafterError(
            f"{name} drafts with a model, so that no recording can be replayed with it: decode "
            "with it by `foredraft bench --contender`"
        )
    return factory


def find_drafter(name: str, modules: Sequence[str] = RULES) -> Any:
    """Return what a name stands for in the mapping `DRAFTERS` of a module.

    Args:
        name: `MODULE:NAME`, where the module may lie in the current folder; or our own, or the name
            alone where one of `modules` has it.
        modules: dotted names; see `known_drafters`.

    Raises:
        UnknownDrafterError: the module cannot be imported, or none has such a drafter.
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
    """Return drafters by name, our own first, and why those of a module are not here.

    Args:
        modules: dotted names, of this package or of the checkout that it lies in.
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
    """Return the mapping `DRAFTERS` of a module, which may lie in a folder.

    Raises:
        UnknownDrafterError: it cannot be imported, or has none.
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
