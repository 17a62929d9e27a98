"""What looks after a service while it serves."""

from collections.abc import Sequence

from grpc import aio
from grpc_health.v1 import health

from retriever.embedded import EmbeddedDrafter
from retriever.errors import SettingsError
from retriever.operations.calls import Calls
from retriever.operations.interception import Interceptor
from retriever.operations.lifecycle import SERVICE, Lifecycle
from retriever.operations.tracing import Tracing

_STREAM = "DraftStream"


class Operator:
    """Counts calls, answers health checks, and knows when a service may end.

    Args:
        reflection: whether to answer gRPC reflection.
        tracing: makes spans of a sample of calls; None for none.

    Attributes:
        calls: what came and how it ended.
        lifecycle: the phase of the service.
    """

    def __init__(self, *, reflection: bool = False, tracing: Tracing | None = None) -> None:
        self._tracing = tracing
        self.calls = Calls()
        self.lifecycle = Lifecycle()
        self._reflection = reflection

    @property
    def interceptors(self) -> Sequence[aio.ServerInterceptor]:
        """What stands around every call, outermost."""
        return [Interceptor(self.calls, self.lifecycle, self._tracing)]

    async def attach(self, server: aio.Server) -> None:
        """Add what a server answers beside drafts, before it starts.

        Raises:
            SettingsError: reflection is wanted, and its library missing.
        """
        await self.lifecycle.attach(server)
        if self._reflection:
            _reflect(server)

    def shut_down(self) -> None:
        """Send what is left to send."""
        if self._tracing is not None:
            self._tracing.shut_down()

    def is_idle(self, drafter: EmbeddedDrafter) -> bool:
        """Tell whether a service can end without anybody's missing it.

        A stream may stay open when no session is, and a session when nobody is there for it.
        """
        under_way = self.calls.under_way
        answering = sum(count for method, count in under_way.items() if method != _STREAM)
        return answering == 0 and (under_way[_STREAM] == 0 or drafter.num_sessions == 0)


def _reflect(server: aio.Server) -> None:
    try:
        from grpc_reflection.v1alpha import reflection  # noqa: PLC0415  (an extra)
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"--reflection: {error.name} is missing: run `pip install '.[operations]'`"
        ) from error
    reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME), server)
