"""Opens the drafter that an engine's settings describe.

An engine must start and run even without drafts. So if a source cannot be opened, it is left out
with a warning.
"""

import math
from collections.abc import Sequence
from functools import partial
from logging import getLogger
from pathlib import Path
from typing import Any, Final

from decoder.engines.engine_options import EngineSettings
from decoder.engines.late_drafter import LateDrafter
from indexer.errors import IndexerError
from indexer.reader import Index, Vocabulary, token_dtype
from indexer.tokenizer import vocabulary_of
from retriever.client.connecting import named_services
from retriever.client.credentials import open_channel
from retriever.client.resilient import ResilientDrafter
from retriever.drafter import Drafter
from retriever.errors import RetrieverError
from retriever.limits import Limits
from retriever.predict.phrases import Encode, ListedPhrases
from retriever.sessions.cold_start import are_kept, defer_rare
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.sessions.options import load_phrases
from retriever.wire.channels import CLIENT_OPTIONS

_log = getLogger(__name__)

DEADLINE_S: Final = 0.02
"""Default seconds that a step waits for drafts. Retrieval in the engine's process takes far less. A
large model's pass takes about as long, so a stalled drafter costs about one pass."""

_NARROW: Final = token_dtype(0).itemsize

_CONNECT_S: Final = 2.0
"""Seconds that a start waits for a service: enough for a service on another machine, and short
compared to loading a model. After that, the drafter connects by itself."""


def open_drafter(
    settings: EngineSettings, vocabulary: Vocabulary | None, encode: Encode | None
) -> Drafter:
    """Return a drafter; it may still be connecting or compiling, so that the engine starts at once.

    Args:
        settings: the sources of drafts.
        vocabulary: vocabulary of the engine's tokenizer. If it is `None`, the tokenizer is unknown,
            and indexes and listed phrases are left out.
        encode: the `encode` method of that tokenizer; `None` if it is unknown.

    Raises:
        CredentialsError: a token or certificate for a service cannot be read.
        InvalidRequestError: a service is named twice.
    """
    embedded = _own(settings, vocabulary, encode)
    return _resilient(settings, vocabulary, embedded) if settings.server else embedded


def vocabulary_and_encoder(tokenizer: Any) -> tuple[Vocabulary | None, Encode | None]:
    """Return the vocabulary of an engine's tokenizer and its `encode` without special tokens.

    Args:
        tokenizer: the tokenizer. If it is `None`, both results are `None`. If its vocabulary cannot
            be read, this is logged, and the vocabulary is `None`.
    """
    if tokenizer is None:
        return None, None
    encode = partial(tokenizer.encode, add_special_tokens=False)
    try:
        return vocabulary_of(tokenizer), encode
    except Exception as error:  # noqa: BLE001  each tokenizer raises its own errors
        _log.warning("the tokenizer's vocabulary is not known: %s", error)
        return None, encode


def _resilient(
    settings: EngineSettings, vocabulary: Vocabulary | None, local: Drafter
) -> ResilientDrafter:
    addresses, are_parts = named_services(settings.server)
    drafter = ResilientDrafter(
        addresses,
        deadline_s=settings.deadline_s,
        local=local,
        are_parts=are_parts,
        vocabulary_fingerprint=_fingerprint(vocabulary),
        open_channel=partial(
            open_channel, credentials=settings.shown_credentials(), options=CLIENT_OPTIONS
        ),
    )
    if not drafter.wait(_CONNECT_S):
        _log.warning("no drafts from %s for now: it cannot be reached", ", ".join(addresses))
    return drafter


def _own(
    settings: EngineSettings, vocabulary: Vocabulary | None, encode: Encode | None
) -> EmbeddedDrafter | LateDrafter:
    """Return the drafter in this process; a `LateDrafter` if its kernels are not yet compiled."""
    width = token_dtype(vocabulary.size).itemsize if settings.index and vocabulary else _NARROW
    opened = partial(_embedded, settings, vocabulary, encode)
    if not are_kept([width]):
        return LateDrafter(opened, vocabulary)
    drafter = opened()
    drafter.warm()
    defer_rare()
    return drafter


def _embedded(
    settings: EngineSettings, vocabulary: Vocabulary | None, encode: Encode | None
) -> EmbeddedDrafter:
    make = partial(
        EmbeddedDrafter,
        _indexes(settings.index, vocabulary, hold=settings.hold_indexes),
        vocabulary=vocabulary,
        limits=Limits(generations_tokens=settings.generations_tokens, idle_session_s=math.inf),
        durability=settings.durability,
        phrases=_phrases(settings.phrases, vocabulary, encode),
        refresh_s=settings.refresh if settings.index else 0.0,
        threads=settings.threads,
    )
    try:
        drafter = make(state=settings.state)
    except RetrieverError as error:  # the folder is in use, full, or for another tokenizer
        _log.warning("outputs are kept in memory only: %s", error)
        drafter = make(state=None)
    return drafter


def _indexes(paths: Sequence[Path], vocabulary: Vocabulary | None, *, hold: bool) -> list[Index]:
    """Open the indexes for a vocabulary; log which are left out, and why."""
    opened = []
    for path in paths:
        if vocabulary is None:
            _log.warning("no drafts from %s: the engine's tokenizer is not known", path)
            continue
        try:
            opened.append(Index.open(path, vocabulary=vocabulary, hold=hold))
        except (IndexerError, OSError) as error:
            _log.warning("no drafts from %s: %s", path, error)
    return opened


def _phrases(
    paths: Sequence[Path], vocabulary: Vocabulary | None, encode: Encode | None
) -> ListedPhrases | None:
    if not paths:
        return None
    if vocabulary is None or encode is None:
        _log.warning("no listed phrases: the engine's tokenizer is not known")
        return None
    try:
        return load_phrases(paths, encode, vocabulary, say=_log.info)
    except RetrieverError as error:
        _log.warning("no listed phrases: %s", error)
        return None


def _fingerprint(vocabulary: Vocabulary | None) -> str:
    return "" if vocabulary is None else vocabulary.fingerprint
