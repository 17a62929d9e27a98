"""Logging of a service: one line per event, without tokens or callers' text.

For an exception, the type and location are logged, never the message, which may contain a caller's
input. For `OSError`, the system's reason is logged too.
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
_FRAMES: Final = 8  # innermost frames: enough to find the location, in one line


def log_to_standard_error(log_format: LogFormat, log_level: LogLevel) -> None:
    """Log messages of our packages from a level up, and warnings of others, to standard error."""
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
    """Log an event with a machine-readable name and its fields."""
    logger.log(level, message, extra={"event": event, "fields": fields})


class JsonLines(logging.Formatter):
    """One JSON object per line: `time`, `level`, `logger`, `event` if it has a name, `message`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        return json.dumps(_entry(record), default=str)


class TextLines(logging.Formatter):
    """Readable lines: time, level, message, and further fields as `name=value`."""

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
    # Only the first line of other packages' messages: further lines may show values.
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
