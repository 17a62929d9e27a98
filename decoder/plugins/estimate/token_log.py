"""A log of prompts and outputs as token ids on disk: read once, gone through many times."""

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
"""Kinds that are told apart, the first of the log: as many rows as a screen shows."""

_LEAST: Final = 2
"""Tokens of an output that leave something to draft: the prompt's pass brings the first."""


@dataclass(frozen=True, slots=True, eq=False)
class LoggedRecord:
    """A recorded prompt and output.

    Attributes:
        kind: of traffic.
        trace: the tokens.
    """

    kind: str
    trace: Trace


class TokenLog:
    """Records in a temporary file, of which one at a time is in memory.

    Attributes:
        kinds: in order of appearance.
        field: that tells them; empty if none does.
        num_tokens: of their outputs.
        num_short: outputs of less than two tokens: the prompt's pass brings the first.
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
        """How many records there are."""
        return self._spool.num_traces

    def write(self, trace: Trace, row: dict[str, Any]) -> None:
        """Append a record.

        Raises:
            TraceError: it is the first and has no such field as was stated.
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
                f"--by {self._stated}: the first record has no such field, but "
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
    """Return a field of a record, or of the request in it, as servers log it."""
    request = row.get("request")
    inner = request if isinstance(request, dict) else {}
    return row.get(field, inner.get(field))


@contextmanager
def token_log(
    rows: Iterable[tuple[Trace, dict[str, Any]]], field: str | None = None
) -> Iterator[TokenLog]:
    """Write a log to a temporary file and have it during the block.

    Args:
        rows: traces with the rows that they were read from.
        field: of a row that tells its kind; None for the first of `KIND_FIELDS` that the first row
            has, `NO_FIELD` for none.

    Raises:
        TraceError: a row is no trace, or no output has two tokens.
    """
    with trace_spool() as spool:
        log = TokenLog(spool, field)
        for trace, row in rows:
            log.write(trace, row)
        if log.num_short == log.num_records:
            raise TraceError("no output of the log has two tokens: there is nothing to draft")
        yield log
