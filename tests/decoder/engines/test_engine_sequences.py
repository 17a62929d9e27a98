"""Each row of an engine is drafted for as its own sequence, whatever the engine does."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from logging import getLogger

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from decoder.engines.engine_guard import EngineGuard
from decoder.engines.engine_sequences import (
    EngineRow,
    EngineSequences,
    NamedRequest,
    SequenceLimits,
)
from decoder.engines.request_fields import PLAIN, RequestFields
from retriever.drafter import DEFAULT, FORGOTTEN, DraftRequest, SequenceOptions, TokenIds
from retriever.errors import InvalidRequestError
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
        num_opened: sessions that were begun.
    """

    continuation: Continuation = field(default=lambda tokens, _: [fingerprint(tokens)])
    refused: int = -1
    num_opened: int = 0

    def open(self, session: str, prompt: TokenIds, options: SequenceOptions = DEFAULT) -> None:
        if self.refused in prompt.tolist():
            raise InvalidRequestError("an unknown token")
        super().open(session, prompt, options)
        self.num_opened += 1


class SimulatedClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def row(tokens: Sequence[int], num_new: int = 1, request: NamedRequest | None = None) -> EngineRow:
    """A row whose last tokens are new in this step."""
    return EngineRow(np.array(tokens, np.int32), len(tokens) - num_new, 16, request)


@dataclass(eq=False)
class SimulatedRequest:
    """One request of the simulated engine."""

    tokens: list[int]
    num_prompt: int

    def named(self) -> NamedRequest:
        return NamedRequest(id(self), self)


class SimulatedEngine:
    """Runs requests in slots that move, as engines do: the twin that knows who is who.

    Args:
        sequences: that are tested.
        names: whether rows name their requests.
        most_shown: tokens of a row that are shown, where requests are named.
    """

    def __init__(
        self, sequences: EngineSequences, *, names: bool = False, most_shown: int = 512
    ) -> None:
        self.sequences = sequences
        self.table = np.full((8, 512), 7, np.int32)
        self.running: list[SimulatedRequest] = []
        self.waiting: list[SimulatedRequest] = []
        self.names = names
        self.most_shown = most_shown

    def step(self, new: Sequence[Sequence[int]]) -> None:
        """Every running request gets tokens; each must get the draft of its own tokens."""
        for request, tokens in zip(self.running, new, strict=True):
            request.tokens.extend(tokens)
        self.sequences.end_others({id(each) for each in (*self.running, *self.waiting)})
        rows = [self._row(slot, len(tokens)) for slot, tokens in enumerate(new)]
        trees = self.sequences.step(rows)
        for request, tree in zip(self.running, trees, strict=True):
            assert tree.token_ids.tolist() == [fingerprint(request.tokens)]

    def _row(self, slot: int, num_new: int) -> EngineRow:
        request = self.running[slot]
        length = len(request.tokens)
        self.table[slot, :length] = request.tokens
        self.table[slot, length:] = 7  # what others left there
        tokens, num_before = self.table[slot, :length], max(length - num_new, 0)
        if not self.names:
            return EngineRow(tokens, num_before, 4)
        first = max(length - self.most_shown, 0)
        known = np.array(request.tokens, np.int32)
        return EngineRow(tokens[first:], num_before, 4, request.named(), first, lambda: known)


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


def act(engine: SimulatedEngine, action: str, which: int, tokens: list[int]) -> None:
    """Do what an engine may do between two steps."""
    running, waiting = engine.running, engine.waiting
    room = len(engine.table) - len(running)
    if action == "begin" and room:
        running.append(SimulatedRequest(list(tokens), len(tokens)))
    elif action == "twins" and room > 1:
        running.extend(SimulatedRequest(list(tokens), len(tokens)) for _ in range(2))
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
        running.append(SimulatedRequest([*old.tokens, *tokens], len(old.tokens) + len(tokens)))


@settings(max_examples=200, deadline=None)
@given(ACTIONS, st.booleans(), st.sampled_from([4, 512]))
def test_every_row_is_drafted_for_as_itself(
    actions: list[tuple[str, int, list[int]]],
    names: bool,  # noqa: FBT001
    most_shown: int,
) -> None:
    drafter = Ledger()
    sequences = EngineSequences(drafter, SequenceLimits(idle_steps=3), SimulatedClock())
    engine = SimulatedEngine(sequences, names=names, most_shown=most_shown)
    for action, which, tokens in actions:
        act(engine, action, which, tokens)
        steps = [tokens[: 1 + (which + slot) % 3] for slot in range(len(engine.running))]
        engine.step(steps)
    assert len(sequences) == len(drafter.sessions)
    assert sequences.num_tokens == sum(map(len, drafter.sessions.values()))
    sequences.close()
    assert (len(sequences), sequences.num_tokens) == (0, 0)
    assert not drafter.sessions


def run(engine: SimulatedEngine, num_steps: int, num_tokens: int = 1) -> None:
    for _ in range(num_steps):
        engine.step([[index] * num_tokens for index in range(len(engine.running))])


def test_only_new_tokens_are_told_while_slots_move() -> None:
    drafter = Ledger()
    engine = SimulatedEngine(EngineSequences(drafter))
    engine.running = [SimulatedRequest([1, 2, 3, slot], 4) for slot in range(4)]
    run(engine, 3, 2)
    engine.running.reverse()
    run(engine, 3, 2)
    assert drafter.told == sum(len(request.tokens) for request in engine.running)
    assert drafter.num_opened == 4


def test_equal_rows_have_a_session_each() -> None:
    drafter = Ledger()
    engine = SimulatedEngine(EngineSequences(drafter))
    engine.running = [SimulatedRequest([1, 2, 3], 3) for _ in range(3)]
    engine.step([[5], [5], [5]])
    engine.step([[6], [5], [6]])
    engine.step([[6], [6], [7]])
    assert len(drafter.sessions) == drafter.num_opened == 3


def test_a_resumed_row_finds_its_session() -> None:
    drafter = Ledger()
    engine = SimulatedEngine(EngineSequences(drafter, SequenceLimits(idle_steps=5)))
    engine.running = [SimulatedRequest([1], 1), SimulatedRequest([2], 1)]
    run(engine, 3)
    preempted = engine.running.pop()
    run(engine, 4)
    engine.running.insert(0, preempted)
    run(engine, 2)
    assert drafter.num_opened == 2


@pytest.mark.parametrize(("num_calls", "seconds"), [(4, 0.1), (1, 60.0)])
def test_what_is_no_longer_seen_ends_and_is_remembered(num_calls: int, seconds: float) -> None:
    drafter, clock = Ledger(), SimulatedClock()
    sequences = EngineSequences(drafter, SequenceLimits(idle_steps=4, idle_s=10), clock)
    engine = SimulatedEngine(sequences)
    engine.running = [SimulatedRequest([1, 2], 2), SimulatedRequest([3, 4], 2)]
    run(engine, 3)
    del engine.running[1]  # it ended, or was aborted: an engine does not tell
    for _ in range(num_calls):
        clock.now_s += seconds
        run(engine, 1)
    assert drafter.outputs == [[1, 1, 1]]
    assert len(sequences) == 1
    assert sequences.num_tokens == len(engine.running[0].tokens)


def test_room_is_made_by_ending_what_was_unseen_for_longest() -> None:
    drafter = Ledger()
    limits = SequenceLimits(max_sequences=3, max_tokens=40, idle_steps=100)
    sequences = EngineSequences(drafter, limits)
    for first in range(20):
        assert len(sequences.step([row([first] * 9)])[0]) == 1
        assert len(sequences) <= 3
        assert sequences.num_tokens <= 40
    everything = [row([50 + slot] * 9) for slot in range(5)]
    assert [len(tree) for tree in sequences.step(everything)] == [1, 1, 1, 0, 0]


def test_a_drafter_that_is_away_costs_drafts_and_learns_all_later() -> None:
    drafter, clock = Ledger(), SimulatedClock()
    sequences = EngineSequences(drafter, clock=clock)
    drafter.is_away = True
    assert len(sequences.step([row([1, 2, 3])])[0]) == 0
    drafter.is_away = False
    clock.now_s = 1.0
    assert len(sequences.step([row([1, 2, 3, 4])])[0]) == 1
    assert list(drafter.sessions.values()) == [[1, 2, 3, 4]]
    assert list(drafter.prompts.values()) == [2]
    assert sequences.num_failures == 1


def test_a_row_that_is_refused_costs_the_others_nothing() -> None:
    drafter = Ledger(refused=9)
    sequences = EngineSequences(drafter, SequenceLimits(vocabulary_size=100))
    rows = [[1, 2, 3], [9, 2, 3], [1, 100, 3], [1, -1, 3]]
    assert [len(tree) for tree in sequences.step([row(each) for each in rows])] == [1, 0, 0, 0]
    assert sequences.step([]) == []


def test_past_the_deadline_rows_take_turns() -> None:
    class Slow(Ledger):
        def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
            clock.now_s += 1.0 * len(requests)
            return super().draft(requests)

    clock, drafter = SimulatedClock(), Slow()
    sequences = EngineSequences(drafter, SequenceLimits(deadline_s=2.0, idle_s=1e9), clock)
    tokens = [[slot, slot] for slot in range(6)]
    served = [0] * 6
    for _ in range(60):
        for each in tokens:
            each.append(1)
        for slot, tree in enumerate(sequences.step([row(each) for each in tokens])):
            served[slot] += len(tree)
    assert sum(served) < 6 * 60 / 2
    assert min(served) > 0.5 * max(served)


def test_what_ended_warms_the_embedded_drafter() -> None:
    drafter = EmbeddedDrafter()
    sequences = EngineSequences(drafter, SequenceLimits(idle_steps=1))
    prompt, output = [1, 2, 3], list(range(100, 130))
    for length in range(1, len(output) + 1):
        sequences.step([row([*prompt, *output[:length]])])
    again = [9, *prompt, *output[:4]]
    sequences.step([row(again, 4)])  # in its stead: the first has ended
    chain = sequences.step([row([*again, output[4]])])[0].best_chain(5)
    assert chain.token_ids.tolist() == output[5:10]
    assert len(drafter.state.sessions) == 1
    sequences.abandon()
    assert len(drafter.state.sessions) == 0
    drafter.shut_down()


def test_no_session_is_left_open_after_an_error_that_nobody_expected(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    drafter = Ledger()
    sequences = EngineSequences(drafter)
    guard = EngineGuard("the engine", getLogger(__name__), sequences.abandon)
    request = NamedRequest("a")
    assert len(sequences.step([row([1, 2, 3], 1, request)])[0]) == 1

    def err(_: Sequence[DraftRequest]) -> list[DraftTree]:
        raise RuntimeError("a fault of the drafter's")

    later = row([1, 2, 3, 3], 2, request)
    with monkeypatch.context() as patched:
        patched.setattr(drafter, "draft", err)
        for _ in range(2):
            with guard:
                sequences.step([later])
            assert not drafter.sessions
    assert (len(sequences), sequences.num_tokens, guard.num_failures) == (0, 0, 2)
    assert caplog.messages == [
        "the engine goes on without drafts for now: a fault of the drafter's"
    ]
    assert len(sequences.step([later])[0]) == 1
    assert list(drafter.prompts.values()) == [2]


def continued(sequences: EngineSequences, name: str, fields: RequestFields) -> list[int]:
    """Return the draft of a request that has repeated a text once."""
    text = list(range(5, 25))
    shown = row([*text, *text[:8]], 24, NamedRequest(name, fields=fields))
    return tokens_of(sequences.step([shown])[0])


def tokens_of(tree: DraftTree) -> list[int]:
    tokens: list[int] = tree.best_chain(8).token_ids.tolist()
    return tokens


def test_a_name_that_is_given_to_another_request_begins_anew() -> None:
    text, other = list(range(5, 25)), list(range(40, 60))
    drafter = Ledger()
    sequences = EngineSequences(drafter)
    sequences.step([row(text, 16, NamedRequest("a", "one"))])
    sequences.step([row(other, 16, NamedRequest("a", "one"))])  # other tokens
    sequences.step([row([*other, 1], 17, NamedRequest("a", "two"))])  # another request
    assert drafter.num_opened == 3
    assert list(drafter.sessions.values()) == [[*other, 1]]
    assert drafter.outputs == [text[4:], other[4:]]


def test_a_request_is_drafted_for_as_it_states() -> None:
    sequences = EngineSequences(EmbeddedDrafter())
    assert continued(sequences, "a", PLAIN) == list(range(13, 21))
    assert len(sequences) == 1
    assert continued(sequences, "b", RequestFields(drafts=False)) == []
    assert len(sequences) == 1  # the drafter is told nothing of it


def test_what_one_tenant_or_an_unremembered_request_wrote_is_drafted_for_no_other() -> None:
    sequences = EngineSequences(EmbeddedDrafter())
    output = list(range(30, 50))

    def drafted(fields: RequestFields) -> list[int]:
        """Return the draft of a request that begins like an earlier output."""
        trees = sequences.step([row([1, *output[:6]], 6, NamedRequest("a", fields=fields))])
        sequences.end("a")
        return tokens_of(trees[0])

    def write(fields: RequestFields) -> None:
        sequences.step([row([1], 0, NamedRequest("a", fields=fields))])
        sequences.end("a", np.array([1, *output], np.int32))

    write(RequestFields(options=FORGOTTEN))
    assert drafted(RequestFields(options=FORGOTTEN)) == []
    write(RequestFields(options=SequenceOptions(tenant="a")))
    assert drafted(RequestFields(options=SequenceOptions(tenant="b"))) == []
    assert drafted(PLAIN) == []
    assert drafted(RequestFields(options=SequenceOptions(tenant="a"))) == output[6:14]
