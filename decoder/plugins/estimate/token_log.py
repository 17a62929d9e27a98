"""A log of prompts and outputs as token ids on disk: parsed once, replayed many times."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from decoder.plugins.estimate.options import KIND_FIELDS, NO_FIELD
from retriever.errors import TraceError
from retriever.traces.trace_spool import TraceSpool, trace_spool
from retriever.traces.traces import Trace

ALL: Final = "all"
OTHERS: Final = "others"
MAX_KINDS: Final = 12
"""Most kinds of traffic in a report, so that it fits on a screen; later kinds count as `OTHERS`."""

_LEAST: Final = 2
"""Fewest tokens of an output that can be drafted for: the prompt's pass yields the first token."""


@dataclass(frozen=True, slots=True, eq=False)
class LoggedRecord:
    """A recorded prompt and output.

    Attributes:
        kind: kind of traffic.
        trace: tokens of the prompt and the output.
    """

    kind: str
    trace: Trace


class TokenLog:
    """Records in a temporary file; only one at a time is in memory.

    Attributes:
        kinds: kinds of traffic, in order of appearance.
        field: field of a record that names the kind; empty if there is none.
        num_tokens: tokens of all outputs.
        num_short: outputs of fewer than two tokens, which leave nothing to draft.
    """

    def __init__(self, spool: TraceSpool, field: str | None) -> None:
        self._spool = spool
        self._stated = field
        self.kinds: list[str] = []
        self.field = ""
        self.num_tokens = 0
        self.num_short = 0

    @property
    def num_records(self) -> int:
        """Number of records."""
        return self._spool.num_traces

    def write(self, trace: Trace, row: dict[str, Any]) -> None:
        """Append a record.

        Raises:
            TraceError: it is the first record, and it lacks the field that `--by` names.
        """
        if self.num_records == 0:
            self.field = self._field_of(row)
        self._spool.write(trace, self._number(row))
        self.num_tokens += len(trace.output)
        self.num_short += len(trace.output) < _LEAST

    def __iter__(self) -> Iterator[LoggedRecord]:
        for kind, trace in self._spool.labelled():
            yield LoggedRecord(self.kinds[kind], trace)

    def _field_of(self, row: dict[str, Any]) -> str:
        if self._stated == NO_FIELD:
            return ""
        if self._stated is None:
            return next((name for name in KIND_FIELDS if isinstance(_value(row, name), str)), "")
        if _value(row, self._stated) is None:
            raise TraceError(
                f"--by {self._stated}: the first record has no such field; its fields are "
                f"{', '.join(row)}: name one of these, or {NO_FIELD}"
            )
        return self._stated

    def _number(self, row: dict[str, Any]) -> int:
        value = _value(row, self.field)
        kind = ALL if not self.field else OTHERS if value is None else str(value)
        if kind not in self.kinds:
            if len(self.kinds) >= MAX_KINDS:
                kind = OTHERS
            if kind not in self.kinds:
                self.kinds.append(kind)
        return self.kinds.index(kind)


def _value(row: dict[str, Any], field: str) -> Any:
    """Return a field of a record, or of the `request` that servers log in the record."""
    request = row.get("request")
    inner = request if isinstance(request, dict) else {}
    return row.get(field, inner.get(field))


@contextmanager
def token_log(
    rows: Iterable[tuple[Trace, dict[str, Any]]], field: str | None = None
) -> Iterator[TokenLog]:
    """Write a log to a temporary file, which exists until the block ends.

    Args:
        rows: traces, each with the row that it was read from.
        field: field of a row that names its kind; None for the first of `KIND_FIELDS` that the
            first row has; `NO_FIELD` for a single kind.

    Raises:
        TraceError: a row cannot be read as a trace, or no output has two tokens.
    """
    with trace_spool() as spool:
        log = TokenLog(spool, field)
        for trace, row in rows:
            log.write(trace, row)
        if log.num_short == log.num_records:
            raise TraceError("no output of the log has two tokens: there is nothing to draft")
        yield log
