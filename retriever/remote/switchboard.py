"""Which stream leads to which server, and what to do with a stream on which too little comes."""

import time
from typing import Final, Generic, Protocol, TypeVar

from retriever.remote.planner import Plan, Planner
from retriever.v1 import retriever_pb2 as pb

LOST_AFTER_S: Final = 1.0
"""A stream on which a message has no answer for so long is given up, in seconds."""


class MessageStream(Protocol):
    """One stream to a server; neither call waits."""

    def send(self, message: pb.DraftStreamRequest) -> None:
        """Send a message, at once or never."""
        ...

    def end(self) -> None:
        """End the stream."""
        ...


_Stream = TypeVar("_Stream", bound=MessageStream)


class Switchboard(Generic[_Stream]):
    """The streams to the servers of a planner. Callers see to it that one is at work at a time.

    Args:
        planner: what is to be said to whom.
        lost_after_s: a stream without an answer for so long is given up, in seconds.
    """

    def __init__(self, planner: Planner, lost_after_s: float) -> None:
        self._planner = planner
        self._lost_after_s = lost_after_s
        self._streams: dict[str, _Stream] = {}

    def connect(self, address: str, stream: _Stream) -> None:
        """Speak with a server through a stream that has begun."""
        self._streams[address] = stream
        self._planner.conversations[address].begin()

    def lose(self, address: str) -> None:
        """Take note that the stream to a server is gone."""
        self._streams.pop(address, None)
        self._planner.lose(address)

    def take(self, address: str, response: pb.DraftStreamResponse) -> None:
        """Take in what has come, and give up a stream that is out of step."""
        if self._planner.take(address, response, time.monotonic()):
            self._give_up(address)

    def ask(self, plan: Plan) -> None:
        """Send what a plan says to whom."""
        for address, message in plan.messages.items():
            self._streams[address].send(message)

    def tell_rest(self) -> None:
        """Tell every server what it is still to be told."""
        for address, stream in self._streams.items():
            message = self._planner.conversations[address].rest(time.monotonic())
            if message is not None:
                stream.send(message)

    def give_up_lost(self) -> None:
        """Give up streams on which too little comes."""
        lost_s = time.monotonic() - self._lost_after_s
        for address, conversation in self._planner.conversations.items():
            oldest_s = conversation.oldest_unanswered_s()
            if oldest_s is not None and oldest_s < lost_s:
                self._give_up(address)

    def _give_up(self, address: str) -> None:
        self._planner.lose(address)
        stream = self._streams.pop(address, None)
        if stream is not None:
            stream.end()
