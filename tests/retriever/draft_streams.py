"""Streams of drafts, one message after the other, and what goes over them."""

from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import grpc

from retriever.v1 import retriever_pb2 as pb
from retriever.v1.retriever_pb2_grpc import RetrieverServiceStub


class Exchange:
    """A stream on which one message is answered after the other."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._outbox: SimpleQueue[pb.DraftStreamRequest | None] = SimpleQueue()
        self.call = RetrieverServiceStub(channel).DraftStream(iter(self._outbox.get, None))

    def __call__(self, number: int, **fields: object) -> pb.DraftStreamResponse:
        message = pb.DraftStreamRequest(sequence_number=number, **fields)  # type: ignore[arg-type]
        self._outbox.put(message)
        response: pb.DraftStreamResponse = next(self.call)
        return response

    def end(self) -> None:
        self._outbox.put(None)


@contextmanager
def stream(address: str) -> Iterator[Exchange]:
    with grpc.insecure_channel(address) as channel:
        exchange = Exchange(channel)
        yield exchange
        exchange.end()


def opening(name: str, prompt: tuple[int, ...] = (1, 2, 3, 1, 2, 3)) -> pb.OpenSessionRequest:
    return pb.OpenSessionRequest(session_id=name, prompt=prompt)


def step(name: str, new: list[int], length: int, budget: int = 8) -> pb.SessionStep:
    return pb.SessionStep(session_id=name, new_token_ids=new, length=length, budget_nodes=budget)


def codes(response: pb.DraftStreamResponse) -> dict[str, int]:
    return {status.session_id: status.code for status in response.statuses}
