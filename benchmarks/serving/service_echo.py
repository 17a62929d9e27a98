"""A server that answers each message of a draft stream with a tree that it made beforehand.

What is left of a service without drafting: the bare price of the messages. `python -m
benchmarks.serving.service_echo NODES` prints its address and answers until its input ends.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
from grpc import aio

from retriever.limits import Limits
from retriever.operations.lifecycle import SERVICE
from retriever.tree import DraftTree, Source
from retriever.v1 import retriever_pb2 as pb
from retriever.wire.channels import server_options
from retriever.wire.messages import PACKED, tree_to_message


class Echo:
    """Answers at once.

    Args:
        num_nodes: of each tree.
    """

    def __init__(self, num_nodes: int) -> None:
        chain = DraftTree(
            np.arange(1000, 1000 + num_nodes, dtype=np.int32),
            np.arange(-1, num_nodes - 1, dtype=np.int32),
            np.full(num_nodes, 0.5, np.float32),
            np.full(num_nodes, Source.CONTEXT, np.uint8),
        )
        self._answer = pb.DraftStreamResponse(trees=[tree_to_message(chain, PACKED)])

    async def stream(self, messages: AsyncIterator[Any], _: Any) -> AsyncIterator[Any]:
        """Answer each message."""
        async for _message in messages:
            yield self._answer


async def main() -> None:
    """Serve until standard input ends."""
    server = aio.server(options=server_options(Limits().max_message_bytes))
    handler: Any = grpc.stream_stream_rpc_method_handler(
        Echo(int(sys.argv[1])).stream,
        pb.DraftStreamRequest.FromString,
        pb.DraftStreamResponse.SerializeToString,
    )
    calls = grpc.method_handlers_generic_handler(SERVICE, {"DraftStream": handler})
    server.add_generic_rpc_handlers((calls,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)


if __name__ == "__main__":
    asyncio.run(main())
