"""The processes that ask a service that is soaked: callers until the end, and one to be killed."""

import asyncio
import random
import sys
import time
from typing import Any

from benchmarks.serving.soak.board import Board
from benchmarks.serving.soak.caller import Caller, Load, texts
from benchmarks.serving.soak.engines import run_engines
from benchmarks.serving.soak.visitors import run_visitors
from retriever.client.credentials import Credentials
from retriever.v1 import retriever_pb2 as pb
from retriever.v1.retriever_pb2_grpc import RetrieverServiceStub
from retriever.wire.channels import CLIENT_OPTIONS


def call(load: Load, board: Board, num_engines: int, failed: Any) -> None:
    """Run engines, or the other callers where these are none, until the end; report errors."""
    caller = Caller(load, board, random.Random(board.number), texts(board.number))  # noqa: S311
    asyncio.run(run_engines(caller, num_engines) if num_engines else run_visitors(caller))
    failed.put(dict(caller.errors))


def hold(address: str, token: str, num_sessions: int) -> None:
    """Open sessions on a stream, say so, and wait to be killed."""
    with Credentials(token=token).channel(address, list(CLIENT_OPTIONS)) as channel:
        openings = [
            pb.OpenSessionRequest(session_id=f"held/{at}", prompt=list(range(500)))
            for at in range(num_sessions)
        ]
        stream = RetrieverServiceStub(channel).DraftStream(_once(openings))
        next(stream)
        print("held", flush=True)
        time.sleep(60)


def _once(openings: list[pb.OpenSessionRequest]) -> Any:
    yield pb.DraftStreamRequest(sequence_number=1, openings=openings)
    time.sleep(60)


if __name__ == "__main__":
    hold(sys.argv[1], sys.argv[2], int(sys.argv[3]))
