"""Recycled logits that outlive the process: found at its start, kept while it runs.

What verification computes for drafts that were not accepted is worth keeping: Ouroboros (Zhao et
al., 2024, arXiv:2402.13720) drafts from such phrases within a sequence. Here a table of the model's
likely tokens is kept for later runs, and for other decoders of the model through a service.
"""

import time
from logging import getLogger
from threading import Event, Lock, Thread
from typing import Final, Self

import numpy as np
from transformers import PreTrainedModel

from decoder.drafters.recycling import RecycledLogits
from decoder.model.stamp import fingerprint_of
from indexer.reader import Vocabulary
from retriever.drafter import FINDING_BYTES, Findings, FindingsStore
from retriever.errors import InvalidRequestError, NotPossibleError, RetrieverError
from retriever.limits import DEFAULT_RECYCLED_BYTES, MAX_FINDINGS, check_findings

PERIOD_S: Final = 30.0
"""How often what was learned is kept, in seconds: a crash loses as much at most."""

_LOADING_S: Final = 5.0
"""Longest that a start waits for a service; the newest findings come first."""

_CLOSING_S: Final = 10.0
"""Longest that an end waits for a service."""

_log = getLogger(__name__)


def kept_logits(
    recycled: RecycledLogits,
    store: FindingsStore,
    model: PreTrainedModel,
    vocabulary: Vocabulary,
    *,
    max_bytes: int = DEFAULT_RECYCLED_BYTES,
) -> "KeptLogits":
    """Return what keeps recycled logits of a model in a store, within a `with` block.

    Args:
        recycled: what learns from the model's passes.
        store: such as the `state` of an `EmbeddedDrafter` with a directory, or a `SharedFindings`.
        model: whose logits they are, with the weights that it decodes with: what other weights
            found is neither taken nor replaced.
        vocabulary: of its tokenizer.
        max_bytes: most to take from the store, and to give to it at once; `0` for nothing.
    """
    fingerprint = fingerprint_of(model, vocabulary.fingerprint)
    return KeptLogits(recycled, store, fingerprint, vocabulary.size, max_bytes=max_bytes)


class KeptLogits:
    """Keeps what recycled logits learn in a store, from a thread of its own, for a model.

    Nothing that a store says or refuses ends decoding or changes an output: findings that are not
    true cost drafts. What cannot be kept is said once and tried again with the next period. Of
    sequences that are not remembered nothing is kept.

    Args:
        recycled: what learns; a decoding loop may use it meanwhile.
        store: such as the `state` of an `EmbeddedDrafter` with a directory, or a service's client.
        model: its fingerprint; see `decoder.model.stamp`.
        vocabulary_size: tokens that the model knows; what names others is left out.
        max_bytes: most to take from the store, and to give to it at once; `0` for nothing.
        period_s: seconds between two rounds of keeping.
    """

    def __init__(  # noqa: PLR0913  (the last two are options)
        self,
        recycled: RecycledLogits,
        store: FindingsStore,
        model: str,
        vocabulary_size: int,
        *,
        max_bytes: int = DEFAULT_RECYCLED_BYTES,
        period_s: float = PERIOD_S,
    ) -> None:
        self._recycled = recycled
        self._store = store
        self._model = model
        self._vocabulary_size = vocabulary_size
        self._most = max_bytes // FINDING_BYTES
        self._period_s = period_s
        self._kept_until = 0
        self._is_refused = self._most == 0
        self._has_warned = False
        self._saving = Lock()
        self._ended = Event()
        self._thread = Thread(target=self._run, name="foredraft-recycled", daemon=True)

    def load(self) -> int:
        """Take in what the store has of the model; return how many contexts that is."""
        pages: list[Findings] = []
        before, deadline = 0, time.monotonic() + _LOADING_S
        try:
            while not self._is_refused:
                page = self._store.fetch_findings(self._model, before)
                found, before = page.findings, page.before
                # What leaves the model's tables is refused.
                check_findings(found.contexts, found.tokens, found.log_odds, self._vocabulary_size)
                pages.append(found)
                has_enough = sum(map(len, pages)) >= self._most
                if not before or has_enough or time.monotonic() > deadline:
                    break
        except RetrieverError as error:
            self._say("taken from", error)
        for findings in reversed(pages):  # the newest last: they stay where there is no room
            self._recycled.take_in(findings)
        return sum(map(len, pages))

    def save(self, *, deadline_s: float = float("inf")) -> int:
        """Give the store what was learned since the last time; return how many contexts that is.

        Args:
            deadline_s: give up after so many seconds; the rest is given the next time.
        """
        end_s = time.monotonic() + deadline_s
        with self._saving:
            if self._is_refused:
                return 0
            findings, until = self._recycled.learned_since(self._kept_until)
            findings = findings.part(slice(max(0, len(findings) - self._most), None))
            try:
                for begin in range(0, len(findings), MAX_FINDINGS):
                    if time.monotonic() > end_s:
                        return begin
                    part = findings.part(slice(begin, begin + MAX_FINDINGS))
                    is_known = part.tokens.max(axis=1) < self._vocabulary_size  # may be padding
                    self._store.share_findings(self._model, part.part(np.flatnonzero(is_known)))
            except RetrieverError as error:
                self._say("kept in", error)
                return 0
            self._kept_until = until
            self._has_warned = False
            return len(findings)

    def close(self) -> None:
        """Keep what was learned last, and end the thread. Idempotent."""
        if self._ended.is_set():
            return
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        self.save(deadline_s=_CLOSING_S)

    def __enter__(self) -> Self:
        """Load, and keep from now on."""
        count = self.load()
        _log.info("recycled logits of %d contexts, from earlier runs or other decoders", count)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._ended.wait(self._period_s):
            self.save()

    def _say(self, where: str, error: RetrieverError) -> None:
        """Log why nothing is kept: once, until it works again."""
        if isinstance(error, NotPossibleError | InvalidRequestError):
            self._is_refused = True  # asking again would not help
        if not self._has_warned:
            self._has_warned = True
            _log.warning("recycled logits are not %s the store: %s", where, error)
