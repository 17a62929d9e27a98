"""Servers for shards: real ones in processes, and one on a loop here that can be slowed down."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from indexer.build import build_from_tokens
from indexer.reader import Vocabulary
from retriever.plugins.admin.administration import Administration, SessionFilter
from retriever.service.draft_stream import DraftStream
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.v1 import retriever_pb2 as pb, retriever_pb2_grpc as pb_grpc
from tests.retriever.security.in_process import serving


@dataclass
class SlowService:
    """A service whose steps take longer.

    Attributes:
        drafter: what answers.
        address: where it is.
        pause_s: before each step, in seconds.
    """

    drafter: EmbeddedDrafter
    address: str = ""
    pause_s: float = 0.0

    def lengths(self) -> list[int]:
        """Return the lengths of the open sessions' sequences."""
        slices = Administration(self.drafter.state).sessions(SessionFilter())
        return [each.num_tokens for part in slices for each in part]


@contextmanager
def slowed(drafter: EmbeddedDrafter) -> Iterator[SlowService]:
    """Serve on a loop of this process during the block, and pause before each step."""
    service, answer = SlowService(drafter), DraftStream.answer

    async def slowly(stream: DraftStream, message: pb.DraftStreamRequest) -> pb.DraftStreamResponse:
        if message.steps:
            await asyncio.sleep(service.pause_s)
        return await answer(stream, message)

    with pytest.MonkeyPatch.context() as patch, serving(drafter) as service.address:
        patch.setattr(DraftStream, "answer", slowly)
        yield service


@contextmanager
def served(servicer: pb_grpc.RetrieverServiceServicer) -> Iterator[str]:
    """Serve in this process during the block; give the address."""
    server = grpc.server(ThreadPoolExecutor(8))
    pb_grpc.add_RetrieverServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


def planted_index(path: Path, tokens: list[int], vocabulary: Vocabulary) -> Path:
    """Build an index of one document."""
    build_from_tokens([(f"{path.name}.txt", tokens)], path, vocabulary)
    return path
