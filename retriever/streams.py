"""The stream of drafts: one call that lasts, with a message in each direction for every step."""

from collections.abc import Iterator
from queue import SimpleQueue
from typing import Final

import grpc

from retriever.errors import DrafterUnavailableError
from retriever.v1 import retriever_pb2 as pb
from retriever.v1.retriever_pb2_grpc import RetrieverServiceStub
from retriever.watchdog import Watchdog

_ABORTED: Final[int] = grpc.StatusCode.ABORTED.value[0]


class Stream:
    """One bidirectional call: a numbered message out, the answer to it in.

    Args:
        stub: of the service.
        timeout_s: longest wait for an answer, in seconds; the call is cancelled then.
    """

    def __init__(self, stub: RetrieverServiceStub, timeout_s: float) -> None:
        self._outbox: SimpleQueue[pb.DraftStreamRequest | None] = SimpleQueue()
        self._number = 0
        self._call = stub.DraftStream(self._messages(), wait_for_ready=False)
        self._watchdog = Watchdog(timeout_s, self._call.cancel)

    def exchange(self, message: pb.DraftStreamRequest) -> pb.DraftStreamResponse:
        """Number a message, send it and await its answer.

        Raises:
            grpc.RpcError: the call has ended, by itself or at the timeout.
            DrafterUnavailableError: what has come answers another message, or tells that one was
                lost: the call cannot go on.
        """
        self._number += 1
        message.sequence_number = self._number
        with self._watchdog:
            self._outbox.put(message)
            response: pb.DraftStreamResponse = next(self._call)
        if response.sequence_number != self._number:
            raise DrafterUnavailableError(
                f"the draft service answered message {response.sequence_number} where "
                f"{self._number} was awaited"
            )
        for status in response.statuses:
            if status.code == _ABORTED and not status.session_id:
                raise DrafterUnavailableError(f"the draft service is out of step: {status.message}")
        return response

    def end(self) -> None:
        """End the call."""
        self._outbox.put(None)
        self._call.cancel()
        self._watchdog.stop()

    def _messages(self) -> Iterator[pb.DraftStreamRequest]:
        while (message := self._outbox.get()) is not None:
            yield message
