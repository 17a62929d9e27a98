"""A server that answers each message of a draft stream with a tree that it made beforehand.

What is left of a service without drafting: the bare price of the messages. `python -m
benchmarks.serving.service_echo NODES` prints its address and answers until its input ends.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

from grpc import aio

from retriever.limits import Limits
from retriever.v1 import retriever_pb2 as pb, retriever_pb2_grpc as pb_grpc
from retriever.wire.channels import server_options


class Echo(pb_grpc.RetrieverServiceServicer):
    """Answers at once.

    Args:
        num_nodes: of each tree.
    """

    def __init__(self, num_nodes: int) -> None:
        chain = pb.DraftTree(
            token_ids=range(1000, 1000 + num_nodes),
            parents=range(-1, num_nodes - 1),
            probabilities=[0.5] * num_nodes,
            sources=[pb.SOURCE_CONTEXT] * num_nodes,
        )
        self._answer = pb.DraftStreamResponse(trees=[chain])

    async def DraftStream(  # noqa: N802  (named by the contract)
        self,
        request_iterator: AsyncIterator[pb.DraftStreamRequest],
        context: aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[pb.DraftStreamResponse]:
        """Answer each message."""
        del context
        async for _ in request_iterator:
            yield self._answer


async def main() -> None:
    """Serve until standard input ends."""
    server = aio.server(options=server_options(Limits().max_message_bytes))
    pb_grpc.add_RetrieverServiceServicer_to_server(Echo(int(sys.argv[1])), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)


if __name__ == "__main__":
    asyncio.run(main())
