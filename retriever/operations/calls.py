"""What calls came, which are under way, and how the others ended."""

import asyncio
import logging
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Final

import grpc
from grpc import aio

from retriever.limits import Limits
from retriever.operations.logs import log_event
from retriever.v1 import retriever_pb2 as pb

_logger = logging.getLogger(__name__)
_NAMED: Final = re.compile(r"\((\w+)\)$")
_LIMITS: Final = frozenset(field.name for field in fields(Limits))
_STATUS_OF_CODE: Final = {status.value[0]: status.name for status in grpc.StatusCode}
_ORDINARY: Final = frozenset({"OK", "CANCELLED"})


@dataclass(frozen=True, slots=True)
class End:
    """How a call can end.

    Attributes:
        method: of the wire contract.
        status: of gRPC.
        reason: the limit that was exceeded, or the kind of an error that is not the caller's;
            else empty. Nothing that a caller wrote.
    """

    method: str
    status: str
    reason: str = ""

    @property
    def is_refusal(self) -> bool:
        """Whether the call ended otherwise than by itself or its caller."""
        return self.status not in _ORDINARY


class Calls:
    """Counts of calls. One event loop writes them; whoever reads takes copies.

    Attributes:
        under_way: calls that have begun and not ended, by method.
        ended: calls by how they ended.
        refused_within: what was refused in streams that went on, as if each had been a call.
        latest_s: when the last of each did, in seconds since 1970.
    """

    def __init__(self) -> None:
        self.under_way: Counter[str] = Counter()
        self.ended: Counter[End] = Counter()
        self.refused_within: Counter[End] = Counter()
        self.latest_s: dict[End, float] = {}

    @contextmanager
    def counted(self, method: str, context: aio.ServicerContext[Any, Any]) -> Iterator[None]:
        """Count the call that is answered in the block."""
        self.under_way[method] += 1
        end, began = End(method, "OK"), time.perf_counter()
        try:
            yield
        except BaseException as error:
            end = End(method, *_status_of(error, context))
            raise
        finally:
            self.under_way[method] -= 1
            self.ended[end] += 1
            self.latest_s[end] = time.time()
            _log(end, seconds=round(time.perf_counter() - began, 6))

    def refuse_within(self, method: str, statuses: Iterable[pb.SessionStatus]) -> None:
        """Count what a message of a stream is told was refused."""
        for status in statuses:
            name = _STATUS_OF_CODE.get(status.code, "UNKNOWN")
            end = End(method, name, _limit_of(status.message))
            self.refused_within[end] += 1
            self.latest_s[end] = time.time()
            _log(end)

    def refusals(self) -> list[tuple[End, int, float]]:
        """Return how calls were refused, how often, and when last; the latest first."""
        counts = self.ended.copy() + self.refused_within.copy()
        found = [(end, n, self.latest_s.get(end, 0.0)) for end, n in counts.items()]
        return sorted((each for each in found if each[0].is_refusal), key=lambda each: -each[2])


def _log(end: End, **measured: float) -> None:
    if _logger.isEnabledFor(logging.DEBUG):
        fields: dict[str, Any] = {"method": end.method, "status": end.status, **measured}
        if end.reason:
            fields["reason"] = end.reason
        text = "a call has ended" if measured else "something was refused in a stream that goes on"
        log_event(_logger, logging.DEBUG, "call", text, **fields)


def _limit_of(text: str) -> str:
    """Return the limit that the text of a refusal names; empty if there is none."""
    named = _NAMED.search(text)
    return named[1] if named is not None and named[1] in _LIMITS else ""


def _status_of(error: BaseException, context: aio.ServicerContext[Any, Any]) -> tuple[str, str]:
    """Return the status that a call ends with, and the reason as `End` has it."""
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return "CANCELLED", ""
    if not isinstance(error, aio.AbortError):
        return "INTERNAL", type(error).__name__
    code: Any = context.code()
    limit = _limit_of(str(context.details() or ""))
    return _STATUS_OF_CODE.get(getattr(code, "value", (code,))[0], "UNKNOWN"), limit
