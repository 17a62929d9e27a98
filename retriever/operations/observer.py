"""Observes a service: counts calls, logs their ends, and knows when the service can end."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Final, Protocol

import grpc
from grpc import aio
from grpc_health.v1 import health

from retriever.errors import SettingsError
from retriever.limits import Limits
from retriever.operations.lifecycle import SERVICE, Lifecycle
from retriever.operations.logs import log_event
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.v1 import retriever_pb2 as pb
from retriever.wire.statuses import Refusal, refusal_in, refusal_of

_logger = logging.getLogger(__name__)
_LIMITS: Final = frozenset(field.name for field in fields(Limits))
_STATUS_OF_CODE: Final = {status.value[0]: status.name for status in grpc.StatusCode}
_ORDINARY: Final = frozenset({"OK", "CANCELLED"})


@dataclass(frozen=True, slots=True)
class End:
    """How a call ended.

    Attributes:
        method: method of the wire contract.
        status: gRPC status.
        reason: the exceeded limit, or the type of an error that is not the caller's; else empty.
            Never contains a caller's text.
    """

    method: str
    status: str
    reason: str = ""

    @property
    def is_refusal(self) -> bool:
        """Whether the call ended in another way than completion or cancellation."""
        return self.status not in _ORDINARY


class CallCounts:
    """Counts of calls. One event loop writes the counts; other threads read copies.

    Attributes:
        under_way: calls in progress, by method.
        ended: number of ended calls, by how they ended.
        refused_within: refusals within streams that continue, counted as calls.
        latest_s: time of the last call for each way to end, in seconds since 1970.
    """

    def __init__(self) -> None:
        self.under_way: Counter[str] = Counter()
        self.ended: Counter[End] = Counter()
        self.refused_within: Counter[End] = Counter()
        self.latest_s: dict[End, float] = {}

    @contextmanager
    def counted(self, method: str, context: aio.ServicerContext[Any, Any]) -> Iterator[None]:
        """Count a call for the duration of the block."""
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
        """Count the refusals in a response of a stream."""
        for status in statuses:
            name = _STATUS_OF_CODE.get(status.code, "UNKNOWN")
            end = End(method, name, _limit_of(refusal_in(status.details)))
            self.refused_within[end] += 1
            self.latest_s[end] = time.time()
            _log(end)

    def refusals(self) -> list[tuple[End, int, float]]:
        """Return refusals with their count and last time, the latest first."""
        counts = self.ended.copy() + self.refused_within.copy()
        found = [(end, n, self.latest_s.get(end, 0.0)) for end, n in counts.items()]
        return sorted((each for each in found if each[0].is_refusal), key=lambda each: -each[2])


def _log(end: End, **measured: float) -> None:
    if _logger.isEnabledFor(logging.DEBUG):
        fields: dict[str, Any] = {"method": end.method, "status": end.status, **measured}
        if end.reason:
            fields["reason"] = end.reason
        text = "a call has ended" if measured else "something was refused in a stream that is open"
        log_event(_logger, logging.DEBUG, "call", text, **fields)


def _limit_of(refusal: Refusal) -> str:
    """Return the limit that a refusal names; empty if it names none."""
    return refusal.limit if refusal.limit in _LIMITS else ""


def _status_of(error: BaseException, context: aio.ServicerContext[Any, Any]) -> tuple[str, str]:
    """Return the status of a call, and the reason; see `End`."""
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return "CANCELLED", ""
    if not isinstance(error, aio.AbortError):
        return "INTERNAL", type(error).__name__
    code: Any = context.code()
    limit = _limit_of(refusal_of(context.trailing_metadata()))
    return _STATUS_OF_CODE.get(getattr(code, "value", (code,))[0], "UNKNOWN"), limit


_STREAM = "DraftStream"

Ended = Callable[[], None]
"""Called when a traced call has ended."""


class Tracing(Protocol):
    """Makes spans of sampled calls and steps."""

    def call(self, method: str, context: aio.ServicerContext[Any, Any]) -> Ended | None:
        """Return a function to call when the call ends; None if the call is not sampled."""
        ...

    def steps(
        self, requests: AsyncIterator[Any], answer: Callable[[AsyncIterator[Any]], Any]
    ) -> AsyncIterator[Any]:
        """Yield the responses to requests, with a span for each step that is sampled."""
        ...

    def shut_down(self) -> None:
        """Send the remaining spans."""
        ...


class ServiceObserver:
    """Counts calls, answers health checks, and knows when a service can end.

    Args:
        reflection: whether to answer gRPC reflection.
        tracing: makes spans for a sample of calls; None for no spans.

    Attributes:
        calls: counts of calls.
        lifecycle: the phase of the service.
        tracing: as passed to the constructor.
    """

    def __init__(self, *, reflection: bool = False, tracing: Tracing | None = None) -> None:
        self.tracing = tracing
        self.calls = CallCounts()
        self.lifecycle = Lifecycle()
        self._reflection = reflection

    async def attach(self, server: aio.Server) -> None:
        """Add health checks and reflection to a server that has not started.

        Raises:
            SettingsError: reflection is on and its library is missing.
        """
        await self.lifecycle.attach(server)
        if self._reflection:
            _reflect(server)

    def shut_down(self) -> None:
        """Send the remaining spans."""
        if self.tracing is not None:
            self.tracing.shut_down()

    def is_idle(self, drafter: EmbeddedDrafter) -> bool:
        """Return whether a service can end without interrupting a client.

        Open streams without sessions, and sessions whose stream is gone, do not count.
        """
        under_way = self.calls.under_way
        answering = sum(count for method, count in under_way.items() if method != _STREAM)
        return answering == 0 and (under_way[_STREAM] == 0 or len(drafter.state.sessions) == 0)


def _reflect(server: aio.Server) -> None:
    try:
        from grpc_reflection.v1alpha import reflection  # noqa: PLC0415  (an extra)
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"--reflection: {error.name} is missing: run `pip install 'foredraft[server]'`"
        ) from error
    reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME), server)
