"""Sessions keyed by content: each holds the tokens of its row, whatever an engine does."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from decoder.engines.content_sessions import ContentSessions, Row, SessionLimits
from retriever.drafter import DraftRequest, TokenIds
from retriever.errors import (
    InvalidRequestError,
)
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.tree import DraftTree
from tests.decoder.engines.scripted import Continuation, ScriptedDrafter


def fingerprint(tokens: Sequence[int]) -> int:
    """A token that only this sequence gets."""
    return hash(tuple(tokens)) % (1 << 30)


@dataclass
class Ledger(ScriptedDrafter):
    """Notes all it is told, strictly, and drafts what only this sequence gets.

    Attributes:
        refused: a token that no prompt may hold.
    """

    continuation: Continuation = field(default=lambda tokens, _: [fingerprint(tokens)])
    refused: int = -1

    def open(self, session: str, prompt: TokenIds, *, remember: bool = True) -> None:
        if self.refused in prompt.tolist():
            raise InvalidRequestError("an unknown token")
        super().open(session, prompt, remember=remember)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Request:
    """One request of the simulated engine."""

    tokens: list[int]
    num_prompt: int


class Engine:
    """Runs requests in slots that move, as engines do: the twin that knows who is who."""

    def __init__(self, sessions: ContentSessions, num_slots: int = 8, length: int = 64) -> None:
        self.sessions = sessions
        self.table = np.full((num_slots, length), 7, np.int32)
        self.running: list[Request] = []
        self.waiting: list[Request] = []

    def step(self, new: Sequence[Sequence[int]]) -> None:
        """Every running request gets tokens; each must get the draft of its own tokens."""
        for request, tokens in zip(self.running, new, strict=True):
            request.tokens.extend(tokens)
        rows = []
        for slot, request in enumerate(self.running):
            length = len(request.tokens)
            self.table[slot, :length] = request.tokens
            self.table[slot, length:] = 7  # what others left there
            rows.append(Row(slot, self.table[slot, :length], len(new[slot]), 4))
        trees = self.sessions.draft(rows)
        seen = self.sessions.rows_seen()
        for slot, (request, tree) in enumerate(zip(self.running, trees, strict=True)):
            assert seen[slot].tolist() == request.tokens
            assert tree.token_ids.tolist() == [fingerprint(request.tokens)]


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "begin",
                "twins",
                "end",
                "preempt",
                "resume",
                "move",
                "step",
                "step",
                "truncate",
                "go on",
            ]
        ),
        st.integers(0, 7),
        st.lists(st.integers(0, 1), min_size=1, max_size=6),  # two tokens: rows are often equal
    ),
    max_size=40,
)


def act(engine: Engine, action: str, which: int, tokens: list[int]) -> None:
    """Do what an engine may do between two steps."""
    running, waiting = engine.running, engine.waiting
    room = len(engine.table) - len(running)
    if action == "begin" and room:
        running.append(Request(list(tokens), len(tokens)))
    elif action == "twins" and room > 1:
        running.extend(Request(list(tokens), len(tokens)) for _ in range(2))
    elif action == "resume" and waiting and room:
        running.insert(which % (len(running) + 1), waiting.pop(which % len(waiting)))
    elif running and action == "end":
        running.pop(which % len(running))
    elif running and action == "preempt":
        waiting.append(running.pop(which % len(running)))
    elif running and action == "move":
        running.insert(0, running.pop(which % len(running)))
    elif running and action == "truncate":
        request = running[which % len(running)]
        del request.tokens[max(1, len(request.tokens) - len(tokens)) :]
    elif running and action == "go on":  # a new request that begins with all of an old one
        old = running.pop(which % len(running))
        running.append(Request([*old.tokens, *tokens], len(old.tokens) + len(tokens)))


@settings(max_examples=200, deadline=None)
@given(ACTIONS)
def test_every_row_is_drafted_for_as_itself(actions: list[tuple[str, int, list[int]]]) -> None:
    drafter = Ledger()
    engine = Engine(ContentSessions(drafter, SessionLimits(idle_calls=3), Clock()), length=512)
    for action, which, tokens in actions:
        act(engine, action, which, tokens)
        steps = [tokens[: 1 + (which + slot) % 3] for slot in range(len(engine.running))]
        engine.step(steps)
    assert len(engine.sessions) == len(drafter.sessions)
    held = sorted(tokens.tolist() for tokens in engine.sessions.rows_seen().values())
    assert held == sorted(request.tokens for request in engine.running)
    engine.sessions.close()
    assert (len(engine.sessions), engine.sessions.num_tokens) == (0, 0)
    assert not drafter.sessions


def run(engine: Engine, num_steps: int, num_tokens: int = 1) -> None:
    for _ in range(num_steps):
        engine.step([[index] * num_tokens for index in range(len(engine.running))])


def test_only_new_tokens_are_told_while_slots_move() -> None:
    drafter = Ledger()
    engine = Engine(ContentSessions(drafter))
    engine.running = [Request([1, 2, 3, slot], 4) for slot in range(4)]
    run(engine, 3, 2)
    engine.running.reverse()
    run(engine, 3, 2)
    assert drafter.told == sum(len(request.tokens) for request in engine.running)
    assert engine.sessions.counts.begun == 4
    assert engine.sessions.counts.moved == 4


def test_equal_rows_have_a_session_each() -> None:
    drafter = Ledger()
    engine = Engine(ContentSessions(drafter))
    engine.running = [Request([1, 2, 3], 3) for _ in range(3)]
    engine.step([[5], [5], [5]])
    engine.step([[6], [5], [6]])
    engine.step([[6], [6], [7]])
    assert len(drafter.sessions) == engine.sessions.counts.begun == 3


def test_a_resumed_row_finds_its_session() -> None:
    drafter = Ledger()
    engine = Engine(ContentSessions(drafter, SessionLimits(idle_calls=5)))
    engine.running = [Request([1], 1), Request([2], 1)]
    run(engine, 3)
    preempted = engine.running.pop()
    run(engine, 4)
    engine.running.insert(0, preempted)
    run(engine, 2)
    assert engine.sessions.counts.begun == 2


@pytest.mark.parametrize(("num_calls", "seconds"), [(4, 0.1), (1, 60.0)])
def test_what_is_no_longer_seen_ends_and_is_remembered(num_calls: int, seconds: float) -> None:
    drafter, clock = Ledger(), Clock()
    sessions = ContentSessions(drafter, SessionLimits(idle_calls=4, idle_s=10), clock)
    engine = Engine(sessions)
    engine.running = [Request([1, 2], 2), Request([3, 4], 2)]
    run(engine, 3)
    del engine.running[1]  # it ended, or was aborted: an engine does not tell
    for _ in range(num_calls):
        clock.now_s += seconds
        run(engine, 1)
    assert drafter.outputs == [[1, 1, 1]]
    assert len(sessions) == 1
    assert sessions.num_tokens == len(engine.running[0].tokens)


def test_a_row_of_unknown_origin_goes_on_from_the_longest_session() -> None:
    drafter = Ledger()
    sessions = ContentSessions(drafter)
    tokens = np.arange(20, dtype=np.int32)
    for length in (5, 9, 12):
        sessions.draft([Row(0, tokens[:length], None, 4)])
    other = np.array([0, 1, 9], np.int32)
    sessions.draft([Row(0, other, None, 4)])
    assert sorted(drafter.sessions.values(), key=len) == [other.tolist(), tokens[:12].tolist()]
    assert drafter.told == 15


def test_room_is_made_by_ending_what_was_unseen_for_longest() -> None:
    drafter = Ledger()
    limits = SessionLimits(max_sessions=3, max_tokens=40, idle_calls=100)
    sessions = ContentSessions(drafter, limits)
    for first in range(20):
        tokens = np.full(9, first, np.int32)
        assert len(sessions.draft([Row(0, tokens, 1, 4)])[0]) == 1
        assert len(sessions) <= 3
        assert sessions.num_tokens <= 40
    everything = [Row(slot, np.full(9, 50 + slot, np.int32), 1, 4) for slot in range(5)]
    assert [len(tree) for tree in sessions.draft(everything)] == [1, 1, 1, 0, 0]
    assert sessions.counts.turned_away == 2


def test_a_drafter_that_is_away_costs_drafts_and_learns_all_later() -> None:
    drafter, clock = Ledger(), Clock()
    sessions = ContentSessions(drafter, clock=clock)
    row = Row(0, np.array([1, 2, 3], np.int32), 1, 4)
    drafter.is_away = True
    assert len(sessions.draft([row])[0]) == 0
    drafter.is_away = False
    later = Row(0, np.array([1, 2, 3, 4], np.int32), 1, 4)
    clock.now_s = 1.0
    assert len(sessions.draft([later])[0]) == 1
    assert list(drafter.sessions.values()) == [[1, 2, 3, 4]]
    assert list(drafter.prompts.values()) == [2]
    assert sessions.num_failures == 1


def test_a_row_that_is_refused_costs_the_others_nothing() -> None:
    drafter = Ledger(refused=9)
    sessions = ContentSessions(drafter, SessionLimits(vocabulary_size=100))
    rows = [[1, 2, 3], [9, 2, 3], [1, 100, 3], [1, -1, 3]]
    shown = [Row(slot, np.array(row, np.int32), 1, 4) for slot, row in enumerate(rows)]
    assert [len(tree) for tree in sessions.draft(shown)] == [1, 0, 0, 0]
    assert [len(tree) for tree in sessions.draft(shown[:0])] == []


def test_past_the_deadline_rows_take_turns() -> None:
    class Slow(Ledger):
        def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
            clock.now_s += 1.0 * len(requests)
            return super().draft(requests)

    clock, drafter = Clock(), Slow()
    sessions = ContentSessions(drafter, SessionLimits(deadline_s=2.0, idle_s=1e9), clock)
    tokens = [[slot, slot] for slot in range(6)]
    served = [0] * 6
    for _ in range(60):
        for row in tokens:
            row.append(1)
        rows = [Row(slot, np.array(row, np.int32), 1, 4) for slot, row in enumerate(tokens)]
        for slot, tree in enumerate(sessions.draft(rows)):
            served[slot] += len(tree)
    assert sum(served) < 6 * 60 / 2
    assert min(served) > 0.5 * max(served)


def test_what_ended_warms_the_embedded_drafter() -> None:
    drafter = EmbeddedDrafter()
    sessions = ContentSessions(drafter, SessionLimits(idle_calls=1))
    output = np.arange(100, 130, dtype=np.int32)
    prompt = np.array([1, 2, 3], np.int32)
    first = np.concatenate([prompt, output])
    for length in range(4, len(first) + 1):
        sessions.draft([Row(0, first[:length], 1, 16)])
    again = np.concatenate([[9], prompt, output[:4]]).astype(np.int32)
    sessions.draft([Row(0, again, 4, 16)])  # in its stead: the first has ended
    further = np.append(again, output[4]).astype(np.int32)
    chain = sessions.draft([Row(0, further, 1, 16)])[0].best_chain(5)
    assert chain.token_ids.tolist() == output[5:10].tolist()
    assert drafter.num_sessions == 1
    sessions.abandon()
    assert drafter.num_sessions == 0
    drafter.shut_down()
