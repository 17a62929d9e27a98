"""Moving on with indexes that change while they are drafted from.

Documents are added or removed, segments merged, or another index is put in the place of one. Drafts
are made from what is open until the new snapshot is open as well, made into a corpus and warm. Then
one reference is exchanged between two drafts, and the old snapshot is let go of, so that a writer
may remove what it does not need any longer.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Final

from indexer.errors import IndexerError
from indexer.reader import Index
from retriever.corpora import Corpora, rehearse
from retriever.kernels.layout import MAX_MATCH
from retriever.sessions import Sessions

_REHEARSED_SESSIONS: Final = 128

_logger = logging.getLogger(__name__)


class LiveCorpora:
    """The indexes of a drafter, in their latest snapshots.

    Args:
        indexes: open, and closed in the end.
        sessions: what drafts from them.
        lock: held by whoever reads the corpus or uses the sessions.

    Attributes:
        failures: how often an index had changed, or was gone, and could not be opened again.
    """

    def __init__(self, indexes: Sequence[Index], sessions: Sessions, lock: Lock) -> None:
        self.failures = 0
        self._corpora = Corpora.of(indexes)
        self._sessions = sessions
        self._lock = lock
        self._reasons: dict[Path, str] = {}
        self._refreshing = Lock()
        self._is_shut_down = Event()
        self._thread: Thread | None = None

    def watch(self, refresh_s: float) -> None:
        """Refresh every so many seconds from now on, in a thread of our own."""
        self._thread = Thread(
            target=self._watch, args=(refresh_s,), name="foredraft-refresh", daemon=True
        )
        self._thread.start()

    @property
    def current(self) -> Corpora:
        """What is drafted from now; indexes that have changed close with the last reference."""
        return self._corpora

    def refresh(self) -> bool:
        """Move on to what the indexes are now; tell whether any has changed.

        An index that cannot be opened stays as it is; the reason is logged once, and the next
        refresh tries again.
        """
        with self._refreshing:
            newer = None if self._is_shut_down.is_set() else self._newer()
            if newer is None:
                return False
            try:
                self._rehearse(newer)
            except BaseException:
                newer.close(but_for=self._corpora)
                raise
            self._exchange(newer)
            return True

    def shut_down(self) -> None:
        """End the thread and close the indexes; waits for a refresh under way."""
        self._is_shut_down.set()
        if self._thread is not None:
            self._thread.join()
        with self._refreshing:
            self._corpora.close()

    def _watch(self, refresh_s: float) -> None:
        while not self._is_shut_down.wait(refresh_s):
            try:
                self.refresh()
            except Exception:
                self.failures += 1
                _logger.exception("indexes are drafted from as they were before")

    def _newer(self) -> Corpora | None:
        """Open what has changed; None where nothing has, or what has cannot be used."""
        indexes = [self._reopened(index) for index in self._corpora.indexes]
        renewed = [index for index in indexes if index not in self._corpora.indexes]
        if not renewed:
            return None
        try:
            newer = Corpora.of(indexes, self._corpora)
        except (IndexerError, MemoryError) as error:
            for index in renewed:
                self._keep(index.path, error)
                index.close()
            return None
        for index in renewed:
            self._announce(index)
        return newer

    def _reopened(self, index: Index) -> Index:
        """Return an index in its latest snapshot; the same one where it has no other to offer."""
        if index.is_latest():
            self._reasons.pop(index.path, None)
            return index
        try:
            return index.reopened()
        except (IndexerError, OSError) as error:
            self._keep(index.path, error)
            return index

    def _rehearse(self, newer: Corpora) -> None:
        with self._lock:
            contexts = self._sessions.last_tokens(_REHEARSED_SESSIONS, MAX_MATCH)
        rehearse(newer.corpus, contexts)

    def _exchange(self, newer: Corpora) -> None:
        with self._lock:
            older, self._corpora = self._corpora, newer
            self._sessions.turn_to(newer.corpus, older.corpus)
        del older  # out of the lock: what nobody else uses is unmapped here

    def _keep(self, path: Path, error: Exception) -> None:
        """Count and log that an index stays as it is."""
        self.failures += 1
        reason = str(error) or type(error).__name__
        if self._reasons.get(path) != reason:
            self._reasons[path] = reason
            _logger.warning("%s is drafted from as it was before: %s", path, reason)

    def _announce(self, index: Index) -> None:
        self._reasons.pop(index.path, None)
        _logger.info(
            "%s has changed: snapshot %d, %d documents, %d tokens",
            *(index.path, index.number, index.num_documents, index.num_tokens),
        )
