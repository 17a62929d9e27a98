"""What a drafter answers ahead is used for what came, and costs no more than drafts if it fails."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Event, Timer, get_ident
from typing import Any, cast

import pytest
from hypothesis import given, strategies as st

from retriever.drafter import DEFAULT, AheadDrafter, DraftRequest, SequenceOptions, TokenIds
from retriever.errors import DrafterUnavailableError, InvalidRequestError, RetrieverError
from retriever.follower import DraftLimits, Follower, Followers
from retriever.sequences import OpenSessions, TokenSequence, check_step
from retriever.tree import DraftTree
from tests.retriever.draft_trees import chain
from tests.retriever.token_ids import ids

_LONG_S = 30.0


@dataclass
class Foreseeing:
    """Drafts a token that follows from all tokens before it, ahead too.

    Attributes:
        failing: what drafting ahead fails with.
        most_answered: outcomes that it answers for.
        released: drafting ahead waits for it.
        told: tokens of each session that is open.
        num_drafted: trees that were waited for.
        num_guessed: outcomes that were asked for ahead.
        timeouts_s: of each time it was asked ahead.
        closed: all tokens of each session that was closed with its rest.
    """

    failing: Exception | None = None
    most_answered: int = 64
    num_answers: int | None = None
    released: Event = field(default_factory=Event)
    told: OpenSessions[str, TokenSequence] = field(default_factory=OpenSessions)
    num_drafted: int = 0
    num_guessed: int = 0
    timeouts_s: list[float] = field(default_factory=list)
    closed: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.released.set()

    def open(self, session: str, prompt: TokenIds, options: SequenceOptions = DEFAULT) -> None:
        self.told.add(session, TokenSequence(prompt, options=options))

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        self.num_drafted += len(requests)
        assert not any(request.outcomes for request in requests)
        return [self._tree(request) for request in requests]

    def draft_ahead(
        self, requests: Sequence[DraftRequest], timeout_s: float = math.inf
    ) -> list[list[DraftTree]]:
        self.timeouts_s.append(timeout_s)
        assert self.released.wait(_LONG_S)
        if self.failing is not None:
            raise self.failing
        answers = []
        for request in requests:
            self._tree(request)
            known = self.told.get(request.session).tokens.tolist()
            self.num_guessed += len(request.outcomes)
            outcomes = request.outcomes[: self.most_answered]
            answers.append([drafted_after(known + each.tolist()) for each in outcomes])
        return answers[: self.num_answers]

    def close(self, session: str, new_tokens: TokenIds | None = None) -> None:
        sequence = self.told.remove(session)
        if new_tokens is not None:
            self.closed.append([*sequence.tokens.tolist(), *new_tokens.tolist()])

    def _tree(self, request: DraftRequest) -> DraftTree:
        sequence = self.told.get(request.session)
        check_step(request, len(sequence), len(request.new_tokens))
        sequence.extend(request.new_tokens)
        return drafted_after(sequence.tokens.tolist())


def drafted_after(tokens: Sequence[int]) -> DraftTree:
    return chain(hash(tuple(tokens)) % 1009)


def followed(drafter: Foreseeing, *tokens: int) -> tuple[Followers, Follower]:
    """Return followers of a drafter whose clock stands still: no pause is ever over."""
    followers = Followers(drafter, clock=lambda: 0.0)
    return followers, followers.follow(TokenSequence(ids(*tokens)))


def guess(*outcomes: TokenIds) -> Callable[[], list[TokenIds]]:
    return lambda: list(outcomes)


def ask(
    followers: Followers, asked: Sequence[tuple[Follower, Sequence[TokenIds]]], busy_s: float = 0.1
) -> None:
    """Ask ahead for trees of four nodes, and see that the answer is there."""
    followers.ask_ahead([(each, 4, guess(*outcomes)) for each, outcomes in asked], busy_s)
    assert followers.wait(_LONG_S)


def is_of(tree: DraftTree, follower: Follower) -> bool:
    expected = drafted_after(follower.sequence.tokens.tolist())
    return bool(tree.token_ids.tolist() == expected.token_ids.tolist())


TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=3)
STEP = st.tuples(st.lists(TOKENS, max_size=6), TOKENS)
"""What may come, and what comes."""


@given(st.lists(st.integers(0, 9), max_size=5), st.lists(st.lists(STEP, max_size=3), max_size=12))
def test_each_draft_is_of_what_came_and_outcomes_are_never_told(
    prompt: list[int], steps: list[list[tuple[list[list[int]], list[int]]]]
) -> None:
    drafter = Foreseeing()
    followers = Followers(drafter)
    all_followers = [followers.follow(TokenSequence(ids(*prompt, at))) for at in range(3)]
    num_guessed = 0
    for step in steps:
        asked = all_followers[: len(step)]
        trees = followers.draft([(each, 4) for each in asked])
        assert all(is_of(tree, each) for tree, each in zip(trees, asked, strict=True))
        ask(
            followers,
            [
                (each, [ids(*outcome) for outcome in guessed])
                for each, (guessed, _) in zip(asked, step, strict=True)
            ],
        )
        for each, (guessed, came) in zip(asked, step, strict=True):
            each.sequence.extend(came)
            num_guessed += came in guessed
        num_before = followers.num_ahead
        for each, (guessed, came) in zip(asked, step, strict=True):
            before = followers.num_ahead
            assert is_of(each.draft(4), each)
            assert followers.num_ahead == before + (came in guessed)
            told = drafter.told.get(each.name or "").tokens.tolist()
            assert each.sequence.tokens.tolist()[: len(told)] == told
        num_guessed -= followers.num_ahead - num_before
    assert num_guessed == 0
    for each in all_followers:
        was_open, tokens = each.is_open, each.sequence.tokens.tolist()
        each.close()
        assert drafter.closed[-1:] == [tokens] or not was_open
    assert len(drafter.told) == 0


def test_no_draft_is_asked_for_where_an_outcome_came() -> None:
    drafter = Foreseeing()
    followers, follower = followed(drafter, 1, 2)
    assert is_of(follower.draft(4), follower)
    for _ in range(5):
        ask(followers, [(follower, [ids(7), ids(8, 9)])])
        follower.sequence.extend([8, 9])
        assert is_of(follower.draft(4), follower)
    assert (drafter.num_drafted, followers.num_asked, followers.num_ahead) == (1, 1, 5)
    assert min(drafter.timeouts_s) > 0.1


def test_a_tree_is_cut_to_the_nodes_that_are_asked_for() -> None:
    drafter = Foreseeing()
    followers, follower = followed(drafter, 1)
    follower.draft(4)
    ask(followers, [(follower, [ids(7)])])
    follower.sequence.extend([7])
    assert len(follower.draft(0)) == 0
    assert len(follower.draft(1)) == 1
    assert drafter.num_drafted == 1


def test_a_late_drafter_costs_a_draft_and_is_not_asked_ahead_for_a_while() -> None:
    drafter = Foreseeing()
    followers, follower = followed(drafter, 1)
    follower.draft(4)
    drafter.released.clear()
    followers.ask_ahead([(follower, 4, guess(ids(7)))], busy_s=0.0)
    follower.sequence.extend([7])
    began_s = time.monotonic()
    assert len(follower.draft(4)) == 0
    assert time.monotonic() - began_s < _LONG_S / 10
    assert follower.num_failures == 1
    drafter.released.set()
    follower.sequence.extend([5])
    while len(tree := follower.draft(4)) == 0:
        pass
    assert is_of(tree, follower)
    assert len(drafter.told) == 1  # the session is the same
    followers.ask_ahead([(follower, 4, guess(ids(6)))], busy_s=0.0)
    assert len(drafter.timeouts_s) == 1
    follower.close()
    assert drafter.closed == [[1, 7, 5]]


def test_an_answer_that_comes_late_serves_the_step_that_it_is_for() -> None:
    drafter = Foreseeing()
    followers, follower = followed(drafter, 1)
    follower.draft(4)
    drafter.released.clear()
    followers.ask_ahead([(follower, 4, guess(ids(7)))], busy_s=0.0)
    follower.sequence.extend([7])
    assert len(follower.draft(4)) == 0
    drafter.released.set()
    while len(tree := follower.draft(4)) == 0:
        pass
    assert is_of(tree, follower)
    assert drafter.num_drafted == 1


def test_closing_waits_for_what_is_under_way() -> None:
    drafter = Foreseeing()
    followers, follower = followed(drafter, 1)
    follower.draft(4)
    follower.sequence.extend([3])
    followers.ask_ahead([(follower, 4, guess(ids(7)))], busy_s=0.0)
    follower.sequence.extend([4])
    follower.close()
    assert drafter.closed == [[1, 3, 4]]
    assert followers.follow(TokenSequence(ids(9))).draft(4)


@pytest.mark.parametrize("failing", [DrafterUnavailableError("away"), None])
def test_one_that_fails_ahead_costs_a_draft_and_its_session(failing: RetrieverError | None) -> None:
    drafter = Foreseeing(failing=failing, num_answers=0)
    followers, follower = followed(drafter, 1)
    follower.draft(4)
    name = follower.name
    ask(followers, [(follower, [ids(7)])])
    follower.sequence.extend([7])
    while len(tree := follower.draft(4)) == 0:  # its back-off lasts as long as the failure deserves
        pass
    assert is_of(tree, follower)
    assert follower.name != name
    assert follower.num_failures >= 1
    assert len(drafter.told) == 1
    ask(followers, [(follower, [ids(7)])])
    assert len(drafter.timeouts_s) == 1


def test_a_refusal_is_raised_by_the_next_draft() -> None:
    drafter = Foreseeing(failing=InvalidRequestError("a bug"))
    followers, follower = followed(drafter, 1)
    follower.draft(4)
    ask(followers, [(follower, [ids(7)])])
    with pytest.raises(InvalidRequestError, match="a bug"):
        follower.draft(4)


def test_one_that_answers_nothing_is_asked_as_ever() -> None:
    drafter = Foreseeing(most_answered=0)
    followers, follower = followed(drafter, 1)
    follower.draft(4)
    for token in (7, 8):
        ask(followers, [(follower, [ids(token)])])
        follower.sequence.extend([token])
        assert is_of(follower.draft(4), follower)
    assert (drafter.num_drafted, len(drafter.timeouts_s)) == (3, 1)
    assert follower.num_failures == 0


def test_a_drafter_without_answers_ahead_is_never_asked_for_them() -> None:
    class Plain:
        def __init__(self) -> None:
            self.inner = Foreseeing()
            self.open, self.draft, self.close = (
                self.inner.open,
                self.inner.draft,
                self.inner.close,
            )

    drafter = Plain()
    assert not isinstance(drafter, AheadDrafter)
    followers = Followers(drafter)
    follower = followers.follow(TokenSequence(ids(1)))
    follower.draft(4)
    ask(followers, [(follower, [ids(7)])])
    follower.sequence.extend([7])
    assert is_of(follower.draft(4), follower)
    assert drafter.inner.timeouts_s == []


def test_a_tree_of_another_vocabulary_is_refused_when_it_was_answered_ahead() -> None:
    drafter = Foreseeing()
    followers = Followers(drafter, DraftLimits(model_vocabulary=1009))
    follower = followers.follow(TokenSequence(ids(1)))
    follower.draft(4)
    followers.limits = DraftLimits(model_vocabulary=1)
    ask(followers, [(follower, [ids(7)])])
    follower.limits = DraftLimits(model_vocabulary=1)
    follower.sequence.extend([7])
    assert len(follower.draft(4)) == 0
    assert follower.num_failures == 1


def test_outcomes_beyond_the_drafters_vocabulary_are_not_asked_for() -> None:
    drafter = Foreseeing()
    followers = Followers(drafter, DraftLimits(drafter_vocabulary=10))
    follower = followers.follow(TokenSequence(ids(1)))
    follower.draft(4)
    ask(followers, [(follower, [ids(10), ids(7, 12), ids(7)])])
    follower.sequence.extend([7])
    assert is_of(follower.draft(4), follower)
    assert (drafter.num_drafted, drafter.num_guessed) == (1, 1)
    ask(followers, [(follower, [ids(10)])])  # no reason to pause
    follower.sequence.extend([7])
    assert is_of(follower.draft(4), follower)
    ask(followers, [(follower, [ids(8)])])
    assert (drafter.num_drafted, drafter.num_guessed) == (2, 2)


def test_outcomes_are_found_in_the_other_thread_while_the_caller_goes_on() -> None:
    drafter, may_go_on = Foreseeing(), Event()
    followers, follower = followed(drafter, 1, 2)
    follower.draft(4)
    in_threads: list[int] = []

    def outcomes() -> list[TokenIds]:
        assert may_go_on.wait(_LONG_S)
        in_threads.append(get_ident())
        return [ids(7)]

    followers.ask_ahead([(follower, 4, outcomes)], busy_s=1.0)
    follower.sequence.extend([7])  # what is committed meanwhile is not told as if it had been there
    assert not followers.wait(0.0)
    may_go_on.set()
    assert followers.wait(_LONG_S)
    assert drafter.told.get(follower.name or "").tokens.tolist() == [1, 2]
    assert is_of(follower.draft(4), follower)
    assert followers.num_ahead == 1
    assert in_threads != [get_ident()]


def test_nothing_is_asked_ahead_while_an_earlier_answer_is_late() -> None:
    drafter = Foreseeing()
    followers, follower = followed(drafter, 1)
    follower.draft(4)
    drafter.released.clear()
    followers.ask_ahead([(follower, 4, guess(ids(7)))], busy_s=0.0)
    began_s = time.monotonic()
    followers.ask_ahead([(follower, 4, guess(ids(8)))], busy_s=0.0)
    assert time.monotonic() - began_s < _LONG_S / 10
    drafter.released.set()
    follower.sequence.extend([8])
    follower.close()
    assert len(drafter.timeouts_s) == 1


def test_a_mistake_in_finding_outcomes_surfaces() -> None:
    followers, follower = followed(Foreseeing(), 1)
    follower.draft(4)
    followers.ask_ahead([(follower, 4, cast("Any", None))], busy_s=0.0)
    assert followers.wait(_LONG_S)
    with pytest.raises(TypeError):
        follower.draft(4)
    assert is_of(follower.draft(4), follower)


def test_fewer_outcomes_are_asked_for_where_a_step_waited_and_more_where_none_did() -> None:
    drafter = Foreseeing()
    followers = Followers(drafter, clock=lambda: 0.0, patience_s=2 * _LONG_S)
    follower = followers.follow(TokenSequence(ids(1)))
    follower.draft(4)
    outcomes = guess(*(ids(token) for token in range(64)))
    num_guessed: list[int] = []
    for is_late in (False, True, True, False, False):
        drafter.num_guessed = 0
        drafter.released.clear()
        followers.ask_ahead([(follower, 4, outcomes)], busy_s=0.0)
        while len(drafter.timeouts_s) == len(num_guessed):
            time.sleep(0.001)
        if is_late:
            Timer(0.05, drafter.released.set).start()
        else:
            drafter.released.set()
            assert followers.wait(_LONG_S)
        follower.sequence.extend([3])
        assert is_of(follower.draft(4), follower)
        num_guessed.append(drafter.num_guessed)
    assert num_guessed == [64, 64, 48, 36, 37]
    assert drafter.num_drafted == 1
