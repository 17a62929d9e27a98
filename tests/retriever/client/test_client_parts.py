"""The parts of the client that need no fault: placing, pausing, drafting locally, limits."""

import asyncio
import tracemalloc
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest

from retriever.client.asynchronous import AsyncResilientDrafter
from retriever.client.conversation import (
    EACH_TOKENS,
    MAX_BACKLOG_TOKENS,
    Conversation,
    FailOpen,
    PendingCloses,
    SequenceStep,
)
from retriever.client.local import LocalDrafter
from retriever.client.planner import LocalSide, Plan, Planner, ranked
from retriever.client.resilient import LONGEST_S, SHORTEST_S, Pace, ResilientDrafter
from retriever.drafter import FORGOTTEN, DraftRequest, SequenceOptions
from retriever.errors import InvalidRequestError, OutOfSequenceError, UnknownSessionError
from retriever.limits import Limits
from retriever.sequences import TokenSequence
from retriever.service.serving import start
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.sessions.service_face import ServiceFace
from retriever.tree import DraftTree, Source
from retriever.v1 import retriever_pb2 as pb
from tests.retriever.service.decodes import PROMPT, decode, plain, wait_until
from tests.retriever.token_ids import ids


def test_sessions_are_spread_evenly_and_only_those_of_a_lost_server_move() -> None:
    servers = [f"10.0.0.{at}:50051" for at in range(5)]
    first = {f"s{at}": ranked(f"s{at}", servers) for at in range(2000)}
    counts = Counter(order[0] for order in first.values())
    assert min(counts.values()) > 300
    for name, order in first.items():
        assert sorted(order) == servers
        assert ranked(name, reversed(servers)) == order
        assert ranked(name, servers[1:]) == [each for each in order if each != servers[0]]


def test_deadline_follows_the_engine() -> None:
    pace = Pace(None)
    now_s = 0.0
    for step_s in (0.001, 0.06, 0.3):
        for _ in range(100):
            pace.begin(now_s)
            pace.end(now_s)
            now_s += step_s
        expected = min(max(step_s / 4, SHORTEST_S), LONGEST_S)
        assert pace.deadline_s == pytest.approx(expected, rel=0.01)
    before = pace.deadline_s
    assert pace.begin(now_s + 100) == now_s + 100 + before  # idle time is no step
    assert Pace(0.5).begin(1.0) == 1.5


def continuation_twin(tokens: list[int], text: list[int]) -> tuple[list[int], int]:
    """The longest of the last 8 tokens that recurs; where it recurs last."""
    for length in range(min(8, len(tokens)), 0, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == tokens[-length:]:
                return text[end : end + 16], length
    return [], 0


def test_local_draft_is_what_followed_the_longest_match() -> None:
    rng = np.random.default_rng(5)
    for _ in range(300):
        drafter = LocalDrafter()
        recent: list[int] = []
        for number in range(int(rng.integers(0, 3))):
            drafter.open(str(number), [])
            output = rng.integers(0, 4, int(rng.integers(1, 20)))
            drafter.close(str(number), output)
            recent += [-1, *output.tolist()]
        tokens = rng.integers(0, 4, int(rng.integers(1, 30))).astype(np.int32)
        drafter.open("s", tokens[:1])
        (tree,) = drafter.draft([DraftRequest("s", tokens[1:], len(tokens), 5)])
        own, own_length = continuation_twin(tokens.tolist(), tokens.tolist())
        followed, length = continuation_twin(tokens.tolist(), recent)
        wanted = followed if length > own_length else own
        wanted = wanted[: wanted.index(-1)] if -1 in wanted else wanted
        assert tree.token_ids.tolist() == wanted[:5]
        source = Source.GENERATIONS if length > own_length else Source.CONTEXT
        assert set(tree.sources) <= {source}


def test_local_drafter_keeps_its_contract() -> None:
    drafter = LocalDrafter(recent_tokens=8)
    drafter.open("s", [1, 2, 3], FORGOTTEN)
    with pytest.raises(OutOfSequenceError):
        drafter.draft([DraftRequest("s", ids(1), 9, 4)])
    (tree,) = drafter.draft([DraftRequest("s", ids(1, 2), 5, 4, 0.3)])
    assert tree.token_ids.tolist() == [3]
    drafter.close("s", ids(9))
    with pytest.raises(UnknownSessionError):
        drafter.close("s")
    drafter.open("t", [1, 2])
    assert len(drafter.draft([DraftRequest("t", ids(), 2, 4)])[0]) == 0  # it was to forget
    drafter.close("t", np.arange(100))
    for token, continuation in ((91, []), (92, [93]), (98, [99])):  # the last eight are kept
        drafter.open("u", [token])
        (tree,) = drafter.draft([DraftRequest("u", ids(), 1, 1)])
        assert tree.token_ids.tolist() == continuation
        drafter.close("u")


def test_backlog_is_bounded_and_keeps_the_newest() -> None:
    closes = PendingCloses()
    for number in range(20):
        closes.tell(np.full(MAX_BACKLOG_TOKENS // 8 - EACH_TOKENS, number, np.int32))
    for number in range(12, 20):  # so long an output travels alone
        message = pb.DraftStreamRequest()
        (output,) = closes.add_outputs(message, iter("ab"), "")
        assert int(output[0]) == number
        assert len(message.closings[0].new_token_bytes) == 4 * (
            MAX_BACKLOG_TOKENS // 8 - EACH_TOKENS
        )
    assert not len(closes)
    closes.tell(np.zeros(MAX_BACKLOG_TOKENS - EACH_TOKENS, np.int32))
    assert len(closes) == 1  # there is all the room again


@pytest.mark.soak
def test_backlog_is_bounded_in_memory_whatever_ends() -> None:
    """A server that is away for thousands of long prompts and short outputs costs megabytes."""
    conversation = Conversation("nowhere", "")
    tracemalloc.start()
    for at in range(30_000):
        sequence = TokenSequence(np.zeros(2000, np.int32))
        sequence.extend(ids(1))
        conversation.close(str(at), sequence)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 16 << 20
    conversation.begin()
    num_told = 0
    while (message := conversation.rest(0.0)) is not None:
        num_told += len(message.closings)
        conversation.settle(pb.DraftStreamResponse(sequence_number=message.sequence_number))
    assert num_told == MAX_BACKLOG_TOKENS // (EACH_TOKENS + 1)


def test_sessions_that_were_closed_on_a_lost_stream_are_told_as_outputs() -> None:
    closes = PendingCloses()
    closes.close("kept", ids(9).tobytes(), ids(8, 9))
    closes.close("forgotten", ids(7).tobytes())
    closes.close("empty", b"", ids())
    closes.lose()
    message = pb.DraftStreamRequest()
    closes.add_outputs(message, iter("abc"), "")
    assert [closing.new_token_bytes for closing in message.closings] == [ids(8, 9).tobytes()]
    assert not len(closes)


def test_reconnecting_costs_no_step_much_more_than_others() -> None:
    """What was missed travels in parts: prompts as the deadline allows, outputs a few at a time."""
    conversation = Conversation("nowhere", "")
    conversation.begin()
    steps = []
    for at in range(64):
        sequence = TokenSequence(np.zeros(8000, np.int32))
        steps.append(SequenceStep(DraftRequest(str(at), ids(), 8000, 4), sequence))
        ended = TokenSequence(ids(1))
        ended.extend(np.zeros(1000, np.int32))
        conversation.close(f"ended-{at}", ended)
    message, left_out = conversation.ask(steps, 0.0, 0.01)
    assert 0 < len(message.openings) < 10
    assert len(left_out) == 64 - len(message.openings)
    assert set(left_out.values()) == {FailOpen.BUSY}
    told = conversation.rest(0.0)
    assert told is not None
    assert 0 < len(told.closings) < 20
    message, left_out = conversation.ask(steps, 0.0, 10.0)
    assert len(message.openings) == len(message.steps)
    assert len(left_out) == 64 - len(message.openings)  # those that are asked already


def test_a_local_side_catches_up_and_outlives_sessions_that_ended() -> None:
    drafter = LocalDrafter()
    side, sequence = LocalSide(drafter), TokenSequence(ids(1, 2))

    def drafted(*tokens: int) -> list[int]:
        sequence.extend(tokens)
        request = DraftRequest("s", np.array(tokens[-1:], np.int32), len(sequence), 4)
        trees = side.draft([SequenceStep(request, sequence)], 0.0)
        return trees["s"].token_ids.tolist() if trees else []

    assert drafted(9, 8, 1) == [2, 9, 8, 1]  # 9 and 8 were never asked for here
    drafter.close("s")
    assert drafted(2) == []
    assert drafted(9) == [8, 1, 2, 9]  # all of it was told again
    side.close("s", sequence)
    late = TokenSequence(ids(7))
    late.extend([5, 6, 4])
    side.close("late", late)  # it never was asked for here
    drafter.open("t", [5, 6])
    (tree,) = drafter.draft([DraftRequest("t", ids(), 2, 4)])
    assert tree.token_ids.tolist() == [4]
    assert LocalSide(False).draft([], 0.0) == {}


def test_cancelled_step_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that was planned is finished, too."""
    plan, finish, under_way = Planner.plan, Planner.finish, list[Plan]()
    step_each, released = ServiceFace.step_each, Event()

    def stuck(
        face: ServiceFace, requests: Sequence[DraftRequest], namespace: str
    ) -> list[DraftTree] | None:
        assert released.wait(60)
        return step_each(face, requests, namespace)

    def planned(planner: Planner, *arguments: Any) -> Plan:
        under_way.append(plan(planner, *arguments))
        return under_way[-1]

    def finished(planner: Planner, done: Plan) -> list[DraftTree]:
        under_way.remove(done)
        return finish(planner, done)

    monkeypatch.setattr(Planner, "plan", planned)
    monkeypatch.setattr(Planner, "finish", finished)
    monkeypatch.setattr(ServiceFace, "step_each", stuck)

    async def run() -> None:
        with serving(EmbeddedDrafter()) as address:
            async with AsyncResilientDrafter(address, deadline_s=30) as drafter:
                assert await drafter.wait(60)
                await drafter.open("s", [1, 2])
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.1):
                        await drafter.draft([DraftRequest("s", ids(), 2, 4)])
                released.set()
                assert under_way == []
                await drafter.draft([DraftRequest("s", ids(), 2, 4)])

    asyncio.run(run())


@contextmanager
def serving(drafter: EmbeddedDrafter) -> Iterator[str]:
    """Serve in this process, on an event loop in a thread; give the address."""
    addresses: list[str] = []
    is_up, stopped = Event(), Event()

    async def run() -> None:
        server, address = await start(drafter, "127.0.0.1:0")
        addresses.append(address)
        is_up.set()
        await asyncio.to_thread(stopped.wait)
        await server.stop(0)

    thread = Thread(target=asyncio.run, args=(run(),))
    thread.start()
    is_up.wait(60)
    try:
        yield addresses[0]
    finally:
        stopped.set()
        thread.join()


def test_session_that_the_service_has_no_room_for_is_drafted_locally() -> None:
    service = EmbeddedDrafter(limits=Limits(max_sessions=1))
    service.open("other", PROMPT)
    with serving(service) as address, ResilientDrafter(address, deadline_s=5) as drafter:
        assert drafter.wait(60)
        done = decode(drafter, "s", 300)
        assert done.tokens == plain(300)
        assert sum(done.accepted) > 100
        assert set(drafter.fail_opens) == {FailOpen.LIMIT}
        assert len(service.state.sessions) == 1  # and it is not asked again at every step
        service.close("other")
        decode(drafter, "t", 300)
        assert drafter.fail_opens.total() == len(done.waits_s)
        assert wait_until(lambda: len(service.state.sessions) == 0)


def test_outputs_reach_the_service_unless_they_are_to_be_forgotten() -> None:
    service = EmbeddedDrafter()
    with serving(service) as address, ResilientDrafter(address, deadline_s=5) as drafter:
        assert drafter.wait(60)
        for name, token, remember in (("kept", 1, True), ("gone", 2, False)):
            drafter.open(name, PROMPT, SequenceOptions(remember=remember))
            drafter.draft([DraftRequest(name, ids(token, token), len(PROMPT) + 2, 0)])
            drafter.close(name, ids(token, token + 10))
    assert wait_until(lambda: len(service.state.sessions) == 0)
    assert Source.GENERATIONS in service.draft_context(ids(1), 4).sources
    assert Source.GENERATIONS not in service.draft_context(ids(2), 4).sources
    with serving(service) as address, ResilientDrafter(address, deadline_s=5) as drafter:
        drafter.open("late", PROMPT)
        drafter.close("late", ids(3, 3, 3, 13))  # perhaps before there was a connection
        assert drafter.wait(60)
    assert Source.GENERATIONS in service.draft_context(ids(3), 4).sources


def test_requests_at_fault_are_refused_by_the_client_itself() -> None:
    with ResilientDrafter("127.0.0.1:1", local=False) as drafter:
        drafter.open("s", [1, 2])
        with pytest.raises(OutOfSequenceError):
            drafter.draft([DraftRequest("s", ids(1), 9, 4)])
        with pytest.raises(InvalidRequestError, match="twice"):
            drafter.draft([DraftRequest("s", ids(), 2, 4)] * 2)
        with pytest.raises(UnknownSessionError):
            drafter.draft([DraftRequest("t", ids(), 2, 4)])
        assert len(drafter.draft([DraftRequest("s", ids(1), 3, 4)])[0]) == 0
    for addresses in ([], ["a:1", "a:1"]):
        with pytest.raises(InvalidRequestError, match="once"):
            ResilientDrafter(addresses)
