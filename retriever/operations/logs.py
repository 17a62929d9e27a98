"""What a service logs: one line for each event, without tokens and without anybody's text.

Of an exception its kind is logged and where it was raised, never its message: that may hold what
a caller sent. `OSError` is the exception: its reason is the system's.
"""

import json
import logging
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from retriever.operations.settings import LogFormat, LogLevel

_OURS: Final = ("indexer", "retriever")
_FRAMES: Final = 8


def log_to_standard_error(log_format: LogFormat, log_level: LogLevel) -> None:
    """Log our packages from a level on, and everybody else's warnings, to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if log_format == "json" else TextLines())
    for name in _OURS:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(log_level.upper())
    logging.getLogger().handlers = [handler]


def log_event(
    logger: logging.Logger, level: int, event: str, message: str, **fields: object
) -> None:
    """Log an event that programs can tell by its name, and what is to be known of it."""
    logger.log(level, message, extra={"event": event, "fields": fields})


class JsonLines(logging.Formatter):
    """An object a line: `time`, `level`, `logger`, `event` where it has a name, `message`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        return json.dumps(_entry(record), default=str)


class TextLines(logging.Formatter):
    """A line to be read: time, level, message, and what else is known as `name=value`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        entry = _entry(record)
        begin = (entry.pop("time"), entry.pop("level"), entry.pop("message"))
        entry.pop("logger")
        entry.pop("event", None)
        rest = (f"{name}={json.dumps(value, default=str)}" for name, value in entry.items())
        line = " ".join((*begin, *rest))
        return "".join(each if each.isprintable() else f"\\x{ord(each):02x}" for each in line)


def _entry(record: logging.LogRecord) -> dict[str, Any]:
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    entry = {
        "time": f"{stamp}.{int(record.msecs):03d}Z",
        "level": record.levelname.lower(),
        "logger": record.name,
    }
    if hasattr(record, "event"):
        entry["event"] = record.event
    # Of others' messages the first line: the next ones show values.
    message = record.getMessage()
    ours = record.name.partition(".")[0] in _OURS
    entry["message"] = message if ours else message.partition("\n")[0]
    entry.update(getattr(record, "fields", {}))
    if record.exc_info and record.exc_info[1] is not None:
        entry |= _exception(record.exc_info[1], record.exc_info[2])
    return entry


def _exception(error: BaseException, at: TracebackType | None) -> dict[str, Any]:
    frames = traceback.extract_tb(at)[-_FRAMES:]
    told = {
        "exception": type(error).__name__,
        "at": [f"{Path(each.filename).name}:{each.lineno} {each.name}" for each in frames],
    }
    if isinstance(error, OSError) and error.strerror:
        told["reason"] = error.strerror
    return told
