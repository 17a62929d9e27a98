"""A follower tells a drafter each token once, and costs no more than drafts when that fails."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, strategies as st

from retriever.backoff import Backoff
from retriever.drafter import DEFAULT, DraftRequest, SequenceOptions, TokenIds
from retriever.errors import (
    DrafterUnavailableError,
    InvalidRequestError,
    LimitExceededError,
    OutOfSequenceError,
    RetrieverError,
    VocabularyMismatchError,
)
from retriever.follower import DraftLimits, Follower, Followers
from retriever.sequences import OpenSessions, TokenSequence, check_step
from retriever.tree import DraftTree
from tests.retriever.draft_trees import chain


@dataclass
class Strict:
    """Notes all that it is told, and drafts the length of the sequence as a token.

    Attributes:
        opening: what opening fails with.
        drafting: what drafting fails with.
        closing: what closing fails with.
        refused: a token that no prompt may hold.
        told: tokens of each session that is open.
        steps: the sessions of each call.
        closed: tokens of prompt and output of each session that was closed with its rest.
    """

    opening: Exception | None = None
    drafting: Exception | None = None
    closing: Exception | None = None
    refused: int = -1
    num_trees: int | None = None
    told: OpenSessions[str, TokenSequence] = field(default_factory=OpenSessions)
    steps: list[list[str]] = field(default_factory=list)
    closed: list[tuple[list[int], list[int]]] = field(default_factory=list)
    learned: list[tuple[str, object]] = field(default_factory=list)
    given_up: int = 0

    def open(self, session: str, prompt: TokenIds, options: SequenceOptions = DEFAULT) -> None:
        if self.opening is not None:
            raise self.opening
        if self.refused in prompt:
            raise InvalidRequestError("a token that is not known")
        self.told.add(session, TokenSequence(prompt, options=options))

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        self.steps.append([request.session for request in requests])
        if self.drafting is not None:
            raise self.drafting
        trees = []
        for request in requests:
            sequence = self.told.get(request.session)
            check_step(request, len(sequence), len(request.new_tokens))
            sequence.extend(request.new_tokens)
            trees.append(chain(len(sequence)).prefix(request.budget_nodes))
        return trees[: self.num_trees]

    def close(self, session: str, new_tokens: TokenIds | None = None) -> None:
        sequence = self.told.remove(session)
        if new_tokens is None:
            self.given_up += 1
            return
        if self.closing is not None:
            raise self.closing
        sequence.extend(new_tokens)
        self.closed.append((sequence.prompt.tolist(), sequence.output.tolist()))

    def learn(self, session: str, verified: object) -> None:
        self.learned.append((session, verified))


def of(tokens: Sequence[int], *, remember: bool = True) -> TokenSequence:
    return TokenSequence(np.array(tokens, np.int32), options=SequenceOptions(remember=remember))


def tokens_of(tree: DraftTree) -> list[int]:
    found: list[int] = tree.token_ids.tolist()
    return found


def at_once() -> Backoff:
    """Return a back-off without pauses."""
    return Backoff(0.0, 0.0)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


CHANGES = st.lists(
    st.one_of(
        st.lists(st.integers(0, 99), max_size=5),
        st.sampled_from(["draft", "draft", "lose", "fail", "close"]),
    ),
    max_size=40,
)


@given(st.lists(st.integers(0, 99), max_size=9), CHANGES)
def test_each_token_is_told_once_in_order_whatever_fails(
    prompt: list[int], changes: list[object]
) -> None:
    drafter, sequence = Strict(), of(prompt)
    follower = Followers(drafter, backoff=at_once()).follow(sequence)
    for change in changes:
        drafter.drafting = DrafterUnavailableError("away") if change == "fail" else None
        if isinstance(change, list):
            sequence.extend(change)
        elif change == "close":
            follower.close()
        elif change == "lose":
            for name in list(drafter.told):
                drafter.told.remove(name)
        else:
            tree = follower.draft(4)
            assert tokens_of(tree) in ([len(sequence)], [])
            if change == "draft" and follower.is_open:
                assert [each.tokens.tolist() for each in drafter.told.values()] == [
                    sequence.tokens.tolist()
                ]
    follower.close()
    assert len(drafter.told) == 0
    assert all(known == prompt for known, _ in drafter.closed)


def test_a_follower_shares_the_sequence_and_is_told_nothing_of_what_comes() -> None:
    sequence = of([1, 2, 3])
    follower = Followers(Strict()).follow(sequence)
    assert follower.sequence is sequence
    assert tokens_of(follower.draft(4)) == [3]
    sequence.extend([4, 5])
    assert tokens_of(follower.draft(4)) == [5]
    assert tokens_of(follower.draft(0)) == []


def test_a_step_over_many_sequences_is_one_call() -> None:
    drafter = Strict()
    followers = Followers(drafter)
    asked = [(followers.follow(of(range(length))), 4) for length in (3, 1, 2)]
    assert [tokens_of(tree) for tree in followers.draft(asked)] == [[3], [1], [2]]
    assert [len(step) for step in drafter.steps] == [3]


def test_a_session_is_opened_with_the_prompt_and_told_the_output_behind_it() -> None:
    drafter, sequence = Strict(), of([1, 2], remember=False)
    sequence.extend([3])
    follower = Followers(drafter).follow(sequence, "mine")
    follower.draft(1)
    told = drafter.told.get("mine")
    assert (told.prompt.tolist(), told.output.tolist(), told.options.remember) == (
        [1, 2],
        [3],
        False,
    )
    sequence.extend([4])
    follower.close()
    assert drafter.closed == [([1, 2], [3, 4])]
    follower.close()
    assert len(drafter.closed) == 1


@pytest.mark.parametrize(
    "error", [DrafterUnavailableError("away"), LimitExceededError("full"), OutOfSequenceError("no")]
)
@pytest.mark.parametrize("raises_refusals", [True, False])
def test_what_fails_is_given_up_and_told_all_later(
    error: RetrieverError, *, raises_refusals: bool
) -> None:
    drafter, sequence = Strict(), of([1, 2])
    followers = Followers(drafter, raises_refusals=raises_refusals, backoff=at_once())
    follower = followers.follow(sequence)
    follower.draft(4)
    sequence.extend([3])
    drafter.drafting = error
    if raises_refusals and isinstance(error, OutOfSequenceError):
        with pytest.raises(OutOfSequenceError):
            follower.draft(4)
        follower.close()
        assert len(drafter.told) == 0
        return
    assert tokens_of(follower.draft(4)) == []
    assert (follower.is_open, len(drafter.told), drafter.given_up) == (False, 0, 1)
    assert follower.num_failures == followers.num_failures == 1
    drafter.drafting = None
    assert tokens_of(follower.draft(4)) == [3]


def test_too_few_trees_count_as_a_drafter_that_is_away() -> None:
    drafter = Strict(num_trees=1)
    followers = Followers(drafter)
    asked = [(followers.follow(of([1])), 4) for _ in range(2)]
    assert [len(tree) for tree in followers.draft(asked)] == [0, 0]
    assert followers.num_failures == 1
    assert len(drafter.told) == 0


def test_a_failing_drafter_is_left_alone_by_all_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock, drafter = Clock(), Strict()
    followers = Followers(drafter, backoff=Backoff(5.0, 5.0, clock=clock, draw=lambda: 1.0))
    first, second = (followers.follow(of([1, 2])) for _ in range(2))
    drafter.drafting = DrafterUnavailableError("away")
    first.draft(4)
    followers.open([second])
    assert [len(second.draft(4)) for _ in range(3)] == [0, 0, 0]
    assert (len(drafter.steps), second.num_failures, second.is_open) == (1, 3, False)
    clock.now_s = 6.0
    second.draft(4)
    assert len(drafter.steps) == 2
    assert len([each for each in caplog.messages if "away" in each]) == 1


@pytest.mark.parametrize("error", [InvalidRequestError("no"), VocabularyMismatchError("another")])
def test_a_refused_prompt_surfaces_at_first_where_that_is_asked_for(
    error: InvalidRequestError,
) -> None:
    followers = Followers(Strict(opening=error))
    with pytest.raises(type(error)):
        followers.open([followers.follow(of([1]))])


def test_a_drafter_that_is_back_for_another_vocabulary_is_away() -> None:
    drafter = Strict()
    follower = Followers(drafter, backoff=at_once()).follow(of([1]))
    follower.draft(4)
    drafter.told.remove(follower.name or "")
    drafter.opening = VocabularyMismatchError("another")
    assert [len(follower.draft(4)) for _ in range(2)] == [0, 0]
    assert follower.num_failures == 2


def test_a_sequence_that_is_refused_costs_others_nothing_where_engines_go_on() -> None:
    drafter = Strict(refused=9)
    followers = Followers(drafter, raises_refusals=False)
    asked = [(followers.follow(of(tokens)), 4) for tokens in ([1, 2], [9], [1])]
    for _ in range(2):
        assert [tokens_of(tree) for tree in followers.draft(asked)] == [[2], [], [1]]
    assert asked[1][0].is_refused
    assert followers.num_failures == 1


def test_a_tenants_sequence_is_told_to_no_drafter_that_keeps_tenants_together() -> None:
    drafter = Strict()
    followers = Followers(drafter, raises_refusals=False)
    owned = followers.follow(
        TokenSequence(np.array([1, 2], np.int32), options=SequenceOptions(tenant="a"))
    )
    other = followers.follow(TokenSequence(np.array([3, 4], np.int32)))
    trees = followers.draft([(owned, 4), (other, 4)])
    assert [len(tree) for tree in trees] == [0, 1]
    assert owned.is_refused
    assert [each.tokens.tolist() for each in drafter.told.values()] == [[3, 4]]
    with pytest.raises(InvalidRequestError, match="does not keep tenants apart"):
        Followers(drafter).follow(owned.sequence).open()


def test_what_is_refused_does_not_keep_others_from_opening() -> None:
    followers = Followers(Strict(refused=9), raises_refusals=False)
    many = [followers.follow(of(tokens)) for tokens in ([9], [1], [2])]
    followers.open(many)
    assert [each.is_open for each in many] == [False, True, True]


@pytest.mark.parametrize("is_open", [True, False])
def test_an_unknown_token_ends_the_drafters_part(*, is_open: bool) -> None:
    drafter, sequence = Strict(), of([1, 2])
    follower = Followers(drafter, DraftLimits(100, 50)).follow(sequence)
    if is_open:
        assert tokens_of(follower.draft(4)) == [2]
    sequence.extend([3, 50, 4])
    assert tokens_of(follower.draft(4)) == []
    sequence.extend([5])
    assert tokens_of(follower.draft(4)) == []
    follower.close()
    assert drafter.closed == ([([1, 2], [3])] if is_open else [])
    assert (follower.num_failures, follower.has_ended) == (1, True)


def test_an_unknown_token_of_the_last_pass_is_not_told_when_the_sequence_ends() -> None:
    drafter, sequence = Strict(), of([1, 2])
    follower = Followers(drafter, DraftLimits(100, 50)).follow(sequence)
    follower.draft(4)
    sequence.extend([3, 60])
    follower.close()
    assert drafter.closed == [([1, 2], [3])]
    assert follower.num_failures == 1


def test_a_tree_beyond_the_models_vocabulary_costs_its_own_sequence_alone() -> None:
    drafter = Strict()
    followers = Followers(drafter, DraftLimits(model_vocabulary=3))
    asked = [(followers.follow(of(range(length))), 4) for length in (2, 3)]
    assert [tokens_of(tree) for tree in followers.draft(asked)] == [[2], []]
    assert [follower.is_open for follower, _ in asked] == [True, False]
    assert [follower.num_failures for follower, _ in asked] == [0, 1]


def test_a_refused_close_surfaces_and_leaves_nothing_open() -> None:
    drafter = Strict(closing=InvalidRequestError("cannot close"))
    follower = Followers(drafter).follow(of([1]))
    follower.draft(4)
    with pytest.raises(InvalidRequestError, match="cannot close"):
        follower.close()
    assert not follower.is_open
    follower.close()


def test_errors_that_are_not_the_drafters_own_pass_and_sessions_can_be_abandoned() -> None:
    drafter = Strict()
    followers = Followers(drafter, raises_refusals=False)
    follower = followers.follow(of([1]))
    follower.draft(4)
    drafter.drafting = RuntimeError("a fault")
    with pytest.raises(RuntimeError):
        follower.draft(4)
    assert follower.is_open
    followers.abandon([follower])
    assert len(drafter.told) == 0
    assert not follower.is_open


def test_after_its_time_no_session_but_the_first_is_opened() -> None:
    clock = Clock()

    class Slow(Strict):
        def open(self, session: str, prompt: TokenIds, options: SequenceOptions = DEFAULT) -> None:
            clock.now_s += 1.0
            super().open(session, prompt, options)

    followers = Followers(Slow(), clock=clock)
    many: list[Follower] = [followers.follow(of([1])) for _ in range(5)]
    followers.open(many, until_s=1.5)
    assert [each.is_open for each in many] == [True, True, False, False, False]
    followers.open(many, until_s=-1.0)
    assert [each.is_open for each in many] == [True, True, True, False, False]


def test_only_an_open_session_learns() -> None:
    drafter = Strict()
    follower = Followers(drafter).follow(of([1]))
    follower.learn("nothing")
    follower.draft(4)
    follower.learn("a pass")
    assert drafter.learned == [(follower.name, "a pass")]


def test_the_parts_serve_those_who_have_another_rule_for_failures() -> None:
    drafter, sequence = Strict(), of([1, 2])
    follower = Followers(drafter).follow(sequence, "mine")
    follower.open()
    sequence.extend([3, 4])
    [_] = drafter.draft([follower.request(4, length=3)])
    follower.told(3)
    assert follower.unsent().tolist() == [4]
    drafter.drafting = DrafterUnavailableError("away")
    with pytest.raises(DrafterUnavailableError):
        drafter.draft([follower.request(4)])
    assert follower.forget() == "mine"
    assert not follower.is_open
