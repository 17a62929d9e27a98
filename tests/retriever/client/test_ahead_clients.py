"""Drafts ahead over the wire: those of the embedded drafter, and bounded."""

import math
from collections.abc import Sequence

import pytest

from retriever.client.conversation import Conversation, FailOpen, SequenceStep
from retriever.client.resilient import ResilientDrafter
from retriever.client.strict import RemoteDrafter
from retriever.drafter import DraftRequest
from retriever.errors import InvalidTreeError, LimitExceededError
from retriever.follower import Followers
from retriever.limits import MAX_OUTCOMES, Limits
from retriever.sequences import TokenSequence
from retriever.service.allowances import work_of_draft, work_of_steps
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.tree import DraftTree
from retriever.v1 import retriever_pb2 as pb
from retriever.wire.messages import outcome_trees_from, padded_budgets, requests_of
from tests.retriever.client.kinds_of_clients import LONG_S
from tests.retriever.security.in_process import serving
from tests.retriever.token_ids import ids

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8] * 3


def tokens_of(trees: Sequence[DraftTree]) -> list[list[int]]:
    return [tree.token_ids.tolist() for tree in trees]


def test_followers_use_the_answers_of_a_service() -> None:
    service = EmbeddedDrafter()
    with serving(service) as address, RemoteDrafter(address, timeout_s=LONG_S) as drafter:
        followers = Followers(drafter, patience_s=2 * LONG_S)
        follower = followers.follow(TokenSequence(ids(*PROMPT)))
        for number in range(12):
            tree = follower.draft(8)
            token = number % 8 + 1
            assert tree.token_ids.tolist()[0] == token
            outcomes = [ids(30), ids(token), ids(token, 31)]
            followers.ask_ahead([(follower, 8, outcomes.copy)], LONG_S)
            follower.sequence.extend([token])
        assert (followers.num_asked, followers.num_ahead) == (1, 11)
        follower.close()
    service.shut_down()


def test_a_strict_client_raises_what_a_service_refuses_and_keeps_the_session() -> None:
    service = EmbeddedDrafter(limits=Limits(max_budget_nodes=16))
    with serving(service) as address, RemoteDrafter(address, timeout_s=LONG_S) as drafter:
        drafter.open("s", ids(1, 2, 1))
        for outcomes, limit in [
            ((ids(1),) * (MAX_OUTCOMES + 1), "max_outcomes"),
            ((ids(*[1] * 18),), "max_budget_nodes"),
        ]:
            with pytest.raises(LimitExceededError) as refused:
                drafter.draft_ahead([DraftRequest("s", ids(2), 4, 4, outcomes=outcomes)])
            assert refused.value.limit == limit
        assert len(drafter.draft([DraftRequest("s", ids(2), 4, 4)])[0]) == 4
    service.shut_down()


def test_outcomes_after_the_timeout_are_not_made_and_tokens_are_noted() -> None:
    service = EmbeddedDrafter()
    with serving(service) as address, RemoteDrafter(address, timeout_s=LONG_S) as drafter:
        drafter.open("s", ids(*PROMPT))
        outcomes = tuple(ids(token) for token in range(MAX_OUTCOMES))
        request = DraftRequest("s", ids(1), len(PROMPT) + 1, 8, outcomes=outcomes)
        (found,) = drafter.draft_ahead([request], timeout_s=1e-6)
        assert len(found) < MAX_OUTCOMES
        (tree,) = drafter.draft([DraftRequest("s", ids(2), len(PROMPT) + 2, 4)])
        assert tree.token_ids.tolist() == [3, 4, 5, 6]
    service.shut_down()


def test_what_a_resilient_client_asked_ahead_and_missed_is_not_counted() -> None:
    with ResilientDrafter("127.0.0.1:9", deadline_s=0.01, local=False) as drafter:
        drafter.open("s", ids(*PROMPT))
        request = DraftRequest("s", ids(), len(PROMPT), 4, outcomes=(ids(1),))
        assert drafter.draft_ahead([request], 0.01) == [[]]
        assert not drafter.fail_opens
        drafter.draft([DraftRequest("s", ids(1), len(PROMPT) + 1, 4)])
        assert drafter.fail_opens == {FailOpen.DOWN: 1}


def test_answers_that_do_not_fit_the_request_are_no_trees() -> None:
    request = DraftRequest("s", ids(), 3, 4, outcomes=(ids(1),))
    tree = pb.DraftTree(
        token_ids=[1], parents=[-1], probabilities=[0.5], sources=[pb.SOURCE_CONTEXT]
    )
    wrong = pb.DraftTree(
        token_ids=[1], parents=[3], probabilities=[0.5], sources=[pb.SOURCE_CONTEXT]
    )
    for answers in ([], [[tree, tree]], [[tree], [tree]], [[wrong]]):
        response = pb.DraftStreamResponse(
            trees=[tree], outcome_trees=[pb.OutcomeTrees(trees=each) for each in answers]
        )
        with pytest.raises(InvalidTreeError):
            outcome_trees_from(response, [request])
    response = pb.DraftStreamResponse(outcome_trees=[pb.OutcomeTrees(trees=[tree])])
    assert tokens_of(outcome_trees_from(response, [request])[0]) == [[1]]


def test_a_conversation_gives_trees_to_the_session_that_asked() -> None:
    conversation = Conversation("a", "")
    conversation.begin()
    steps = [
        SequenceStep(DraftRequest(name, ids(), 2, 4, outcomes=outcomes), TokenSequence(ids(1, 2)))
        for name, outcomes in [("one", ()), ("two", (ids(5),)), ("three", (ids(6), ids(7)))]
    ]
    message, _ = conversation.ask(steps, 0.0, 1.0)
    assert [len(step.outcomes) for step in message.steps] == [0, 1, 2]
    trees = [
        pb.DraftTree(
            token_ids=[token], parents=[-1], probabilities=[0.5], sources=[pb.SOURCE_CONTEXT]
        )
        for token in range(3)
    ]
    answers = [pb.OutcomeTrees(trees=trees[:1]), pb.OutcomeTrees(trees=trees[1:])]
    reply = conversation.settle(
        pb.DraftStreamResponse(sequence_number=1, trees=trees, outcome_trees=answers)
    )
    found = {name: tokens_of(each) for name, each in reply.ahead.items()}
    assert found == {"two": [[0]], "three": [[1], [2]]}


def test_each_outcome_counts_as_a_draft() -> None:
    plain = DraftRequest("s", ids(1, 2), 3, 8)
    ahead = DraftRequest("s", ids(1, 2), 3, 8, outcomes=(ids(1), ids(1, 2)))
    more = work_of_steps([ahead]) - work_of_steps([plain])
    assert math.isclose(more, work_of_draft(8, 1) + work_of_draft(8, 2))
    message = pb.DraftStreamRequest()
    message.steps.add(budget_nodes=8, outcomes=[pb.Outcome(token_ids=[1])] * 3)
    assert padded_budgets(message, 32) == [8] * 4
    assert [each.tolist() for each in requests_of(message.steps, 32)[0].outcomes] == [[1]] * 3
