"""Which drafter a replay is made with: our own, or one that another module names."""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Final

from indexer.reader import Index, Vocabulary
from retriever.client.credentials import Credentials
from retriever.client.sharded import connect
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


class UnknownDrafterError(RetrieverError):
    """No drafter of this name is to be had."""


def own_drafter(
    indexes: Sequence[Index],
    outputs: Sequence[TokenIds],
    _max_budget: int,
    *,
    vocabulary: Vocabulary | None = None,
    phrases: ListedPhrases | None = None,
) -> EmbeddedDrafter:
    """Return the embedded drafter, compiled, with the outputs as recent generations.

    Raises:
        InvalidRequestError: the indexes are of different vocabularies.
    """
    drafter = EmbeddedDrafter(indexes, vocabulary=vocabulary, phrases=phrases)
    drafter.warm()
    for output in outputs:
        drafter.remember(output)
    return drafter


def remote_drafter(
    addresses: Sequence[str],
    _indexes: Sequence[Index],
    outputs: Sequence[TokenIds],
    _max_budget: int,
    *,
    vocabulary: Vocabulary | None = None,
    credentials: Credentials | None = None,
) -> Drafter:
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


def find_factory(name: str, module: str) -> DrafterFactory:
    """Return the factory of a name: our own, or what the mapping `DRAFTERS` of a module holds.

    Args:
        name: of the drafter.
        module: dotted name of the module; asked for other drafters than our own only.

    Raises:
        UnknownDrafterError: the module cannot be imported or names no such drafter.
    """
    if name == OWN:
        return own_drafter
    factories = _factories(module)
    if name not in factories:
        raise UnknownDrafterError(
            f"no drafter {name!r}: choose from {', '.join([OWN, *factories])}"
        )
    return factories[name]


def _factories(module: str) -> Mapping[str, DrafterFactory]:
    sys.path.append(str(Path.cwd()))
    try:
        factories: Mapping[str, DrafterFactory] = import_module(module).DRAFTERS
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise UnknownDrafterError(
            f"{module} names no drafters ({error}): run from the root of a checkout, or give a "
            "module with a mapping DRAFTERS by --drafters"
        ) from error
    finally:
        sys.path.pop()
    return factories
