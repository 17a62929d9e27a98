"""Callers of every other kind: they visit, are refused, delete, crowd, and fail open."""

import asyncio
from typing import Any

import grpc
import numpy as np

from benchmarks.serving.soak.caller import BUDGET, FULL, Caller, expect, keep
from retriever.client.asynchronous import AsyncResilientDrafter
from retriever.client.credentials import Credentials
from retriever.drafter import DraftRequest
from retriever.v1 import retriever_pb2 as pb
from retriever.wire.channels import CLIENT_OPTIONS


async def run_visitors(caller: Caller) -> None:
    """Do every chore again and again until the end."""
    chores = (
        (_visit, 0.2),
        (_refused, 0.2),
        (_bare, 0.2),
        (_delete, 2.0),
        (_delete_tenant, 15.0),
        (_resilient, 2.0),
        (_crowd, 10.0),
    )
    await asyncio.gather(*(keep(caller, chore, pause_s) for chore, pause_s in chores))


def _rare(caller: Caller) -> str:
    return caller.rng.choice(list(caller.load.rare.values()))


async def _visit(caller: Caller) -> None:
    """A session without a stream, of a tenant that is seldom here: closed, or left to idle."""
    async with caller.stub(_rare(caller)) as stub:
        name, text, length = caller.name(), caller.text(), caller.prompt_length()
        opening = pb.OpenSessionRequest(session_id=name, prompt=text[:length])
        await expect(caller, stub.OpenSession(opening), grpc.StatusCode.OK, FULL)
        if caller.rng.random() < 0.5:  # noqa: PLR2004
            closing = pb.CloseSessionRequest(
                session_id=name, new_token_ids=text[length : length + 200]
            )
            gone = grpc.StatusCode.NOT_FOUND
            await expect(caller, stub.CloseSession(closing), grpc.StatusCode.OK, gone)


async def _refused(caller: Caller) -> None:
    """A request that must be refused, each kind as often."""
    wrong = "fdt_" + "0" * 16 + "_" + "x" * 43
    status = grpc.StatusCode
    requests: list[tuple[str, Any, str, grpc.StatusCode]] = [
        ("Draft", pb.DraftRequest(context=[1], budget_nodes=1 << 20), "", FULL),
        ("Draft", pb.DraftRequest(context=[1 << 31]), "", status.INVALID_ARGUMENT),
        ("Draft", pb.DraftRequest(vocabulary_fingerprint="0" * 64), "", status.FAILED_PRECONDITION),
        ("OpenSession", pb.OpenSessionRequest(session_id="x" * 300), "", status.INVALID_ARGUMENT),
        ("CloseSession", pb.CloseSessionRequest(session_id="none"), "", status.NOT_FOUND),
        ("ListIndexes", pb.ListIndexesRequest(), wrong, status.UNAUTHENTICATED),
    ]
    method, request, token, code = caller.rng.choice(requests)
    async with caller.stub(token or _rare(caller)) as stub:
        await expect(caller, getattr(stub, method)(request), code, FULL)


async def _bare(caller: Caller) -> None:
    """Drafts for bare contexts, one of them explained."""
    async with caller.stub(_rare(caller)) as stub:
        context = caller.text()[: caller.rng.randrange(1, 400)]
        await expect(caller, stub.Draft(pb.DraftRequest(context=context)), grpc.StatusCode.OK, FULL)
        request = pb.ExplainRequest(context=context, max_documents=2)
        await expect(caller, stub.Explain(request), grpc.StatusCode.OK, FULL)
        await expect(caller, stub.ListIndexes(pb.ListIndexesRequest()))


async def _delete(caller: Caller) -> None:
    """Open, end and delete a session's data: the log is rewritten."""
    async with caller.stub(_rare(caller)) as stub:
        name, text = caller.name(), caller.text()
        opening = pb.OpenSessionRequest(session_id=name, prompt=text[:50])
        if await expect(caller, stub.OpenSession(opening), grpc.StatusCode.OK, FULL):
            closing = pb.CloseSessionRequest(session_id=name, new_token_ids=text[50:80])
            await stub.CloseSession(closing)
            await stub.DeleteSessionData(pb.DeleteSessionDataRequest(session_id=name))


async def _delete_tenant(caller: Caller) -> None:
    """Delete all that is kept of a tenant, and fill it again."""
    async with caller.stub(_rare(caller)) as stub:
        deletion = stub.DeleteTenantData(pb.DeleteTenantDataRequest())
        await expect(caller, deletion, grpc.StatusCode.OK, FULL)
        for _ in range(8):
            opening = pb.OpenSessionRequest(session_id=caller.name())
            closing = pb.CloseSessionRequest(
                session_id=opening.session_id, new_token_ids=caller.text()
            )
            if await expect(caller, stub.OpenSession(opening), grpc.StatusCode.OK, FULL):
                await stub.CloseSession(closing)


async def _crowd(caller: Caller) -> None:
    """As many sessions as a tenant may have and one more, left open where their stream ends."""
    async with caller.stub(_rare(caller)) as stub:
        stream, most = stub.DraftStream(), caller.load.max_tenant_sessions
        openings = [
            pb.OpenSessionRequest(session_id=caller.name(), prompt=[1, 2, 3])
            for _ in range(most + 1)
        ]
        await stream.write(pb.DraftStreamRequest(sequence_number=1, openings=openings))
        answer = await stream.read()
        codes = {status.code for status in answer.statuses}
        caller.board.refused += len(answer.statuses)
        if codes != {FULL.value[0]}:
            caller.fail(f"{most + 1} sessions of one tenant: {codes}")
        await stream.done_writing()
        await stream.read()  # its end


async def _resilient(caller: Caller) -> None:
    """An engine with the client that fails open, for a few steps."""
    tenant = caller.rng.choice(list(caller.load.tokens))
    credentials = Credentials(token=caller.load.tokens[tenant])
    drafter = AsyncResilientDrafter(
        caller.load.address,
        deadline_s=0.5,
        open_channel=lambda address: credentials.aio_channel(address, list(CLIENT_OPTIONS)),
    )
    async with drafter:
        if not await drafter.wait(5):
            caller.fail("a client did not connect")
        text = np.array(caller.text(), np.int32)
        await drafter.open("s", text[:100])
        for at in range(100, 130):
            await drafter.draft([DraftRequest("s", text[at : at + 1], at + 1, BUDGET)])
        await drafter.close("s")
