"""The log of generations: recent outputs of every tenant on disk, so that they outlive the process.

An output whose `commit` has returned survives the death of the process at any instant. With the
durability "disk" it survives the machine's too: every commit waits for the disk. With "process",
the default, the disk is waited for once in a second, beside the drafting, so that a power failure
may cost the last outputs, or damage the log; then what can be read of it is kept.
"""

import atexit
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Final

from retriever.errors import StateError
from retriever.log.log_files import REFUSALS, LogFiles, open_store
from retriever.log.log_store import FINGERPRINT_KEY, NOTE_KEY, LogStore, Remembered, statistics_key
from retriever.log.options import LogOptions
from retriever.predict.generations import steady_time
from retriever.predict.pool import Entry

_LOGGER: Final = logging.getLogger(__name__)
_SYNC_EVERY_S: Final = 1.0
_SYNCS_PER_SWEEP: Final = 60
_REWRITE_EVERY_S: Final = 3600.0


class GenerationsLog:
    """Outputs and statistics of every tenant, on disk. Safe to call from any thread.

    Where the disk refuses, nothing is raised once the log is open: outputs are not kept, which is
    counted in `failures`, and the first reason is logged as a warning. A process that was forked
    from the one that opened the log cannot use it, which counts as a refusal.

    Args:
        directory: made if it is not there; one drafter at a time may use it.
        fingerprint: of the tokenizer whose tokens will come; empty if it is not known.
        options: how the log is kept.
        clock: seconds since 1970.

    Attributes:
        fingerprint: of the tokenizer whose tokens the log holds; empty while it is not known.
        failures: outputs that could not be written.

    Raises:
        StateError: the directory cannot be used, or a newer version wrote it.
        VocabularyMismatchError: it holds outputs of another tokenizer.
    """

    def __init__(
        self,
        directory: Path,
        fingerprint: str = "",
        options: LogOptions | None = None,
        clock: Callable[[], float] = steady_time,
    ) -> None:
        self.failures = 0
        self._directory = directory
        self._options = options or LogOptions()
        self._clock = clock
        self._pending: deque[Entry] = deque()
        self._lock = Lock()
        self._sync_lock = Lock()  # taken after the other
        self._refused = False
        self._unsynced = False
        self._num_freed = 0  # outputs whose bytes may be in free pages
        self._rewrite_at_s = 0.0
        self._process = os.getpid()
        self._files = LogFiles(directory)
        try:
            self._store, self.fingerprint = open_store(self._files, fingerprint, self._options)
        except BaseException:
            self._files.release()
            raise
        self._keeper = _Keeper(self)
        atexit.register(self.close)

    def load(self, tenant: str) -> Remembered:
        """Return what is kept of a tenant; nothing if it cannot be read."""
        self.commit()
        found = Remembered()

        def read() -> None:
            nonlocal found
            found = self._store.read(tenant, self._clock())

        self._attempt(read)
        if found.num_damaged:
            _LOGGER.warning(
                "%d records of the log of generations in %s are damaged and were left out",
                found.num_damaged,
                self._directory,
            )
        return found

    def append(self, entry: Entry) -> None:
        """Take an output, to be written by the next `commit`. Takes a microsecond."""
        self._pending.append(entry)

    def append_all(self, entries: Sequence[Entry]) -> None:
        """Take outputs that one transaction will hold."""
        self._pending.extend(entries)  # in one step, as the interpreter sees it

    def commit(self) -> None:
        """Write what was appended, by whatever thread, in order; it is kept once this returns."""
        with self._lock:
            entries = [self._pending.popleft() for _ in range(len(self._pending))]
            if entries:
                self._attempt_locked(
                    lambda: self._store.append(entries, self._clock()), len(entries)
                )

    def put_statistics(self, tenant: str, statistics: bytes) -> None:
        """Keep opaque bytes for a tenant in the place of those put before."""
        self._attempt(lambda: self._store.put({statistics_key(tenant): statistics}))

    def statistics(self, tenant: str) -> bytes | None:
        """Return the bytes put last for a tenant, with an output or alone."""
        return self.load(tenant).statistics

    def put_note(self, note: bytes) -> None:
        """Keep opaque bytes in the place of those put before, with an output or alone."""
        self._attempt(lambda: self._store.put({NOTE_KEY: note}))

    def note(self) -> bytes | None:
        """Return the bytes put last; None if there are none, or they cannot be read."""
        found: bytes | None = None

        def read() -> None:
            nonlocal found
            found = self._store.record(NOTE_KEY)

        self._attempt(read)
        return found

    def delete(self, tenant: str) -> None:
        """Remove all that is kept of a tenant, and write the file anew without it.

        Raises:
            StateError: the disk refuses; then all of it is still there, or its records are gone
                and its bytes are still in the file.
        """
        self._delete(tenant, lambda: self._store.delete(tenant))

    def delete_origin(self, tenant: str, origin: bytes) -> None:
        """Remove a tenant's outputs of an origin, and write the file anew without them.

        Raises:
            StateError: as for `delete`.
        """
        self._delete(tenant, lambda: self._store.delete_origin(tenant, origin))

    def _delete(self, tenant: str, action: Callable[[], object]) -> None:
        self.commit()
        with self._lock, self._sync_lock:
            try:
                self._check_usable()
                if action() != 0:  # the file need not be written anew where nothing was removed
                    self._rewrite()
            except REFUSALS as error:
                raise StateError(
                    f"what {self._directory} has of the tenant {tenant!r} cannot be removed: "
                    f"{error}; free space and ask again"
                ) from error

    def _rewrite(self) -> None:
        """Replace the file by a copy without free pages, for these hold what was removed."""
        copy = self._files.new_copy()
        try:
            self._store.copy(copy)
            self._store.close()
            try:
                self._files.replace(copy)
            finally:
                self._store = LogStore(self._files.data, self._options)
        finally:
            copy.unlink(missing_ok=True)

    def evict(self, tenant: str) -> None:
        """Keep nothing of a tenant in memory until it is loaded again."""
        with self._lock:
            self._store.evict(tenant)

    def name_vocabulary(self, fingerprint: str) -> None:
        """State of which tokenizer the tokens are, where that was not known."""
        self.fingerprint = fingerprint
        content = {FINGERPRINT_KEY: fingerprint.encode()}
        self._attempt(lambda: self._store.put(content))

    def sync(self) -> None:
        """Wait until what was committed is on disk."""
        with self._sync_lock:
            if not self._unsynced:
                return
            self._unsynced = False
            try:
                self._store.sync()
            except REFUSALS as error:
                self._refuse(error, 0)

    def remove_expired(self) -> None:
        """Remove what is too old, of all tenants; once in an hour from free pages, too."""

        def remove() -> None:
            self._num_freed += self._store.remove_expired(self._clock())

        self._attempt(remove)
        if self._num_freed and time.monotonic() >= self._rewrite_at_s:
            self._num_freed, self._rewrite_at_s = 0, time.monotonic() + _REWRITE_EVERY_S
            with self._lock, self._sync_lock:
                self._attempt_locked(self._rewrite)

    def close(self) -> None:
        """Write and sync what is left, and let others open the directory; once is enough."""
        if os.getpid() != self._process or self._keeper.is_stopped:
            return
        atexit.unregister(self.close)
        self.commit()
        self._keeper.stop()
        with self._lock:
            if self._files.writable:
                self.sync()
            self._store.close()
            if self._files.writable and not self._refused:
                self._files.seal()
            self._files.release()

    def _attempt(self, action: Callable[[], None], num_outputs: int = 0) -> None:
        with self._lock:
            self._attempt_locked(action, num_outputs)

    def _attempt_locked(self, action: Callable[[], None], num_outputs: int = 0) -> None:
        """Do something that the disk may refuse; count the outputs that are lost by it."""
        try:
            self._check_usable()
            self._unsynced = True
            action()
        except REFUSALS as error:
            self._refuse(error, num_outputs)

    def _check_usable(self) -> None:
        if os.getpid() != self._process:
            raise OSError("the log belongs to the process that opened it, not to a fork of it")
        if self._keeper.is_stopped:
            raise OSError("the log was closed")

    def _refuse(self, error: Exception, num_outputs: int) -> None:
        self.failures += num_outputs
        if not self._refused:
            self._refused = True
            _LOGGER.warning(
                "outputs are not logged in %s: %s; drafting goes on", self._directory, error
            )


class _Keeper:
    """A thread that syncs the log once in a second, and removes what is too old."""

    def __init__(self, log: GenerationsLog) -> None:
        self._log = log
        self._stopped = Event()
        self._thread = Thread(target=self._run, name="foredraft-log", daemon=True)
        self._thread.start()

    @property
    def is_stopped(self) -> bool:
        return self._stopped.is_set()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        turn = 0
        while not self._stopped.wait(_SYNC_EVERY_S):
            if turn % _SYNCS_PER_SWEEP == 0:
                self._log.remove_expired()
            self._log.sync()
            turn += 1
