"""The audit log: one JSON line for the start and one for the end of every operator's change.

A change is refused if its start cannot be written and synced, so that no change goes unrecorded.
Both lines have the same `id`; if the second line is missing, the process ended during the change.
Lines with the outcome are also in the service's log.
"""

import json
import logging
import os
import secrets
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, Final

from retriever.errors import NotPossibleError, RetrieverError, SettingsError
from retriever.operations.logs import log_event

_MODE: Final = 0o600  # the file names tenants, sessions and operators
_OTHERS_MAY: Final = stat.S_IRWXG | stat.S_IRWXO
_OK: Final = "OK"
_LOGGER: Final = logging.getLogger(__name__)
_LOGGER.setLevel(logging.INFO)  # changes are logged at any --log-level


@dataclass(slots=True)
class Change:
    """A change in progress.

    Attributes:
        outcome: what the change did, for the second line; set by the block.
    """

    outcome: dict[str, Any] = field(default_factory=dict)


class AuditLog:
    """Records changes. Thread-safe; blocks while it waits for the disk.

    Args:
        path: path of the file, which is created with mode 0600 and appended to. It is opened for
            each line, so that it can be rotated by renaming. None to record changes only in the
            service's log.

    Raises:
        SettingsError: the file cannot be written, or others may read or write it.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock = Lock()
        if path is not None:
            try:
                self._append("")
            except OSError as error:
                raise SettingsError(f"--audit-log: {_why(path, error)}") from error

    @contextmanager
    def change(self, who: str, call: str, what: Mapping[str, Any]) -> Iterator[Change]:
        """Record that a change starts and, after the block, how it ended.

        Args:
            who: name of the operator.
            call: name of the call.
            what: arguments of the call, for JSON.

        Raises:
            NotPossibleError: the start cannot be recorded; the block does not run.
        """
        said = {"id": secrets.token_hex(8), "who": who, "call": call, "what": dict(what)}
        try:
            self._write({"time": _now(), "stage": "begun", **said})
        except OSError as error:
            raise NotPossibleError(
                "nothing was changed, because the audit log cannot be written: "
                f"{error.strerror or error}; free space, or fix its permissions, and ask again"
            ) from error
        change, status = Change(), _OK
        try:
            yield change
        except BaseException as error:
            status = _status_of(error)
            change.outcome |= {"reason": str(error)} if isinstance(error, RetrieverError) else {}
            raise
        finally:
            ended = {**said, "status": status, "outcome": change.outcome}
            self._record_end(ended)

    def _record_end(self, ended: Mapping[str, Any]) -> None:
        try:
            self._write({"time": _now(), "stage": "ended", **ended})
        except OSError as error:
            log_event(
                *(_LOGGER, logging.ERROR, "audit_failed"),
                f"the end of a change is not in the audit log: {error.strerror or error}",
                id=ended["id"],
            )
        is_done = ended["status"] == _OK
        level = logging.INFO if is_done else logging.WARNING
        said = "an operator's change was made" if is_done else "an operator's change was refused"
        log_event(*(_LOGGER, level, "audit", said), **ended)

    def _write(self, entry: Mapping[str, Any]) -> None:
        if self._path is not None:
            self._append(json.dumps(entry, ensure_ascii=True) + "\n")

    def _append(self, line: str) -> None:
        """Append a line and wait until it is on disk; raises OSError.

        A partial line from an earlier process is terminated first.
        """
        if self._path is None:
            return
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        with self._lock:
            descriptor = os.open(self._path, flags, _MODE)
            try:
                size = _checked_size(descriptor)
                is_torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
                content = b"\n" * is_torn + line.encode()
                written = os.write(descriptor, content) if content else 0
                if written < len(content):
                    os.ftruncate(descriptor, size)
                    raise OSError("the disk is full")
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _checked_size(descriptor: int) -> int:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise OSError("it is not a file")
    if found.st_mode & _OTHERS_MAY:
        raise OSError(f"others may use it (mode {stat.S_IMODE(found.st_mode):04o}): chmod 600")
    return found.st_size


def _why(path: Path, error: OSError) -> str:
    return f"{path} cannot be written: {error.strerror or error}"


def _now() -> str:
    now_s = time.time()
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now_s))
    return f"{stamp}.{int(now_s % 1 * 1000):03d}Z"


def _status_of(error: BaseException) -> str:
    return getattr(error, "reason", "") or type(error).__name__
