"""The indexes of a drafter as one corpus, refreshed when they change.

An index changes when documents are added or removed, segments are merged, or another index replaces
it. Drafts use the old snapshot until the new snapshot is open and its corpus is warm. Then one
reference is exchanged between two drafts, and the old snapshot is closed. So a writer can remove
unused segments.

If an index's files are truncated while it is in use, the index is dropped. Until a refresh can open
it, it counts as missing, like an index that could not be opened at the start.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Final, Self

from indexer.errors import IndexerError
from indexer.reader import Index, Vocabulary
from retriever.drafter import TokenIds
from retriever.kernels.layout import MAX_MATCH
from retriever.predict.context import Context
from retriever.predict.databases import Databases
from retriever.predict.draft import Predictor
from retriever.predict.generations import Generations
from retriever.predict.pool import Pool
from retriever.predict.searched_corpus import Corpus, no_outcomes, tables_of
from retriever.sessions import cold_start
from retriever.sessions.cut_files import survive_cuts, was_cut
from retriever.sessions.session_table import Sessions
from retriever.tree import Source

_logger = logging.getLogger(__name__)

_REHEARSED_SESSIONS: Final = 128  # the last used: 6 ms of drafting, plus reading pages
_REHEARSAL_NODES: Final = 32  # a usual budget of engines with trees
_PAGE_ENTRIES: Final = 1024
"""Entries of `Segment.starts` in a page of memory."""


@dataclass(frozen=True, slots=True, eq=False)
class Corpora:
    """Open indexes and their joint corpus; immutable.

    Attributes:
        indexes: the indexes, in the order given.
        corpus: their segments and phrase tables.
    """

    indexes: tuple[Index, ...]
    corpus: Corpus

    @classmethod
    def of(
        cls,
        indexes: Sequence[Index],
        before: Self | None = None,
    ) -> Self:
        """Return the corpus of open indexes with the same vocabulary.

        Summing large phrase tables of several indexes takes seconds.

        Args:
            indexes: the indexes to draft from.
            before: the previous corpus. The new corpus continues its outcome counts, and reuses its
                phrase tables if no tables have changed.

        Raises:
            indexer.errors.IndexerError: phrase tables cannot be summed.
        """
        segments = [segment for index in indexes for segment in index.segments]
        if before is not None and _phrases(indexes) == _phrases(before.indexes):
            tables = before.corpus.tables
        else:
            tables = tables_of(indexes)
        outcomes = no_outcomes() if before is None else before.corpus.outcomes
        return cls(tuple(indexes), Corpus(segments, tables, outcomes=outcomes))

    def warm(self) -> None:
        """Map resident pages of the indexes, so that no draft waits for them."""
        for index in self.indexes:
            index.enter_resident_pages()

    def close(self, *, but_for: Self | None = None) -> None:
        """Close all indexes except those of another corpus."""
        kept = but_for.indexes if but_for is not None else ()
        for index in self.indexes:
            if index not in kept:
                index.close()


def rehearse(corpus: Corpus, contexts: Iterable[TokenIds]) -> None:
    """Draft from a new corpus to load its pages, so that the first real draft does not wait.

    Args:
        corpus: the corpus, not in use yet.
        contexts: the last tokens of sequences, int32[n] each.
    """
    cold_start.ensure_kept([cold_start.width_of(corpus)])
    for segment in corpus.segments:
        segment.starts[::_PAGE_ENTRIES].sum()
    predictor, unused = Predictor(_REHEARSAL_NODES), Pool("", Generations(0))
    for context in contexts:
        databases = Databases(Context(context), unused, corpus, learns=False)
        predictor.draft(databases, _REHEARSAL_NODES, 0.0)


def _phrases(indexes: Iterable[Index]) -> list[object]:
    return [index.phrases for index in indexes]


@dataclass(frozen=True, slots=True)
class MissingIndex:
    """An index that should be drafted from but could not be opened yet.

    Attributes:
        path: its directory.
        vocabulary: the vocabulary that it must have.
        hold: whether to hold it in memory.
    """

    path: Path
    vocabulary: Vocabulary
    hold: bool

    def opened(self) -> Index:
        """Open it.

        Raises:
            IndexerError: it still cannot be opened.
        """
        return Index.open(self.path, vocabulary=self.vocabulary, hold=self.hold)


IndexState = Index | MissingIndex
"""An index that is drafted from now, or once it can be opened."""


def _open_among(indexes: Iterable[IndexState]) -> list[Index]:
    return [each for each in indexes if isinstance(each, Index)]


class RefreshedCorpora:
    """The indexes of a drafter, in their latest snapshots.

    Args:
        indexes: open or missing; closed by `shut_down`.
        sessions: sessions that draft from them.
        lock: held while the corpus is read or sessions are used.

    Attributes:
        failures: number of failed attempts to open a changed or missing index.
    """

    def __init__(self, indexes: Sequence[IndexState], sessions: Sessions, lock: Lock) -> None:
        self.failures = 0
        self._indexes = tuple(indexes)
        survive_cuts(_open_among(indexes), self.drop_cut)
        self._corpora = Corpora.of(_open_among(indexes))
        self._sessions = sessions
        self._lock = lock
        self._reasons: dict[Path, str] = {}
        self._refreshing = Lock()
        self._is_shut_down = Event()
        self._is_unwatched = Event()
        self._thread: Thread | None = None

    def watch(self, refresh_s: float) -> None:
        """Refresh periodically from now on, in a separate thread; with 0, stop doing so."""
        self._unwatch()
        if refresh_s > 0 and not self._is_shut_down.is_set():
            self._is_unwatched = Event()
            self._thread = Thread(
                target=self._watch,
                args=(refresh_s, self._is_unwatched),
                name="foredraft-refresh",
                daemon=True,
            )
            self._thread.start()

    @property
    def current(self) -> Corpora:
        """The current corpus; replaced indexes close with its last reference."""
        return self._corpora

    @property
    def indexes(self) -> tuple[IndexState, ...]:
        """The indexes in the order given, including missing ones."""
        return self._indexes

    @property
    def outcome(self) -> tuple[int, int]:
        """Number of nodes from these indexes in all drafts, and number of accepted nodes."""
        drafted, accepted = self._corpora.corpus.outcomes[:, Source.CORPUS].tolist()
        return drafted, accepted

    @property
    def missing(self) -> list[Path]:
        """Indexes that are not drafted from, because they cannot be opened."""
        return [each.path for each in self._indexes if isinstance(each, MissingIndex)]

    def refresh(self) -> bool:
        """Switch to the latest snapshots; return whether any index has changed.

        An index that cannot be opened stays at its old snapshot, or stays missing; the reason is
        logged once, and the next refresh retries.
        """
        with self._refreshing:
            if self._is_shut_down.is_set():
                return False
            dropped = self._drop_cut()
            indexes = tuple(self._latest(each) for each in self._indexes)
            newer = self._corpora_of(indexes)
            if newer is None:
                return dropped
            try:
                survive_cuts(newer.indexes, self.drop_cut)
                self._rehearse(newer)
            except BaseException:
                newer.close(but_for=self._corpora)
                raise
            self._exchange(indexes, newer)
            return True

    def change(self, changed: Callable[[tuple[IndexState, ...]], Sequence[IndexState]]) -> None:
        """Switch to other indexes once their corpus is warm.

        A removed index closes with the last draft that uses it.

        Args:
            changed: returns the new indexes, given the current ones. On an error, new indexes that
                are not among the current ones are closed.

        Raises:
            IndexerError: phrase tables cannot be summed.
        """
        with self._refreshing:
            indexes = tuple(changed(self._indexes))
            newer = self._changed(indexes)
            try:
                survive_cuts(newer.indexes, self.drop_cut)
                self._rehearse(newer)
            except BaseException:
                newer.close(but_for=self._corpora)
                raise
            self._exchange(indexes, newer)

    def retire(self, successor: Corpora) -> None:
        """End the thread and move the sessions to the corpus of another object.

        The indexes close with the last draft that uses them.
        """
        self._is_shut_down.set()
        self._unwatch()
        with self._refreshing, self._lock:
            self._sessions.set_corpus(successor.corpus, self._corpora.corpus)

    def drop_cut(self) -> None:
        """Drop the indexes that had a file truncated while in use.

        Takes as long as summing the phrase tables of the others.
        """
        with self._refreshing:
            if not self._is_shut_down.is_set():
                self._drop_cut()

    def shut_down(self) -> None:
        """End the thread and close the indexes; waits for a running refresh."""
        self._is_shut_down.set()
        self._unwatch()
        with self._refreshing:
            self._corpora.close()

    def _unwatch(self) -> None:
        self._is_unwatched.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _changed(self, indexes: Sequence[IndexState]) -> Corpora:
        """Return the corpus of indexes; new ones among them are closed on an error."""
        try:
            return Corpora.of(_open_among(indexes), self._corpora)
        except BaseException:
            for index in _open_among(indexes):
                if index not in self._corpora.indexes:
                    index.close()
            raise

    def _watch(self, refresh_s: float, is_unwatched: Event) -> None:
        while not is_unwatched.wait(refresh_s):
            try:
                self.refresh()
            except Exception:
                self.failures += 1
                _logger.exception("indexes could not be refreshed: drafts use the old snapshots")

    def _drop_cut(self) -> bool:
        """Turn cut indexes into missing ones; return whether there were any."""
        cut = [index for index in self._corpora.indexes if was_cut(index)]
        if not cut:
            return False
        left = tuple(
            MissingIndex(each.path, each.vocabulary, each.is_held) if each in cut else each
            for each in self._indexes
        )
        self._exchange(left, Corpora.of(_open_among(left), self._corpora))
        for index in cut:
            index.close()
            self.failures += 1
            _logger.error(
                "a file of %s was cut while it was drafted from: drafts continue without this "
                "index until it is intact; replace an index by renaming, never in place",
                index.path,
                extra={"event": "index_cut"},
            )
        return True

    def _corpora_of(self, indexes: Sequence[IndexState]) -> Corpora | None:
        """Return the corpus of indexes; None if no index is new or no corpus can be made."""
        renewed = [each for each in _open_among(indexes) if each not in self._corpora.indexes]
        if not renewed:
            return None
        try:
            newer = Corpora.of(_open_among(indexes), self._corpora)
        except (IndexerError, MemoryError) as error:
            for index in renewed:
                self._keep(index.path, error)
                index.close()
            return None
        for index in renewed:
            self._announce(index)
        return newer

    def _latest(self, index: IndexState) -> IndexState:
        """Return an index in its latest snapshot; the same object if there is no newer one."""
        if isinstance(index, Index) and index.is_latest():
            self._reasons.pop(index.path, None)
            return index
        try:
            return index.opened() if isinstance(index, MissingIndex) else index.reopened()
        except (IndexerError, OSError) as error:
            self._keep(index.path, error)
            return index

    def _rehearse(self, newer: Corpora) -> None:
        with self._lock:
            contexts = self._sessions.last_tokens(_REHEARSED_SESSIONS, MAX_MATCH)
        newer.warm()
        rehearse(newer.corpus, contexts)

    def _exchange(self, indexes: tuple[IndexState, ...], newer: Corpora) -> None:
        with self._lock:
            older, self._corpora = self._corpora, newer
            self._indexes = indexes
            self._sessions.set_corpus(newer.corpus, older.corpus)
        del older  # outside the lock: unused files are unmapped here

    def _keep(self, path: Path, error: Exception) -> None:
        """Count and log that an index stays at its old snapshot or stays missing."""
        self.failures += 1
        reason = str(error) or type(error).__name__
        if self._reasons.get(path) == reason:
            return
        self._reasons[path] = reason
        if path in self.missing:
            _logger.error("%s still cannot be opened, and drafts go without it: %s", path, reason)
        else:
            _logger.warning("drafts keep using the old snapshot of %s: %s", path, reason)

    def _announce(self, index: Index) -> None:
        self._reasons.pop(index.path, None)
        _logger.info(
            "%s has changed: snapshot %d, %d documents, %d tokens",
            *(index.path, index.number, index.num_documents, index.num_tokens),
        )
