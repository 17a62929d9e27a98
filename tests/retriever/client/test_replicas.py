"""Several services of one model behind one client: sessions stick, move on, and come back."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import pytest

from retriever.client.connecting import connect
from retriever.client.conversation import FailOpen
from retriever.client.planner import Planner, ranked
from retriever.client.resilient import ResilientDrafter
from retriever.client.strict import RemoteDrafter
from retriever.drafter import DraftRequest
from retriever.errors import DrainingError, InvalidRequestError, LimitExceededError
from retriever.limits import Limits
from retriever.tree import DraftTree
from retriever.v1 import retriever_pb2 as pb
from retriever.wire.messages import tree_to_message
from retriever.wire.statuses import session_status
from tests.patience import can_be_kept, free_address, must_hold
from tests.retriever.client.kinds_of_clients import Client, both
from tests.retriever.client.replica_servers import Replica
from tests.retriever.service.decodes import PROMPT, decode, plain, wait_until
from tests.retriever.token_ids import ids
from tests.retriever.warm_interpreter import run

BUDGET: Final = 4


@contextmanager
def replicas(limits: Limits | None = None) -> Iterator[tuple[Replica, Replica]]:
    """Give the replica that prefers the session "s", and the other."""
    made = {each.address: each for each in (Replica(limits or Limits()), Replica())}
    home, other = (made[address] for address in ranked("s", made))
    if limits is not None and home.limits is not limits:
        home, other = _limited_home(made, limits)
    try:
        yield home, other
    finally:
        for each in (home, other):
            each.shut_down()


def _limited_home(made: dict[str, Replica], limits: Limits) -> tuple[Replica, Replica]:
    """Move the limited replica to an address that the session prefers."""
    limited = next(each for each in made.values() if each.limits is limits)
    other = next(each for each in made.values() if each is not limited)
    while ranked("s", [limited.address, other.address])[0] != limited.address:
        limited.end()
        limited.address = free_address()
        limited.begin()
    return limited, other


class Steps:
    """Decoding of one session, step by step."""

    def __init__(self, drafter: Any, session: str = "s") -> None:
        self._drafter, self._session, self.length = drafter, session, len(PROMPT)
        drafter.open(session, PROMPT)
        self.take(0)

    def take(self, num_tokens: int = 1) -> bool:
        """Commit tokens of the phrase; return whether a server has drafted."""
        missed = self._drafter.fail_opens.total()
        new = plain(self.length + num_tokens)[self.length : self.length + num_tokens]
        self.length += num_tokens
        request = DraftRequest(self._session, np.array(new, np.int32), self.length, BUDGET)
        self._drafter.draft([request])
        return bool(self._drafter.fail_opens.total() == missed)

    @property
    def server(self) -> str:
        return str(self._drafter.server_of(self._session))


@both
@can_be_kept
def test_a_session_leaves_a_server_that_drains_and_misses_no_draft(client: Client) -> None:
    with (
        replicas() as (home, other),
        client([home.address, other.address], deadline_s=1, local=False) as drafter,
    ):
        assert drafter.wait(60)
        steps = Steps(drafter)
        assert steps.server == home.address
        home.drain()
        for _ in range(4):
            steps.take(8)
        assert steps.server == other.address
        assert wait_until(lambda: home.num_sessions == 0, 5)
        assert other.num_sessions == 1
        drafter.close("s")
        assert wait_until(lambda: other.num_sessions == 0, 5)
        assert home.generated_tokens == 0  # remembered once, by the server that it ended at
        assert other.generated_tokens >= 32
        assert not drafter.fail_opens


@both
@can_be_kept
def test_sessions_stay_where_they_went_and_new_ones_go_to_a_server_that_is_back(
    client: Client,
) -> None:
    with (
        replicas() as (home, other),
        client([home.address, other.address], deadline_s=1, local=False) as drafter,
    ):
        assert drafter.wait(60)
        steps = Steps(drafter)
        home.end()
        while drafter.is_up(home.address):  # it is told with a step
            steps.take()
        assert steps.take()
        assert steps.server == other.address
        missed = drafter.fail_opens.total()
        home.begin()
        assert drafter.wait(60)
        assert all(steps.take() for _ in range(3))
        assert steps.server == other.address
        drafter.close("s")
        again = Steps(drafter)
        assert again.take()
        assert again.server == home.address
        assert wait_until(lambda: (home.num_sessions, other.num_sessions) == (1, 0), 5)
        assert drafter.fail_opens.total() == missed


@both
@can_be_kept
def test_a_full_server_is_left_for_the_next(client: Client) -> None:
    with (
        replicas(Limits(max_tenant_sessions=1, idle_session_s=600)) as (home, other),
        client([home.address, other.address], deadline_s=1, local=False) as drafter,
    ):
        assert drafter.wait(60)
        home.drafter.open("somebody", ids(1, 2, 3))
        steps = Steps(drafter)
        assert drafter.fail_opens == {FailOpen.LIMIT: 1}
        assert steps.take()
        assert steps.server == other.address
        assert all(steps.take() for _ in range(3))
        assert drafter.fail_opens == {FailOpen.LIMIT: 1}


@both
@can_be_kept
def test_a_drain_within_a_drain_leaves_sessions_where_they_are(client: Client) -> None:
    with (
        replicas() as (home, other),
        client([home.address, other.address], deadline_s=1, local=False) as drafter,
    ):
        assert drafter.wait(60)
        steps = Steps(drafter)
        home.drain()
        while steps.server == home.address:
            steps.take()
        other.drain()
        assert all(steps.take() for _ in range(5))  # it still answers
        assert steps.server == other.address
        assert not drafter.fail_opens
        drafter.open("t", PROMPT)
        drafter.draft([DraftRequest("t", ids(), len(PROMPT), BUDGET)])
        assert drafter.fail_opens == {FailOpen.DRAINING: 1}


@both
@can_be_kept
def test_a_single_server_is_kept_until_it_ends(client: Client) -> None:
    with replicas() as (home, _), client(home.address, deadline_s=1) as drafter:
        assert drafter.wait(60)
        steps = Steps(drafter)
        home.drain()
        assert all(steps.take() for _ in range(3))
        assert not drafter.fail_opens
        assert decode(drafter, "new", 60).tokens == plain(60)
        assert set(drafter.fail_opens) == {FailOpen.DRAINING}
        home.end()
        home.begin()
        assert drafter.wait(60)
        before = drafter.fail_opens.total()
        steps.take()
        assert decode(drafter, "newer", 60).tokens == plain(60)
        assert drafter.fail_opens.total() == before


@pytest.mark.faults
@both
@can_be_kept
def test_outputs_are_those_of_plain_decoding_while_servers_come_and_go(client: Client) -> None:
    with (
        replicas() as (home, other),
        client([home.address, other.address], deadline_s=0.2) as drafter,
    ):
        assert drafter.wait(60)
        events = {
            15: home.drain,
            30: home.end,
            35: home.begin,
            60: other.end,
            66: other.begin,
            90: home.end,
            96: home.begin,
            120: other.drain,
        }

        def on_step(number: int) -> None:
            if number in events:
                events[number]()

        done = decode(drafter, "s", 2000, on_step=on_step, pause_s=0.004)
        must_hold(done.tokens == plain(2000), "drafts never change the output")
        assert len(done.waits_s) > 125
        assert max(done.waits_s) < 1.2 * 0.2
        missed = drafter.fail_opens.total()
        assert missed < 20, drafter.fail_opens
        assert wait_until(lambda: home.num_sessions + other.num_sessions == 0, 5)


def test_strict_clients_see_the_drain_as_its_own_error() -> None:
    with replicas() as (home, _), RemoteDrafter(home.address, timeout_s=10) as remote:
        remote.open("s", PROMPT)
        home.drain()
        with pytest.raises(DrainingError):
            remote.open("t", PROMPT)


# Without sockets: what servers are told, and how moves end.


class Wire:
    """A planner whose servers are played by the test."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.planner = Planner(["a", "b"], "", local=False, clock=lambda: self.now_s)
        self.home, self.other = ranked("s", ["a", "b"])
        self.sent: list[tuple[str, pb.DraftStreamRequest]] = []

    def begin(self, *addresses: str) -> None:
        for each in addresses:
            self.planner.conversations[each].begin()

    def step(
        self,
        lengths: dict[str, int],
        answer: Callable[[pb.DraftStreamRequest, str], pb.DraftStreamResponse] | None = None,
        deadline_s: float = 0.02,
    ) -> None:
        """Draft without new tokens for sessions, and have the servers answer."""
        requests = [DraftRequest(name, ids(), length, 4) for name, length in lengths.items()]
        plan = self.planner.plan(requests, 0.0, deadline_s)
        for address, part in list(plan.parts.items()):
            message = part.message
            if message is None:
                continue
            self.sent.append((address, message))
            self.planner.take(address, (answer or trees)(message, address))
        self.planner.finish(plan)


def trees(message: pb.DraftStreamRequest, _address: str = "") -> pb.DraftStreamResponse:
    return pb.DraftStreamResponse(
        sequence_number=message.sequence_number,
        trees=[tree_to_message(DraftTree.empty()) for _ in message.steps],
    )


def refusing(error: LimitExceededError) -> Callable[..., pb.DraftStreamResponse]:
    def answer(message: pb.DraftStreamRequest, _address: str) -> pb.DraftStreamResponse:
        response = trees(message)
        for step in message.steps:
            response.statuses.append(session_status(step.session_id, error))
        return response

    return answer


def test_a_server_that_asks_for_patience_is_given_it() -> None:
    wire = Wire()
    wire.begin(wire.home)
    wire.planner.open("s", PROMPT)
    length, home = {"s": len(PROMPT)}, wire.planner.conversations[wire.home]
    wire.step(length, refusing(LimitExceededError("full", retry_after_s=25.0)))
    wire.now_s = 24.0
    assert not home.takes("s")
    wire.step(length)
    assert not wire.sent[-1][1].openings
    wire.now_s = 31.0
    assert home.takes("s")
    wire.step(length)
    assert len(wire.sent[-1][1].openings) == 1


def test_a_draining_server_is_left_within_deadlines() -> None:
    wire = Wire()
    wire.begin("a", "b")
    lengths = {f"{number}": 20_000 for number in range(10)} | {"s": 500_000}
    for name, length in lengths.items():
        wire.planner.open(name, np.zeros(length, np.int32))
    for _ in range(15):
        wire.step(lengths, deadline_s=1.0)
    wire.planner.conversations[wire.home].is_draining = True

    def answer(message: pb.DraftStreamRequest, address: str) -> pb.DraftStreamResponse:
        response = trees(message)
        response.is_draining = address == wire.home
        return response

    del wire.sent[:]
    for _ in range(10):
        wire.step(lengths, answer, deadline_s=0.02)
    assert {wire.planner.server_of(name) for name in lengths} == {wire.other}
    opened = [
        [len(opening.prompt) for opening in message.openings]
        for address, message in wire.sent
        if address == wire.other
    ]
    assert all(sum(each) <= 100_000 or each == [500_000] for each in opened)
    told = [
        closing.forget
        for address, message in wire.sent
        if address == wire.home
        for closing in message.closings
    ]
    rest = wire.planner.conversations[wire.home].rest(0.0)
    told += [closing.forget for closing in rest.closings] if rest is not None else []
    assert told
    assert all(told)


def test_replicas_can_be_named_in_one_address() -> None:
    with (
        replicas() as (home, other),
        connect(f"{home.address}, {other.address}", deadline_s=1) as drafter,
    ):
        assert isinstance(drafter, ResilientDrafter)
        assert drafter.is_up(home.address)
        assert drafter.is_up(other.address)
        assert decode(drafter, "s", 60).tokens == plain(60)
    with pytest.raises(InvalidRequestError, match="no replicas"):
        connect(["a:1,b:1", "c:1"])
    with pytest.raises(InvalidRequestError, match="given twice"):
        connect("a:1,a:1")


def test_a_command_shows_what_a_service_is() -> None:
    with replicas() as (home, _):
        done = run("-m", "retriever", "info", home.address)
        assert done.returncode == 0, done.stderr
        assert "phase: ready\n" in done.stdout
        assert "max_batch: 1024\n" in done.stdout
    done = run("-m", "retriever", "info", home.address)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
