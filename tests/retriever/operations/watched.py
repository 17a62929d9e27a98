"""A service as metrics and the page see it, how they are asked over HTTP, and one that is slow."""

import asyncio
import http.client
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
from grpc import aio

from retriever.drafter import DraftRequest, SequenceOptions
from retriever.operations.observer import ServiceObserver
from retriever.operations.service_report import Service
from retriever.operations.web import Web, WebAddress
from retriever.service.serving import start
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.v1 import retriever_pb2 as pb
from retriever.v1.retriever_pb2_grpc import RetrieverServiceStub

NASTY = "<script>alert('tenant')</script>&\"'"
HIDDEN = "session-that-nobody-may-see"


class SlowToWarm(EmbeddedDrafter):
    """A drafter that is warm when it is told to be."""

    def __init__(self) -> None:
        super().__init__()
        self.released = Event()

    def warm(self) -> None:
        assert self.released.wait(200)


def drafted(index: Path) -> EmbeddedDrafter:
    """A drafter that has drafted four times, three of them for what then came true."""
    drafter = EmbeddedDrafter.open_indexes([index])
    corpus = drafter.stats().indexes[0].segments[0].tokens[:12].astype(np.int32)
    drafter.open(HIDDEN, corpus, SequenceOptions(tenant=NASTY))
    length, new = len(corpus), np.empty(0, np.int32)
    for _ in range(4):
        (tree,) = drafter.draft([DraftRequest(HIDDEN, new, length, 8)])
        new = tree.best_chain(3).token_ids
        length += len(new)
    return drafter


async def refused(observer: ServiceObserver, drafter: EmbeddedDrafter, address: str) -> None:
    """Serve, and make errors: a session that is there, one that is not, and too many nodes."""
    server, _ = await start(drafter, address, observer)
    async with aio.insecure_channel(address) as channel:
        stub: Any = RetrieverServiceStub(channel)
        for call in (
            stub.OpenSession(pb.OpenSessionRequest(session_id=HIDDEN)),
            stub.CloseSession(pb.CloseSessionRequest(session_id=f"{HIDDEN}-too")),
            stub.Draft(pb.DraftRequest(context=[1], budget_nodes=1 << 20)),
        ):
            try:
                await call
            except aio.AioRpcError:
                continue
    await server.stop(0)


@contextmanager
def watched(index: Path, folder: Path, **options: Any) -> Iterator[tuple[Service, Web]]:
    """Serve what such a drafter has to tell."""
    drafter, observer = drafted(index), ServiceObserver()
    asyncio.run(refused(observer, drafter, f"unix:{folder}/draft.sock"))
    service = Service(drafter, observer, time.time() - 3700)
    web = Web(service, WebAddress.parsed("0"), **options)
    try:
        yield service, web
    finally:
        web.close()
        drafter.shut_down()


def asked(
    web: Web, path: str, *, method: str = "GET", host: str = "localhost"
) -> tuple[int, dict[str, str], str]:
    """Return the status, headers and body of an answer over HTTP."""
    connection = http.client.HTTPConnection("127.0.0.1", web.address.port, timeout=10)
    connection.request(method, path, headers={"Host": host})
    response = connection.getresponse()
    answer = response.status, dict(response.getheaders()), response.read().decode()
    connection.close()
    return answer
