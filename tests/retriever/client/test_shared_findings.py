"""Decoders of one tenant and model share what they find through a service, and no others do."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from indexer.reader import Vocabulary
from retriever.client.credentials import Credentials
from retriever.client.shared_findings import SharedFindings
from retriever.client.strict import RemoteDrafter
from retriever.drafter import Findings
from retriever.errors import (
    DrafterUnavailableError,
    InvalidRequestError,
    LimitExceededError,
    NotPermittedError,
    NotPossibleError,
    VocabularyMismatchError,
)
from retriever.limits import MAX_FINDINGS, Limits
from retriever.security.access import TENANT_SCOPES, Scope, add_token
from retriever.security.protection import Protection, ProtectionFiles
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.v1 import retriever_pb2 as pb
from retriever.v1.retriever_pb2_grpc import RetrieverServiceServicer, RetrieverServiceStub
from tests.patience import free_address
from tests.retriever.client.shard_servers import served
from tests.retriever.conftest import start_service, stop_service
from tests.retriever.findings import MODEL, OTHER, all_of, findings, rows
from tests.retriever.security.in_process import serving

pytestmark = pytest.mark.plugin("retriever.plugins.findings")


def test_decoders_share_through_a_service_that_restarts(tmp_path: Path, index: Path) -> None:
    options = ("--index", str(index), "--state", str(tmp_path), "--address", "127.0.0.1:0")
    process, address = start_service(*options)
    pieces = [findings(10_000 * number, MAX_FINDINGS, number) for number in range(3)]
    with RemoteDrafter(address, timeout_s=30) as one, RemoteDrafter(address, timeout_s=30) as other:
        for piece in pieces:
            one.share_findings(MODEL, piece)
        assert rows(all_of(other)) == rows(Findings.joined(pieces))
        assert not len(all_of(other, OTHER))
        with pytest.raises(InvalidRequestError, match="outside the vocabulary of 50"):
            one.share_findings(MODEL, _with_token(50))
    stop_service(process)
    process, address = start_service(*options)
    with RemoteDrafter(address, timeout_s=30) as other:
        assert rows(all_of(other)) == rows(Findings.joined(pieces))
    stop_service(process)


def _with_token(token: int) -> Findings:
    found = findings(0)
    found.tokens[2, 3] = token
    return found


def test_tenants_share_with_themselves_and_delete_their_own(tmp_path: Path) -> None:
    access = tmp_path / "access"
    shown = {
        name: Credentials(token=add_token(access, name[0], scopes, name))
        for name, scopes in (("a1", TENANT_SCOPES), ("a2", TENANT_SCOPES), ("b1", TENANT_SCOPES))
    }
    drafts_not = Credentials(token=add_token(access, "", [Scope.ADMIN], "operator"))
    protection = Protection.of(ProtectionFiles(access=access))
    drafter = EmbeddedDrafter(state=tmp_path / "state")
    with serving(drafter, f"unix:{tmp_path}/s", protection) as address, ExitStack() as stack:
        clients = {
            name: stack.enter_context(RemoteDrafter(address, credentials=each, timeout_s=10))
            for name, each in shown.items()
        }
        clients["a1"].share_findings(MODEL, findings(0, seed=1))
        clients["b1"].share_findings(MODEL, findings(0, seed=2))
        assert rows(all_of(clients["a2"])) == rows(findings(0, seed=1))
        assert rows(all_of(clients["b1"])) == rows(findings(0, seed=2))
        clients["a2"].delete_tenant_data()
        assert not len(all_of(clients["a1"]))
        assert rows(all_of(clients["b1"])) == rows(findings(0, seed=2))
        clients["b1"].open("s", np.array([1], np.int32))
        clients["b1"].delete_session_data("s")
        assert not len(all_of(clients["b1"]))
        with RemoteDrafter(address) as nobody, pytest.raises(DrafterUnavailableError):
            nobody.share_findings(MODEL, findings(0))
        operator = stack.enter_context(RemoteDrafter(address, credentials=drafts_not))
        with pytest.raises(NotPermittedError):
            operator.fetch_findings(MODEL)
    drafter.shut_down()


@pytest.mark.parametrize(
    "message",
    [
        pb.Findings(contexts=bytes(7)),
        pb.Findings(contexts=bytes(8), token_ids=bytes(32)),
        pb.Findings(token_ids=bytes(32), log_odds=bytes(32)),
        pb.Findings(contexts=b"\x01" * 8, token_ids=b"\xff" * 32, log_odds=bytes(32)),
        pb.Findings(contexts=b"\x01" * 8, token_ids=bytes(32), log_odds=b"\xff" * 32),
        pb.Findings(contexts=bytes(8), token_ids=bytes(32), log_odds=bytes(32)),
        pb.Findings(contexts=bytes(8 << 20)),
    ],
    ids=["cut", "no odds", "no contexts", "negative ids", "NaN", "context 0", "huge"],
)
def test_hostile_findings_are_refused_and_hurt_nobody(message: pb.Findings) -> None:
    with serving(EmbeddedDrafter()) as address, grpc.insecure_channel(address) as channel:
        stub = RetrieverServiceStub(channel)
        request = pb.ShareFindingsRequest(model_fingerprint=MODEL, findings=message)
        with pytest.raises(grpc.RpcError) as refused:
            stub.ShareFindings(request)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        fetched = stub.FetchFindings(
            pb.FetchFindingsRequest(model_fingerprint=MODEL, before=(1 << 64) - 1)
        )
        assert fetched == pb.FetchFindingsResponse(findings=pb.Findings())


@contextmanager
def client_of(fingerprint: str = "", **options: Any) -> Iterator[RemoteDrafter]:
    """Give a client of a new service during the block."""
    with (
        serving(EmbeddedDrafter(**options)) as address,
        RemoteDrafter(address, vocabulary_fingerprint=fingerprint) as client,
    ):
        yield client


def test_refusals_name_their_reasons(vocabulary: Vocabulary) -> None:
    with (
        client_of(limits=Limits(recycled_bytes=0)) as client,
        pytest.raises(NotPossibleError, match="recycled_bytes"),
    ):
        client.share_findings(MODEL, findings(0))
    with client_of("ef" * 32, vocabulary=vocabulary) as client:
        with pytest.raises(VocabularyMismatchError):
            client.share_findings(MODEL, findings(0))
        with pytest.raises(VocabularyMismatchError):
            client.fetch_findings(MODEL)
    with client_of(limits=Limits(max_tenant_work=64.0)) as client:
        client.share_findings(MODEL, findings(0, MAX_FINDINGS))
        with pytest.raises(LimitExceededError, match="max_tenant_work"):
            client.share_findings(MODEL, findings(0, MAX_FINDINGS))
    with client_of(limits=Limits(max_tenant_bytes=200_000, generations_tokens=1024)) as client:
        client.share_findings(MODEL, findings(0, 1000))
        with pytest.raises(LimitExceededError, match="max_tenant_bytes"):
            client.share_findings(MODEL, findings(0, MAX_FINDINGS))


_Servicer: Any = RetrieverServiceServicer


class Liar(_Servicer):  # type: ignore[misc]  # its stub is abstract, the service is not
    """A service that sends log-odds that are none."""

    def FetchFindings(  # noqa: N802
        self, request: pb.FetchFindingsRequest, context: object
    ) -> pb.FetchFindingsResponse:
        del request, context
        content = pb.Findings(contexts=b"\x01" * 8, token_ids=bytes(32), log_odds=b"\xff" * 32)
        return pb.FetchFindingsResponse(findings=content)


def test_what_cannot_be_findings_is_not_taken() -> None:
    with (
        served(Liar()) as address,
        RemoteDrafter(address) as client,
        pytest.raises(DrafterUnavailableError, match="sent no findings"),
    ):
        client.fetch_findings(MODEL)


def test_of_several_services_one_is_the_same_for_all() -> None:
    with ExitStack() as stack:
        addresses = [stack.enter_context(serving(EmbeddedDrafter())) for _ in range(3)]
        one = stack.enter_context(SharedFindings([f"{addresses[0]},{addresses[1]}", addresses[2]]))
        other = stack.enter_context(SharedFindings(addresses[::-1]))
        for number in range(6):
            one.share_findings(f"{number:02x}", findings(number))
            assert rows(all_of(other, f"{number:02x}")) == rows(findings(number))
        dead = stack.enter_context(SharedFindings([addresses[0], free_address()]))
        for number in range(6):
            dead.share_findings(f"a{number:02x}", findings(number))
            assert len(all_of(dead, f"a{number:02x}")) == len(findings(number))
    with SharedFindings([free_address()]) as nowhere, pytest.raises(DrafterUnavailableError):
        nowhere.fetch_findings(MODEL)
