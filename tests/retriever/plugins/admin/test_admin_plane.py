"""The admin plane of a service in this process: who is answered, and what drafting notices."""

import json
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import given, strategies as st

from retriever.client.credentials import Credentials
from retriever.client.strict import RemoteDrafter
from retriever.drafter import DraftRequest, SequenceOptions
from retriever.errors import (
    InsecureAddressError,
    NotPossibleError,
    RetrieverError,
    UnknownSessionError,
)
from retriever.operations.observer import ServiceObserver
from retriever.operations.resolving import resolve
from retriever.operations.service_report import Service
from retriever.operations.settings import Settings
from retriever.plugins.admin.admin_servicer import Administered
from retriever.plugins.admin.admin_serving import AdminPlane
from retriever.plugins.admin.administration import Administration
from retriever.plugins.admin.administrator import administering
from retriever.plugins.admin.audit import AuditLog
from retriever.plugins.admin.live_settings import LiveSettings
from retriever.security.access import Scope, add_token, remove
from retriever.security.protection import Protection, ProtectionFiles
from retriever.service.serving import start
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.v1 import admin_pb2 as pb, retriever_pb2 as pb_drafts
from retriever.v1.admin_pb2_grpc import AdminServiceStub
from retriever.v1.retriever_pb2_grpc import RetrieverServiceStub
from tests.retriever.security.in_process import on_loop

NO_TOKENS = np.empty(0, np.int32)
CALLS: dict[str, Any] = {
    "ListSessions": pb.ListSessionsRequest(),
    "EndSessions": pb.EndSessionsRequest(all=True),
    "ListTenants": pb.ListTenantsRequest(),
    "EvictTenant": pb.EvictTenantRequest(tenant="acme"),
    "GetUse": pb.GetUseRequest(),
    "ListAttachedIndexes": pb.ListAttachedIndexesRequest(),
    "AttachIndex": pb.AttachIndexRequest(path="/absent"),
    "DetachIndex": pb.DetachIndexRequest(path="/absent"),
    "GetSettings": pb.GetSettingsRequest(),
    "ReloadSettings": pb.ReloadSettingsRequest(),
    "SnapshotState": pb.SnapshotStateRequest(),
    "Drain": pb.DrainRequest(),
}
STREAMED = {"ListSessions", "ListTenants", "GetUse"}


@dataclass(frozen=True, slots=True)
class Served:
    """A service with its admin plane.

    Attributes:
        drafter: what drafts.
        address: where drafts are.
        admin: where operators are answered.
        audit: the audit log.
        access: the access file.
        tokens: what it lets in, by the name.
    """

    drafter: EmbeddedDrafter
    address: str
    admin: str
    audit: Path
    access: Path
    tokens: dict[str, str]

    def recorded(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.audit.read_text().splitlines()]


async def entered(serving: AbstractAsyncContextManager[str]) -> str:
    return await serving.__aenter__()


async def left(serving: AbstractAsyncContextManager[str]) -> None:
    await serving.__aexit__(None, None, None)


@contextmanager
def served(
    folder: Path, index: Path, *, with_access: bool, began_with: Mapping[str, str] | None = None
) -> Iterator[Served]:
    """Serve; `began_with` is the environment at the start, which is empty from then on."""
    access = folder / "access"
    draft, delete = [Scope.DRAFT], [Scope.DRAFT, Scope.DELETE]
    tokens = {
        "drafts": add_token(access, "acme", draft),
        "deletes": add_token(access, "acme", delete),
        "alice": add_token(access, "", [Scope.ADMIN], "alice"),
        "bob": add_token(access, "", [Scope.ADMIN], "bob"),
    }
    protection = Protection.of(ProtectionFiles(access=access if with_access else None))
    drafter = EmbeddedDrafter.open_indexes([index], state=folder / "state")
    observer = ServiceObserver()
    began = resolve(Settings, {}, began_with or {})
    live = LiveSettings(began, partial(resolve, Settings, {}, {}))
    administered = Administered(
        Service(drafter, observer, time.time()),
        live,
        AuditLog(folder / "audit.jsonl"),
        folder / "copies",
    )
    plane = AdminPlane(f"unix:{folder}/admin", administered, protection, has_access=with_access)
    plane.check(f"unix:{folder}/drafts")
    serving = plane.serving()
    admin = on_loop(entered(serving))
    server, address = on_loop(start(drafter, f"unix:{folder}/drafts", observer, protection))
    try:
        yield Served(drafter, address, admin, folder / "audit.jsonl", access, tokens)
    finally:
        on_loop(server.stop(0))
        on_loop(left(serving))
        drafter.shut_down()


@pytest.fixture
def service(tmp_path: Path, index: Path) -> Iterator[Served]:
    """A service without an access file: its socket is its operator's."""
    with served(tmp_path, index, with_access=False) as found:
        yield found


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, index: Path) -> Iterator[Served]:
    """A service with an access file."""
    with served(tmp_path_factory.mktemp("guarded"), index, with_access=True) as found:
        yield found


def answer(stub: Any, name: str, request: Any = None) -> Any:
    call = getattr(stub, name)(CALLS[name] if request is None else request, timeout=30)
    return list(call) if name in STREAMED else call


def status_of(stub: Any, name: str, request: Any = None) -> grpc.StatusCode:
    try:
        answer(stub, name, request)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def test_the_calls_of_this_test_are_those_of_the_contract() -> None:
    contract = pb.DESCRIPTOR.services_by_name["AdminService"]
    assert CALLS.keys() == {method.name for method in contract.methods}


def test_the_contract_keeps_the_rules_of_the_other() -> None:
    """Each call has messages of its own, and each field tells its default."""
    proto = Path(__file__).parents[4] / "proto" / "retriever" / "v1" / "admin.proto"
    lines = [line.strip() for line in proto.read_text().splitlines()]
    for name in CALLS:
        stream = "stream " if name in STREAMED else ""
        assert f"rpc {name}({name}Request) returns ({stream}{name}Response);" in lines
    comment, undocumented = "", []
    for line in lines:
        if re.fullmatch(r"[\w ]+ = \d+;", line) and "default" not in comment.lower():
            undocumented.append(line)
        comment = comment + line if line.startswith("//") else ""
    assert not undocumented


@pytest.mark.parametrize("name", CALLS)
def test_tenants_and_strangers_are_refused_and_learn_nothing(guarded: Served, name: str) -> None:
    guarded.drafter.open("private", np.arange(5), SequenceOptions(tenant="other"))
    before, told = len(guarded.drafter.state.sessions), guarded.recorded()
    may_draft = Credentials(token=guarded.tokens["drafts"])
    may_delete = Credentials(token=guarded.tokens["deletes"])
    wrong = Credentials(token=f"fdt_{'0' * 16}_{'A' * 43}")
    denied, unknown = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED
    for credentials, expected in (
        (may_draft, denied),
        (may_delete, denied),
        (wrong, unknown),
        (Credentials(), unknown),
    ):
        with (
            credentials.channel(guarded.admin, ()) as channel,
            pytest.raises(grpc.RpcError) as refused,
        ):
            answer(AdminServiceStub(channel), name)
        error: Any = refused.value
        assert error.code() is expected
        assert "private" not in error.details()
        assert "other" not in error.details()
    assert len(guarded.drafter.state.sessions) == before
    assert guarded.recorded() == told
    guarded.drafter.close("private", remember=False)


def test_an_operators_token_administers_and_is_named(guarded: Served) -> None:
    token = guarded.tokens["alice"]
    with administering(guarded.admin, Credentials(token=token)) as calls:
        assert answer(calls, "ListSessions") == []
        answer(calls, "EvictTenant")
    assert guarded.recorded()[-1]["who"] == "credential alice"
    with Credentials(token=token).channel(guarded.address, ()) as channel:
        drafts: Any = RetrieverServiceStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            drafts.Draft(pb_drafts.DraftRequest(context=[1, 2]))
    error: Any = refused.value
    assert error.code() is grpc.StatusCode.PERMISSION_DENIED
    remove(guarded.access, "alice")
    until = time.monotonic() + 5
    with administering(guarded.admin, Credentials(token=token)) as calls:
        while status_of(calls, "ListSessions") is grpc.StatusCode.OK:
            assert time.monotonic() < until
            time.sleep(0.05)
        assert status_of(calls, "ListSessions") is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("name", CALLS)
def test_where_drafts_are_nothing_is_administered(
    guarded: Served, service: Served, name: str
) -> None:
    administrator = Credentials(token=add_token(guarded.access, "", [Scope.ADMIN]))
    for credentials, address in (
        (administrator, guarded.address),
        (Credentials(), service.address),
    ):
        with credentials.channel(address, ()) as channel:
            assert status_of(AdminServiceStub(channel), name) is grpc.StatusCode.UNIMPLEMENTED
    with (
        pytest.raises(RetrieverError, match="--admin-address"),
        administering(service.address) as calls,
    ):
        answer(calls, name)


def test_the_admin_plane_does_not_draft(service: Served) -> None:
    with Credentials().channel(service.admin, ()) as channel:
        stub: Any = RetrieverServiceStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            stub.Draft(pb_drafts.DraftRequest(context=[1, 2]))
    error: Any = refused.value
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    assert Path(service.admin.removeprefix("unix:")).stat().st_mode & 0o777 == 0o600


def test_addresses_where_anybody_could_administer_are_refused(
    service: Served, tmp_path: Path
) -> None:
    administered: Any = None
    access = Protection.of(ProtectionFiles(access=service.access))
    for address, protection, has_access in (
        ("127.0.0.1:0", Protection(), False),
        ("0.0.0.0:0", access, True),  # not encrypted
        (f"unix:{tmp_path}/same", Protection(), False),
    ):
        plane = AdminPlane(address, administered, protection, has_access=has_access)
        with pytest.raises(InsecureAddressError):
            plane.check(f"unix:{tmp_path}/same")
    AdminPlane("127.0.0.1:0", administered, access, has_access=True).check("127.0.0.1:0")


def test_sessions_of_a_stream_that_were_ended_are_refused_and_opened_again(
    service: Served,
) -> None:
    text = np.arange(10, dtype=np.int32)
    with RemoteDrafter(service.address) as drafter, administering(service.admin) as calls:
        drafter.open("a", text)
        drafter.open("b", text)
        (response,) = answer(calls, "ListSessions")
        names = {each.session_id.rpartition("/")[2]: each.session_id for each in response.sessions}
        assert names.keys() == {"a", "b"}
        wanted = pb.SessionFilter(session_id=names["a"])
        ended = calls.EndSessions(pb.EndSessionsRequest(filter=wanted, forget=True))
        assert (ended.num_ended, ended.num_kept) == (1, 0)
        with pytest.raises(UnknownSessionError):
            drafter.draft([DraftRequest("a", text[:0], 10, 4)])
        drafter.draft([DraftRequest("b", text[:0], 10, 4)])
        drafter.open("a", text)
        drafter.draft([DraftRequest("a", text[:0], 10, 4)])
    begun, done = service.recorded()
    assert (begun["stage"], done["stage"]) == ("begun", "ended")
    assert done["what"] == {"filter": {"session_id": names["a"]}, "forget": True}
    assert done["outcome"] == {"num_ended": 1, "num_kept": 0, "num_not_on_disk": 0}


def test_an_empty_filter_ends_nothing_unless_all_is_meant(service: Served) -> None:
    service.drafter.open("a", np.arange(5))
    with Credentials().channel(service.admin, ()) as channel:
        stub: Any = AdminServiceStub(channel)
        for request in (
            pb.EndSessionsRequest(),
            pb.EndSessionsRequest(filter=pb.SessionFilter(), forget=True),
        ):
            assert status_of(stub, "EndSessions", request) is grpc.StatusCode.INVALID_ARGUMENT
        assert len(service.drafter.state.sessions) == 1
        assert stub.EndSessions(pb.EndSessionsRequest(all=True)).num_ended == 1


def test_many_sessions_and_tenants_are_listed_in_parts(service: Served) -> None:
    for number in range(600):
        service.drafter.open(f"s{number}", np.arange(3), SequenceOptions(tenant=f"t{number % 300}"))
    with administering(service.admin) as calls:
        sessions = answer(calls, "ListSessions")
        assert [len(each.sessions) for each in sessions] == [*[64] * 9, 24]
        assert [len(each.tenants) for each in answer(calls, "ListTenants")] == [*[64] * 4, 44]
        wanted = pb.SessionFilter(tenant="t7")
        some = answer(calls, "ListSessions", pb.ListSessionsRequest(filter=wanted))
        assert [each.session_id for part in some for each in part.sessions] == ["s7", "s307"]


def test_use_is_told_by_tenant(service: Served) -> None:
    use = service.drafter.state.uses.of("acme")
    use.drafts, use.nodes, use.tokens, use.seconds, use.refused = 3, 40, 500, 0.25, 1
    service.drafter.state.uses.others.drafts = 9
    service.drafter.open("s", np.arange(300) % 50, SequenceOptions(tenant="acme"))
    with administering(service.admin) as calls:
        first, second = answer(calls, "GetUse")
        assert first.others.num_drafts == 9
        by_tenant = {each.tenant: each for each in second.tenants}
        acme = by_tenant["acme"]
        assert (acme.num_drafts, acme.num_nodes, acme.num_tokens) == (3, 40, 500)
        assert (acme.work_s, acme.num_refused) == (0.25, 1)
        assert acme.num_bytes > 300 * 4
        assert 0 < second.since_s <= time.time()
        (alone,) = answer(calls, "GetUse", pb.GetUseRequest(tenant="nobody"))
        assert [each.tenant for each in alone.tenants] == ["nobody"]
        assert not alone.tenants[0].num_drafts


def test_a_busy_tenant_is_counted_apart_however_many_come_and_go(service: Served) -> None:
    uses = service.drafter.state.uses
    for number in range(5000):
        uses.of(f"t{number}").drafts += 1
        if number % 100 == 0:
            uses.of("busy").drafts += 1
    with administering(service.admin) as calls:
        answers = answer(calls, "GetUse")
    by_tenant = {each.tenant: each for part in answers for each in part.tenants}
    assert by_tenant["busy"].num_drafts == 50
    told = sum(each.num_drafts for each in by_tenant.values()) + answers[0].others.num_drafts
    assert told == 5050
    assert answers[0].others.num_drafts > 3900


def test_settings_tell_no_secret(tmp_path: Path, index: Path) -> None:
    secret = {"FOREDRAFT_REDIS": "redis://alice:swordfish@redis:6379/0?password=swordfish"}
    with served(tmp_path, index, with_access=False, began_with=secret) as service:
        assert_no_secret_is_told(service)


def assert_no_secret_is_told(service: Served) -> None:
    with administering(service.admin) as calls:
        shown = answer(calls, "GetSettings")
        by_name = {each.name: each for each in shown.settings}
        assert by_name["redis"].origin == "FOREDRAFT_REDIS"
        assert "swordfish" not in str(shown)
        assert list(by_name) == list(Settings.model_fields)
        assert by_name["max_sessions"].can_change
    with (
        pytest.raises(NotPossibleError, match="redis") as refused,
        administering(service.admin) as calls,
    ):
        answer(calls, "ReloadSettings")
    assert "swordfish" not in str(refused.value)
    assert "swordfish" not in service.audit.read_text()


def test_without_an_audit_log_nothing_is_changed(service: Served) -> None:
    service.drafter.open("a", np.arange(5))
    service.audit.chmod(0o644)
    with Credentials().channel(service.admin, ()) as channel:
        stub = AdminServiceStub(channel)
        changing = {"EndSessions", "EvictTenant", "AttachIndex", "DetachIndex", "ReloadSettings"}
        for name in sorted({*changing, "SnapshotState", "Drain"}):
            assert status_of(stub, name) is grpc.StatusCode.FAILED_PRECONDITION
        for name in sorted(CALLS.keys() - changing - {"SnapshotState", "Drain"}):
            assert status_of(stub, name) is grpc.StatusCode.OK
    assert len(service.drafter.state.sessions) == 1
    assert service.audit.read_text() == ""


def test_copies_at_once_are_made_one_by_one(service: Served) -> None:
    with Credentials().channel(service.admin, ()) as channel:
        stub: Any = AdminServiceStub(channel)
        waiting = [
            stub.SnapshotState.future(pb.SnapshotStateRequest(name=f"c{at}")) for at in range(6)
        ]
        codes = [each.code() for each in waiting]
        twice = status_of(stub, "SnapshotState", pb.SnapshotStateRequest(name="again"))
        assert twice is grpc.StatusCode.OK
        taken = status_of(stub, "SnapshotState", pb.SnapshotStateRequest(name="again"))
        assert taken is grpc.StatusCode.FAILED_PRECONDITION
    assert grpc.StatusCode.OK in codes
    assert set(codes) <= {grpc.StatusCode.OK, grpc.StatusCode.FAILED_PRECONDITION}
    copies = {each.name for each in (service.audit.parent / "copies").iterdir()}
    assert len(copies) == codes.count(grpc.StatusCode.OK) + 1


def test_others_draft_while_an_index_is_opened(
    service: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attaching runs in a thread: one that takes a second holds up no draft and no other call."""
    opened = threading.Event()

    def slowly(_: Administration, path: str, tenant: str | None = None) -> None:
        del path, tenant
        time.sleep(1)
        opened.set()
        raise RetrieverError("slow and then refused")

    monkeypatch.setattr(Administration, "attach", slowly)
    longest = 0.0
    with ExitStack() as stack:
        drafter = stack.enter_context(RemoteDrafter(service.address))
        calls = stack.enter_context(Credentials().channel(service.admin, ()))
        stub: Any = AdminServiceStub(calls)
        drafter.open("a", np.arange(10))
        attaching = stub.AttachIndex.future(pb.AttachIndexRequest(path="/slow"))
        while not opened.is_set():
            began = time.perf_counter()
            drafter.draft([DraftRequest("a", NO_TOKENS, 10, 4)])
            longest = max(longest, time.perf_counter() - began)
            assert status_of(stub, "ListSessions") is grpc.StatusCode.OK
        assert attaching.code() is grpc.StatusCode.INTERNAL
    assert longest < 0.5


NAMES = st.one_of(st.text(max_size=12), st.sampled_from(["", "acme", "a" * 300, "\0", "../x", "/"]))
FILTERS = st.builds(
    pb.SessionFilter,
    tenant=st.none() | NAMES,
    session_id=NAMES,
    min_idle_s=st.floats(),
)
REQUESTS = st.one_of(
    st.tuples(st.just("ListSessions"), st.builds(pb.ListSessionsRequest, filter=FILTERS)),
    st.tuples(
        st.just("EndSessions"),
        st.builds(pb.EndSessionsRequest, filter=FILTERS, forget=st.booleans(), all=st.booleans()),
    ),
    st.tuples(
        st.just("EvictTenant"),
        st.builds(pb.EvictTenantRequest, tenant=NAMES, lose=st.booleans()),
    ),
    st.tuples(st.just("GetUse"), st.builds(pb.GetUseRequest, tenant=st.none() | NAMES)),
    st.tuples(
        st.just("ListAttachedIndexes"),
        st.builds(pb.ListAttachedIndexesRequest, tenant=st.none() | NAMES),
    ),
    st.tuples(
        st.sampled_from(["AttachIndex", "DetachIndex"]),
        st.builds(pb.AttachIndexRequest, path=NAMES, tenant=st.none() | NAMES),
    ),
    st.tuples(st.just("SnapshotState"), st.builds(pb.SnapshotStateRequest, name=NAMES)),
    st.tuples(st.sampled_from(sorted(CALLS.keys() - {"Drain"})), st.binary(max_size=40)),
)
EXPECTED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
}


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory, index: Path) -> Iterator[tuple[Served, Any]]:
    folder = tmp_path_factory.mktemp("fuzzed")
    with (
        served(folder, index, with_access=False) as found,
        Credentials().channel(found.admin, ()) as channel,
    ):
        yield found, channel


@given(script=st.lists(REQUESTS, max_size=6))
def test_whatever_is_sent_is_answered(
    fuzzed: tuple[Served, Any], script: list[tuple[str, Any]]
) -> None:
    """No call ends otherwise than by a refusal that says why, and drafts go on."""
    service, channel = fuzzed
    for name, request in script:
        content = request if isinstance(request, bytes) else request.SerializeToString()
        kind = channel.unary_stream if name in STREAMED else channel.unary_unary
        call = kind(f"/retriever.v1.AdminService/{name}", lambda sent: sent, lambda got: got)
        try:
            answered = call(content, timeout=30)
            if name in STREAMED:
                list(answered)
        except grpc.RpcError as error:
            failed: Any = error
            assert failed.code() in EXPECTED, (name, content, failed.details())
            assert failed.details()
    assert len(service.drafter.stats().indexes) == 1
    assert len(service.drafter.draft_context(np.arange(10), 4)) >= 0
    stages = [line["stage"] for line in service.recorded()]
    assert stages.count("begun") == stages.count("ended")
