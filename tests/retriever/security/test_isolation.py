"""No draft ever holds another tenant's token, however their sessions interleave."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import grpc
import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

from retriever.client.credentials import Credentials
from retriever.limits import Limits
from retriever.log.pools import Pools
from retriever.predict.pool import Pool
from retriever.security.access import TENANT_SCOPES, add_token
from retriever.security.protection import Protection, ProtectionFiles
from retriever.service.gate import Call
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.v1 import retriever_pb2 as pb
from retriever.v1.retriever_pb2_grpc import RetrieverServiceStub
from tests.retriever.security.in_process import serving
from tests.suite_parts import cases

TENANTS = ("a", "b", "c")
COMMON = range(8)
"""Tokens that all tenants use: what is found by them may only go on with one's own."""


def own(tenant: str) -> range:
    begin = 100 * (1 + TENANTS.index(tenant))
    return range(begin, begin + 100)


def predicted(tenant: str, session: str) -> list[int]:
    """Tokens that only the predictions of one session hold, and that never come."""
    begin = 60 if session == "s0" else 80
    return list(own(tenant)[begin : begin + 4])


@dataclass
class Tenant:
    name: str
    stub: RetrieverServiceStub
    lengths: dict[str, int]

    def reset(self) -> None:
        self.stub.DeleteTenantData(pb.DeleteTenantDataRequest())
        for session in ("s0", "s1"):
            self.stub.DeleteSessionData(pb.DeleteSessionDataRequest(session_id=session))
        self.lengths.clear()

    def open(self, session: str, tokens: list[int]) -> None:
        if session not in self.lengths:
            # All tenants call a group the same; its sessions draft from one another.
            opening = pb.OpenSessionRequest(session_id=session, prompt=tokens, group="g")
            self.stub.OpenSession(opening)
            self.lengths[session] = len(tokens)

    def step(self, session: str, tokens: list[int]) -> None:
        length = self.lengths.get(session, 0) + len(tokens)
        step = pb.SessionStep(
            session_id=session, new_token_ids=tokens, length=length, budget_nodes=32
        )
        message = pb.DraftStreamRequest(sequence_number=1, steps=[step])
        (response,) = self.stub.DraftStream(iter([message]))
        self.check(response.trees[0], session)
        if session in self.lengths:
            assert not response.statuses
            self.lengths[session] = length
        else:
            (status,) = response.statuses
            assert status.code == grpc.StatusCode.NOT_FOUND.value[0]
            assert status.message == f"no session {session!r} is open: open it first"

    def close(self, session: str, tokens: list[int]) -> None:
        request = pb.CloseSessionRequest(session_id=session, new_token_ids=tokens)
        known = self.lengths.pop(session, None) is not None
        try:
            self.stub.CloseSession(request)
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.NOT_FOUND  # noqa: PT017
            assert not known
        else:
            assert known

    def predict(self, session: str, tokens: list[int]) -> None:
        texts = [pb.Prediction(token_ids=[*tokens[:4], *predicted(self.name, session)])]
        request = pb.AddPredictionsRequest(session_id=session, predictions=texts)
        try:
            self.stub.AddPredictions(request)
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.NOT_FOUND  # noqa: PT017
            assert session not in self.lengths
        else:
            assert session in self.lengths

    def draft(self, _session: str, tokens: list[int]) -> None:
        self.check(self.stub.Draft(pb.DraftRequest(context=tokens, budget_nodes=32)).tree)

    def explain(self, _session: str, tokens: list[int]) -> None:
        self.check(self.stub.Explain(pb.ExplainRequest(context=tokens, budget_nodes=32)).tree)

    def check(self, tree: pb.DraftTree, session: str = "") -> None:
        known = {*COMMON, *own(self.name)}
        for name in {"s0", "s1"} - {session}:
            known -= set(predicted(self.name, name))
        foreign = set(tree.token_ids) - known
        assert not foreign, f"{self.name} was drafted {foreign}"


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Tenant]]:
    folder = tmp_path_factory.mktemp("tenants")
    access = folder / "access"
    shown = {name: Credentials(token=add_token(access, name, TENANT_SCOPES)) for name in TENANTS}
    protection = Protection.of(ProtectionFiles(access=access))
    drafter = EmbeddedDrafter(limits=Limits(max_tenant_deletions=1 << 20))
    with serving(drafter, f"unix:{folder}/s", protection) as address, ExitStack() as stack:
        yield {
            name: Tenant(
                name,
                RetrieverServiceStub(stack.enter_context(credentials.channel(address, ()))),
                {},
            )
            for name, credentials in shown.items()
        }
    drafter.shut_down()


ACTIONS = ("open", "predict", "step", "step", "close", "close", "draft", "explain")
PIECE = st.tuples(st.integers(0, 3), st.integers(0, 3))
"""Where among the common tokens a piece begins, and among one's own."""


def piece(tenant: str, begins: tuple[int, int]) -> list[int]:
    common, mine = begins
    return [*COMMON[common : common + 4], *own(tenant)[mine : mine + 4], *COMMON[:4]]


@settings(
    max_examples=cases(10, of=60),
    deadline=None,
    phases=[Phase.generate],
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    script=st.lists(
        st.tuples(
            st.sampled_from(TENANTS),
            st.sampled_from(ACTIONS),
            st.sampled_from(["s0", "s1"]),
            PIECE,
        ),
        min_size=15,
        max_size=40,
    )
)
def test_tenants_that_interleave_are_isolated(
    tenants: dict[str, Tenant], script: list[tuple[str, str, str, tuple[int, int]]]
) -> None:
    for tenant in tenants.values():
        tenant.reset()
    for name, action, session, begins in script:
        getattr(tenants[name], action)(session, piece(name, begins))


def shared_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Pools.get

    def get(self: Pools, _tenant: str) -> Pool:
        return original(self, "everybody")

    monkeypatch.setattr(Pools, "get", get)


def shared_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Call, "tenant", "everybody")


@pytest.mark.parametrize(
    ("plant", "reason"),
    [(shared_pools, "was drafted"), (shared_names, "s0|s1|drafted")],
    ids=["pools", "names"],
)
def test_a_planted_leak_is_caught_by_the_same_test(
    tenants: dict[str, Tenant],
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
    reason: str,
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, grpc.RpcError), match=reason):
        test_tenants_that_interleave_are_isolated(tenants=tenants)
    monkeypatch.undo()
    with suppress(grpc.RpcError):
        for tenant in tenants.values():
            tenant.reset()


def test_anothers_session_is_answered_as_one_that_was_never_opened(
    tenants: dict[str, Tenant],
) -> None:
    for tenant in tenants.values():
        tenant.reset()
    tenants["a"].open("s0", [1, 2])
    for session in ("s0", "s1"):
        tenants["b"].step(session, [3])
        tenants["b"].close(session, [3])
    tenants["b"].open("s0", [1, 2, 3])
    tenants["a"].step("s0", [3])
    tenants["b"].step("s0", [4])
