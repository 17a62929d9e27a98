"""Why a sequence went on without a server's draft."""

from collections import Counter
from enum import StrEnum
from typing import Final

import grpc

from retriever.v1 import retriever_pb2 as pb


class FailOpen(StrEnum):
    """Why a sequence's step was not drafted by its server.

    `DOWN`: it cannot be reached. `BUSY`: it has not answered an earlier step yet. `TIMEOUT`: it did
    not answer this one in time. `LOST`: it did not know the session, which is opened anew. `LIMIT`:
    it has no room. `VOCABULARY`: it is for another tokenizer. `REFUSED`: it refuses for another
    reason. `INVALID`: what it sent is no tree.
    """

    DOWN = "down"
    BUSY = "busy"
    TIMEOUT = "timeout"
    LOST = "lost"
    LIMIT = "limit"
    VOCABULARY = "vocabulary"
    REFUSED = "refused"
    INVALID = "invalid"


FailOpens = Counter[FailOpen]
"""How many steps of sequences went on without a server's draft, by reason."""

_OF_CODE: Final = {
    grpc.StatusCode.ABORTED.value[0]: FailOpen.LOST,
    grpc.StatusCode.ALREADY_EXISTS.value[0]: FailOpen.LOST,
    grpc.StatusCode.DEADLINE_EXCEEDED.value[0]: FailOpen.TIMEOUT,
    grpc.StatusCode.FAILED_PRECONDITION.value[0]: FailOpen.VOCABULARY,
    grpc.StatusCode.NOT_FOUND.value[0]: FailOpen.LOST,
    grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]: FailOpen.LIMIT,
}


_ON_THE_WIRE: Final = {
    reason: pb.FailOpenReason.Value(f"FAIL_OPEN_REASON_{reason.name}") for reason in FailOpen
}
_MOST: Final = (1 << 32) - 1


def add_fail_opens(message: pb.DraftStreamRequest, counts: FailOpens) -> None:
    """Tell a service how often it was gone without."""
    for reason, times in counts.items():
        message.fail_opens.add(reason=_ON_THE_WIRE[reason], count=min(times, _MOST))


def reason_of(code: int) -> FailOpen:
    """Return the reason that a gRPC status code stands for."""
    return _OF_CODE.get(code, FailOpen.REFUSED)
