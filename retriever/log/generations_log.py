"""The log of generations: outputs of every tenant on disk, which survive the process.

Once `commit` of an output has returned, the output survives a kill of the process. With the
durability "disk" it also survives a power failure, because every commit syncs. With "process", the
default, a thread syncs once a second. A power failure can then lose the last outputs or damage the
log. A damaged log is set aside when it is opened, and drafts start cold.
"""

import atexit
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from threading import Event, Lock, RLock, Thread
from typing import Final, TypeVar

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

_Result = TypeVar("_Result")

_LOGGER: Final = logging.getLogger(__name__)
_BETWEEN_TOLD_S: Final = 60.0  # limits warnings if a disk alternately refuses and accepts
_SYNC_EVERY_S: Final = 1.0  # more often means more disk writes, less often more lost outputs
_SYNCS_PER_SWEEP: Final = 60
_REWRITE_EVERY_S: Final = 3600.0  # removed bytes stay at most this long; a rewrite copies the file


class GenerationsLog:
    """Outputs and statistics of every tenant, on disk. Thread-safe.

    Once the log is open, disk errors are not raised. Lost outputs are counted in `failures`, and
    the first reason is logged as a warning. Use in a forked process counts as such an error.

    Args:
        directory: created if missing; for one drafter at a time.
        fingerprint: fingerprint of the sequences' tokenizer; empty if unknown.
        options: options of the log.
        clock: returns seconds since 1970.

    Attributes:
        fingerprint: fingerprint of the tokenizer whose tokens the log has; empty while unknown.
        failures: outputs that could not be written.

    Raises:
        StateError: the directory cannot be used, or its log has another format version.
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
        self._lock = RLock()
        self._sync_lock = Lock()  # taken after `_lock`
        self._refused = self._is_refusing = False
        self._refused_now = 0
        self._told_s = 0.0
        self._unsynced = False
        self._has_removed_bytes = False  # of deleted or expired outputs, in the file's free pages
        self._rewrite_at_s = 0.0
        self._process = os.getpid()
        self._files = LogFiles(directory)
        try:
            self._store, self.fingerprint = open_store(self._files, fingerprint, self._options)
        except BaseException:
            self._files.release()
            raise
        self._stopped = Event()
        self._keeper = Thread(target=self._keep, name="foredraft-log", daemon=True)
        self._keeper.start()
        atexit.register(self.close)

    def load(self, tenant: str) -> Remembered:
        """Return a tenant's records, without those that cannot be read.

        Outputs that are committed meanwhile may be missing too, so the caller must prevent commits.
        """
        self.commit()
        found = Remembered()

        def read(first: int) -> int | None:
            return self._store.read(tenant, self._clock(), found, first)

        number: int | None = 0
        while number is not None:  # others can commit in between; an error ends the loop
            number = self._attempt(partial(read, number))
        self._warn_of_damaged(found.num_damaged, "the log of generations")
        return found

    def append(self, entry: Entry) -> None:
        """Queue an output for the next `commit`. Takes a microsecond."""
        self._pending.append(entry)

    def append_all(self, entries: Sequence[Entry]) -> None:
        """Queue outputs for one transaction."""
        self._pending.extend(entries)  # atomic under the GIL

    def commit(self) -> None:
        """Write all queued outputs of all threads, in order; durable once this returns.

        Then `Entry.saving` of each output says whether the disk took it.
        """
        with self._lock:
            entries = [self._pending.popleft() for _ in range(len(self._pending))]
            if entries:
                num_outputs = sum(len(entry.output.tokens) > 0 for entry in entries)
                num_written = self._attempt(
                    lambda: self._store.append(entries, self._clock()), num_outputs
                )
                for entry in entries:
                    entry.saving.settle(is_kept=num_written is not None)

    def put_statistics(self, tenant: str, statistics: bytes) -> None:
        """Queue a tenant's statistics, opaque bytes; they replace the previous ones."""
        self.append(Entry(tenant, NO_OUTPUT, statistics))

    def put_note(self, note: bytes) -> None:
        """Store an opaque note; it replaces the previous note."""
        self._attempt(lambda: self._store.put({NOTE_KEY: note}))

    def note(self) -> bytes | None:
        """Return the last note; None if there is none, or it cannot be read."""
        return self._attempt(lambda: self._store.record(NOTE_KEY))

    def findings(self, tenant: str) -> list[FoundRecord]:
        """Return a tenant's findings, the oldest first; damaged ones are removed."""
        found, damaged = self._attempt(lambda: self._store.findings(tenant)) or ([], [])
        if damaged:
            self._warn_of_damaged(len(damaged), "findings")
            self._attempt(lambda: self._store.put_findings(tenant, [], damaged))
        return found

    def found(self, tenant: str, number: int) -> FoundRecord | None:
        """Return the tenant's findings with a number; None if they cannot be read."""
        return self._attempt(lambda: self._store.found(tenant, number))

    def put_findings(
        self, tenant: str, added: Sequence[FoundRecord], removed: Sequence[int]
    ) -> None:
        """Write some findings of a tenant and remove others, all or nothing.

        Raises:
            StorageError: the disk refuses.
        """
        with self._lock:
            try:
                self._check_usable()
                self._unsynced = True
                self._store.put_findings(tenant, added, removed)
            except REFUSALS as error:
                self._refuse(error)
                raise StorageError(
                    f"findings of decoders cannot be written to {self._directory.name}, because "
                    "the disk refuses: drafts continue; free space on it"
                ) from error

    def delete(self, tenant: str) -> None:
        """Remove all records of a tenant, and rewrite the file without them.

        Raises:
            StorageError: the disk refuses. Then either all records remain, or the records are gone
                but their bytes remain in the file.
        """
        self._delete(tenant, b"")

    def delete_origin(self, tenant: str, origin: bytes) -> None:
        """Remove a tenant's outputs of an origin, and its findings; rewrite the file without them.

        Raises:
            StorageError: as for `delete`.
        """
        self._delete(tenant, origin)

    def _delete(self, tenant: str, origin: bytes) -> None:
        self.commit()
        with self._lock:
            try:
                self._check_usable()
                num_removed = self._store.delete(tenant, origin)
                # Even without records, free pages may hold outputs that expired before the start.
                self._has_removed_bytes |= num_removed > 0 or not origin
                if self._has_removed_bytes:  # from this deletion, or one that the disk refused
                    self._rewrite()
            except REFUSALS as error:
                _LOGGER.warning(
                    "%s has data of the tenant %r that cannot be removed: %s; free space and retry",
                    self._directory,
                    tenant,
                    error,
                )
                raise StorageError(
                    "the data is deleted in memory, but the disk refuses to remove it: ask again "
                    "once the operator of the service has freed space on it"
                ) from error

    def _rewrite(self) -> None:
        """Replace the file by a copy without free pages, which still hold removed bytes."""
        copy = self._files.new_copy()
        with self._lock, self._sync_lock:
            try:
                self._store.copy(copy)
                self._store.close()
                try:
                    self._files.replace(copy)
                finally:
                    self._store = LogStore(self._files.data, self._options)
            finally:
                copy.unlink(missing_ok=True)
        self._has_removed_bytes = False

    def snapshot(self, directory: Path) -> int:
        """Copy the log to a new directory that a drafter can open; return its size in bytes.

        Commits wait until the copy is written (0.5 s for 400 MB), but not until it is synced.

        Raises:
            StateError: the disk refuses.
        """
        data, seal = directory / DATA_NAME, directory / SEAL_NAME
        self.commit()
        try:
            directory.mkdir(mode=0o700)
            with self._lock:
                self._check_usable()
                self._store.copy(data)
            write_seal(data, seal)
            seal.chmod(0o600)
            for path in (data, seal, directory):
                sync_path(path)
            return data.stat().st_size
        except REFUSALS as error:
            raise StateError(
                f"{self._directory} cannot be copied to {directory}: {error}; check free space and "
                "permissions, and ask again"
            ) from error

    def name_vocabulary(self, fingerprint: str) -> None:
        """Store the tokenizer's fingerprint, if unknown so far."""
        self.fingerprint = fingerprint
        self._attempt(lambda: self._store.put({FINGERPRINT_KEY: fingerprint.encode()}))

    def sync(self) -> None:
        """Wait until all commits are on disk."""
        with self._sync_lock:
            if not self._unsynced:
                return
            self._unsynced = False
            try:
                self._store.sync()
            except REFUSALS as error:
                self._refuse(error)

    def remove_expired(self) -> None:
        """Remove expired outputs of all tenants; rewrite the file once an hour."""
        with self._lock:
            num_removed = self._attempt(lambda: self._store.remove_expired(self._clock()))
            self._has_removed_bytes |= bool(num_removed)
            if self._has_removed_bytes and time.monotonic() >= self._rewrite_at_s:
                self._rewrite_at_s = time.monotonic() + _REWRITE_EVERY_S
                self._attempt(self._rewrite)

    def close(self) -> None:
        """Write and sync queued outputs, and unlock the directory. Idempotent."""
        if os.getpid() != self._process or self._stopped.is_set():
            return
        atexit.unregister(self.close)
        self.commit()
        self._stopped.set()
        self._keeper.join()
        with self._lock:
            if self._files.writable:
                self.sync()
            self._store.close()
            if self._files.writable and not self._refused:
                self._files.seal()
            self._files.release()

    def _attempt(self, action: Callable[[], _Result], num_outputs: int = 0) -> _Result | None:
        """Run a disk action; on an error, count the lost outputs and return None."""
        with self._lock:
            try:
                self._check_usable()
                self._unsynced = True
                done = action()
            except REFUSALS as error:
                self._refuse(error, num_outputs)
                return None
            if num_outputs:
                self._recover()
            return done

    def _check_usable(self) -> None:
        if os.getpid() != self._process:
            raise OSError("the log belongs to the process that opened it, not to a fork of it")
        if self._stopped.is_set():
            raise OSError("the log was closed")

    def _refuse(self, error: Exception, num_outputs: int = 0) -> None:
        self.failures += num_outputs
        self._refused_now += num_outputs
        if not self._is_refusing:
            self._refused = self._is_refusing = True
            self._told_s = time.monotonic()
            _LOGGER.warning(
                "outputs cannot be saved in %s: %s; drafts continue from memory, but a restart "
                "loses these outputs: free space, or repair the disk",
                self._directory,
                error,
            )

    def _recover(self) -> None:
        """Log that the disk takes outputs again; a nearly full disk does so intermittently."""
        if self._is_refusing and time.monotonic() - self._told_s > _BETWEEN_TOLD_S:
            lost, self._refused_now, self._is_refusing = self._refused_now, 0, False
            _LOGGER.warning(
                "outputs are saved in %s again; %d that were refused are only in memory",
                self._directory,
                lost,
            )

    def _warn_of_damaged(self, num_records: int, kind: str) -> None:
        if num_records:
            _LOGGER.warning(
                "%d records of %s in %s are damaged and were left out",
                num_records,
                kind,
                self._directory,
            )

    def _keep(self) -> None:
        """Sync once a second and remove expired outputs, until the log is closed."""
        turn = 0
        while not self._stopped.wait(_SYNC_EVERY_S):
            if turn % _SYNCS_PER_SWEEP == 0:
                self.remove_expired()
            self.sync()
            turn += 1
