"""Recycled logits that outlive the process: loaded at the start, saved regularly.

Verifying rejected drafts also gives useful results: Ouroboros (Zhao et al., 2024, arXiv:2402.13720)
drafts from such phrases within a sequence. This module saves a table of the model's likely tokens
for later runs and, through a service, for other decoders of the model.
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
"""Seconds between two saves: a crash loses at most the results of this time."""

_LOADING_S: Final = 5.0
"""Most seconds that a start waits for a service; the newest table entries come first."""

_CLOSING_S: Final = 10.0
"""Most seconds that closing waits for a service."""

_log = getLogger(__name__)


def kept_logits(
    recycled: RecycledLogits,
    store: FindingsStore,
    model: PreTrainedModel,
    vocabulary: Vocabulary,
    *,
    max_bytes: int = DEFAULT_RECYCLED_BYTES,
) -> "KeptLogits":
    """Return a context manager that saves a model's recycled logits to a store.

    Args:
        recycled: recycled logits that learn from the model's passes.
        store: where entries are saved, for example the `state` of an `EmbeddedDrafter` with a
            directory, or a `SharedFindings`.
        model: the model of the logits, with the weights that it decodes with; saved entries of
            other weights are neither loaded nor replaced.
        vocabulary: vocabulary of the model's tokenizer.
        max_bytes: most bytes to load from the store, and to save to it at once; `0` for none.
    """
    fingerprint = fingerprint_of(model, vocabulary.fingerprint)
    return KeptLogits(recycled, store, fingerprint, vocabulary.size, max_bytes=max_bytes)


class KeptLogits:
    """Saves a model's recycled logits to a store from a background thread.

    Whatever the store answers, decoding continues and outputs are the same: wrong entries only make
    drafts worse. A failed save is logged once and retried in the next period. Nothing from
    sequences that are not remembered is saved.

    Args:
        recycled: the recycled logits; a decoding loop may use them at the same time.
        store: where entries are saved, for example the `state` of an `EmbeddedDrafter` with a
            directory, or a service's client.
        model: fingerprint of the model; see `decoder.model.stamp`.
        vocabulary_size: number of tokens that the model knows; entries with other tokens are left
            out.
        max_bytes: most bytes to load from the store, and to save to it at once; `0` for none.
        period_s: seconds between two saves.
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
        """Load the model's entries from the store; return the number of contexts."""
        pages: list[Findings] = []
        before, deadline = 0, time.monotonic() + _LOADING_S
        try:
            while not self._is_refused:
                page = self._store.fetch_findings(self._model, before)
                found, before = page.findings, page.before
                # Entries outside the model's vocabulary are refused.
                check_findings(found.contexts, found.tokens, found.log_odds, self._vocabulary_size)
                pages.append(found)
                has_enough = sum(map(len, pages)) >= self._most
                if not before or has_enough or time.monotonic() > deadline:
                    break
        except RetrieverError as error:
            self._say("taken from", error)
        for findings in reversed(pages):  # the newest last, so that they stay if the table is full
            self._recycled.take_in(findings)
        return sum(map(len, pages))

    def save(self, *, deadline_s: float = float("inf")) -> int:
        """Save the entries learned since the last save; return the number of contexts.

        Args:
            deadline_s: stop after this many seconds; the next save includes the rest.
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
                    is_known = part.tokens.max(axis=1) < self._vocabulary_size  # else padding
                    self._store.share_findings(self._model, part.part(np.flatnonzero(is_known)))
            except RetrieverError as error:
                self._say("kept in", error)
                return 0
            self._kept_until = until
            self._has_warned = False
            return len(findings)

    def close(self) -> None:
        """Save once more and end the thread. Idempotent."""
        if self._ended.is_set():
            return
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        self.save(deadline_s=_CLOSING_S)

    def __enter__(self) -> Self:
        """Load the saved entries, and start saving."""
        count = self.load()
        if count:
            _log.info("recycled logits of %d contexts, from earlier runs or other decoders", count)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._ended.wait(self._period_s):
            self.save()

    def _say(self, where: str, error: RetrieverError) -> None:
        """Log why nothing is loaded or saved: once, until saving works again."""
        if isinstance(error, NotPossibleError | InvalidRequestError):
            self._is_refused = True  # retrying would not help
        if not self._has_warned:
            self._has_warned = True
            _log.warning("recycled logits are not %s the store: %s", where, error)
