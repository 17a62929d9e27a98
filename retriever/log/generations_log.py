"""The log of generations: outputs of every tenant on disk, which survive the process.

An output whose `commit` has returned survives a kill of the process. With the durability "disk" it
also survives a power failure: every commit syncs. With "process", the default, a thread syncs once
a second, so that a power failure can lose the last outputs or damage the log; its readable records
are then salvaged.
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

from retriever.errors import StateError, StorageError
from retriever.log.log_files import (
    DATA_NAME,
    REFUSALS,
    SEAL_NAME,
    LogFiles,
    open_store,
    sync_path,
    write_seal,
)
from retriever.log.log_store import FINGERPRINT_KEY, NOTE_KEY, FoundRecord, LogStore, Remembered
from retriever.log.options import LogOptions
from retriever.predict.generations import NO_OUTPUT, steady_time
from retriever.predict.pool import Entry

_LOGGER: Final = logging.getLogger(__name__)
_SYNC_EVERY_S: Final = 1.0  # outputs lost by a power failure, against disk writes
_SYNCS_PER_SWEEP: Final = 60
_REWRITE_EVERY_S: Final = 3600.0  # removed bytes stay this long at most; a rewrite copies the file


class GenerationsLog:
    """Outputs and statistics of every tenant, on disk. Thread-safe.

    Once the log is open, disk errors are not raised: lost outputs are counted in `failures`, and
    the first reason is logged as a warning. Use in a forked process counts as such an error.

    Args:
        directory: created if missing; for one drafter at a time.
        fingerprint: of the sequences' tokenizer; empty if unknown.
        options: of the log.
        clock: seconds since 1970.

    Attributes:
        fingerprint: of the tokenizer whose tokens the log holds; empty while unknown.
        failures: outputs that could not be written.

    Raises:
        StateError: the directory cannot be used, or its log is of another format version.
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
        self._is_rewrite_due = False  # bytes of deleted outputs are in the file
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
        """Return a tenant's records; those that cannot be read are missing.

        Outputs that are committed meanwhile may be missing, too: the caller holds them off.
        """
        self.commit()
        found = Remembered()
        first: int | None = 0

        def read() -> None:
            nonlocal first
            first = self._store.read(tenant, self._clock(), found, number)

        while first is not None:  # others commit in between
            number, first = first, None  # an error ends the reading
            self._attempt(read)
        if found.num_damaged:
            _LOGGER.warning(
                "%d records of the log of generations in %s are damaged and were left out",
                found.num_damaged,
                self._directory,
            )
        return found

    def append(self, entry: Entry) -> None:
        """Queue an output for the next `commit`. Takes a microsecond."""
        self._pending.append(entry)

    def append_all(self, entries: Sequence[Entry]) -> None:
        """Queue outputs for one transaction."""
        self._pending.extend(entries)  # atomic under the GIL

    def commit(self) -> None:
        """Write all queued outputs of all threads, in order; durable once this returns.

        Their fates tell whether the disk took them.
        """
        with self._lock:
            entries = [self._pending.popleft() for _ in range(len(self._pending))]
            if entries:
                num_outputs = sum(len(entry.output.tokens) > 0 for entry in entries)
                is_kept = self._attempt_locked(
                    lambda: self._store.append(entries, self._clock()), num_outputs
                )
                for entry in entries:
                    entry.fate.settle(is_kept=is_kept)

    def put_statistics(self, tenant: str, statistics: bytes) -> None:
        """Queue opaque bytes of a tenant, which replace the previous ones."""
        self.append(Entry(tenant, NO_OUTPUT, statistics))

    def statistics(self, tenant: str) -> bytes | None:
        """Return a tenant's last stored bytes, put with an output or alone."""
        return self.load(tenant).statistics

    def put_note(self, note: bytes) -> None:
        """Store an opaque note, replacing the previous one."""
        self._attempt(lambda: self._store.put({NOTE_KEY: note}))

    def note(self) -> bytes | None:
        """Return the last note; None if there is none, or it cannot be read."""
        found: bytes | None = None

        def read() -> None:
            nonlocal found
            found = self._store.record(NOTE_KEY)

        self._attempt(read)
        return found

    def findings(self, tenant: str) -> list[FoundRecord]:
        """Return a tenant's findings, the oldest first; damaged ones are removed."""
        found: list[FoundRecord] = []
        damaged: list[int] = []

        def read() -> None:
            records, numbers = self._store.findings(tenant)
            found.extend(records)
            damaged.extend(numbers)

        self._attempt(read)
        if damaged:
            _LOGGER.warning(
                "%d records of findings in %s are damaged and were left out",
                len(damaged),
                self._directory,
            )
            self._attempt(lambda: self._store.put_findings(tenant, [], damaged))
        return found

    def found(self, tenant: str, number: int) -> FoundRecord | None:
        """Return a tenant's findings of a number; None where they cannot be read."""
        found: list[FoundRecord | None] = []
        self._attempt(lambda: found.append(self._store.found(tenant, number)))
        return found[0] if found else None

    def put_findings(
        self, tenant: str, added: Sequence[FoundRecord], removed: Sequence[int]
    ) -> None:
        """Write findings of a tenant and remove others, all or nothing.

        Raises:
            StorageError: the disk refuses.
        """
        with self._lock:
            if not self._attempt_locked(lambda: self._store.put_findings(tenant, added, removed)):
                raise StorageError(
                    f"what decoders found likely is not kept in {self._directory.name}, as its "
                    "disk refuses: drafts go on; free space, and it is kept again"
                )

    def delete(self, tenant: str) -> None:
        """Remove all records of a tenant, and rewrite the file without them.

        Raises:
            StorageError: the disk refuses: either all records remain, or they are removed but their
            bytes remain in the file.
        """
        self._delete(tenant, lambda: self._store.delete(tenant))

    def delete_origin(self, tenant: str, origin: bytes) -> None:
        """Remove a tenant's outputs of an origin, and its findings; rewrite the file without them.

        Raises:
            StorageError: as for `delete`.
        """
        self._delete(tenant, lambda: self._store.delete_origin(tenant, origin))

    def _delete(self, tenant: str, action: Callable[[], object]) -> None:
        self.commit()
        with self._lock, self._sync_lock:
            try:
                self._check_usable()
                self._is_rewrite_due |= action() != 0  # still due if the disk refuses it
                if self._is_rewrite_due:
                    self._rewrite()
                    self._is_rewrite_due = False
            except REFUSALS as error:
                _LOGGER.warning(
                    "what %s has of the tenant %r cannot be removed: %s; free space and ask again",
                    self._directory,
                    tenant,
                    error,
                )
                raise StorageError(
                    "the data is deleted in memory, and the disk refuses to remove it: ask again "
                    "once the operator of the service has made room on it"
                ) from error

    def _rewrite(self) -> None:
        """Replace the file by a copy without free pages, which hold removed bytes."""
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

    def snapshot(self, directory: Path) -> int:
        """Copy the log to a new directory, which a drafter can open; return its bytes.

        Commits wait until the copy is written (0.5 s for 400 MB), and not until it is synced.

        Raises:
            StateError: the disk refuses.
        """
        data = directory / DATA_NAME
        self.commit()
        try:
            directory.mkdir(mode=0o700)
            with self._lock:
                self._check_usable()
                self._store.copy_unsynced(data)
            write_seal(data, directory / SEAL_NAME)
            (directory / SEAL_NAME).chmod(0o600)
            for path in (data, directory / SEAL_NAME, directory):
                sync_path(path)
            return data.stat().st_size
        except REFUSALS as error:
            raise StateError(
                f"{self._directory} cannot be copied to {directory}: {error}; free space and "
                "permissions, and ask again"
            ) from error

    def name_vocabulary(self, fingerprint: str) -> None:
        """Store the tokenizer's fingerprint, if unknown so far."""
        self.fingerprint = fingerprint
        content = {FINGERPRINT_KEY: fingerprint.encode()}
        self._attempt(lambda: self._store.put(content))

    def sync(self) -> None:
        """Wait until all commits are on disk."""
        with self._sync_lock:
            if not self._unsynced:
                return
            self._unsynced = False
            try:
                self._store.sync()
            except REFUSALS as error:
                self._refuse(error, 0)

    def remove_expired(self) -> None:
        """Remove expired outputs of all tenants; rewrite the file once an hour."""

        def remove() -> None:
            self._num_freed += self._store.remove_expired(self._clock())

        self._attempt(remove)
        if self._num_freed and time.monotonic() >= self._rewrite_at_s:
            self._num_freed, self._rewrite_at_s = 0, time.monotonic() + _REWRITE_EVERY_S
            with self._lock, self._sync_lock:
                self._attempt_locked(self._rewrite)

    def close(self) -> None:
        """Write and sync queued outputs, and unlock the directory. Idempotent."""
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

    def _attempt_locked(self, action: Callable[[], None], num_outputs: int = 0) -> bool:
        """Run an action of the disk; on an error count the lost outputs, and return False."""
        try:
            self._check_usable()
            self._unsynced = True
            action()
        except REFUSALS as error:
            self._refuse(error, num_outputs)
            return False
        return True

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
    """A thread that syncs the log once a second, and removes expired outputs."""

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
