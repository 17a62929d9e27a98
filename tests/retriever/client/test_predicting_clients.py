"""Predictions over the wire: every client tells its services, and tells them again."""

from collections.abc import Callable, Sequence
from typing import Any

import grpc
import numpy as np
import pytest

from retriever.client.conversation import Conversation, SequenceStep
from retriever.client.strict import RemoteDrafter
from retriever.drafter import DraftRequest, Prediction, SequenceOptions
from retriever.errors import InvalidRequestError, LimitExceededError, UnknownSessionError
from retriever.follower import Followers
from retriever.limits import Limits
from retriever.sequences import SessionKey, TokenSequence
from retriever.service.jobs import tokens_of_addition, tokens_of_opening
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.sessions.explaining import explain
from retriever.tree import DraftTree
from retriever.v1 import retriever_pb2 as pb
from retriever.v1.retriever_pb2_grpc import RetrieverServiceStub
from retriever.wire.messages import addition_message, opening_message
from retriever.wire.statuses import error_of, session_status
from tests.retriever.client.kinds_of_clients import CLIENTS, LONG_S, clients, ready
from tests.retriever.client.replica_servers import Replica
from tests.retriever.open_sessions import WatchedDrafter
from tests.retriever.security.in_process import serving
from tests.retriever.token_ids import ids

PROMPT = [7, 8, 9]
FILE = list(range(1000, 1400))
LATER = list(range(3000, 3100))


def draft(drafter: Any, new: Sequence[int], length: int) -> DraftTree:
    (tree,) = drafter.draft([DraftRequest("s", ids(*new), length, 16)])
    assert isinstance(tree, DraftTree)
    return tree


def begins(tree: DraftTree, tokens: Sequence[int]) -> bool:
    return len(tree.follow(ids(*tokens))) >= 4


@clients
def test_what_cannot_be_a_prediction_is_refused_at_once(connect: Callable[[str], Any]) -> None:
    service = EmbeddedDrafter()
    huge = [Prediction(np.zeros(10_000_000, np.int32), "huge")]
    with serving(service) as address, ready(connect(address)) as drafter:
        with pytest.raises(LimitExceededError, match="max_sequence_tokens"):
            drafter.open("s", ids(*PROMPT), SequenceOptions(predictions=tuple(huge)))
        with pytest.raises(InvalidRequestError, match="prediction 'plan' has no tokens"):
            drafter.open(
                "s", ids(*PROMPT), SequenceOptions(predictions=(Prediction(ids(), "plan"),))
            )
        drafter.open("s", ids(*PROMPT))
        with pytest.raises(LimitExceededError, match="max_sequence_tokens"):
            drafter.add_predictions("s", huge)
        assert len(draft(drafter, [7, 8], 5)) > 0  # as before
        drafter.close("s", ids(1))
        with pytest.raises(UnknownSessionError):
            drafter.add_predictions("s", [Prediction(ids(1))])
    service.shut_down()


@clients
def test_long_predictions_travel_as_short_ones_do(connect: Callable[[str], Any]) -> None:
    """Cut out of their message before it is parsed: at the opening, and added."""
    rng = np.random.default_rng(1)
    texts = [rng.integers(0, 49_000, 30_000).astype(np.int32) for _ in range(2)]
    service = EmbeddedDrafter()
    with serving(service) as address, ready(connect(address)) as drafter:
        drafter.open("s", ids(*PROMPT), SequenceOptions(predictions=(Prediction(texts[0]),)))
        assert begins(draft(drafter, [], 3), texts[0].tolist())
        drafter.add_predictions("s", [Prediction(texts[1])])
        new = texts[1][20_000:20_012].tolist()
        assert begins(draft(drafter, new, 15), texts[1][20_012:].tolist())
    service.shut_down()


@pytest.mark.parametrize("connect", [CLIENTS["resilient"], CLIENTS["async"]])
def test_a_service_that_was_started_again_is_told_all_predictions(
    connect: Callable[[str], Any],
) -> None:
    replica = Replica()
    with ready(connect(replica.address)) as drafter:
        drafter.open("s", ids(*PROMPT), SequenceOptions(predictions=(Prediction(ids(*FILE)),)))
        assert begins(draft(drafter, [], 3), FILE)
        drafter.add_predictions("s", [Prediction(ids(*LATER))])
        assert begins(draft(drafter, FILE[:9], 12), FILE[9:])
        replica.end()
        before, replica.drafter = replica.drafter, WatchedDrafter()
        replica.begin()
        length, tree = 12, DraftTree.empty()
        for token in FILE[9:60]:
            length += 1
            assert drafter.wait(LONG_S)
            if len(tree := draft(drafter, [token], length)):
                break
        done = length - len(PROMPT)
        assert begins(tree, FILE[done:])
        assert begins(draft(drafter, LATER[:10], length + 10), LATER[10:])
        before.shut_down()
    replica.shut_down()


def step_of(sequence: TokenSequence) -> SequenceStep:
    return SequenceStep(DraftRequest("s", ids(), len(sequence), 4), sequence)


def told(message: pb.DraftStreamRequest) -> tuple[list[list[int]], list[list[int]]]:
    """The predictions of a message's openings, and those that it adds."""
    openings = [
        np.frombuffer(each.token_bytes, np.int32).tolist()
        for opening in message.openings
        for each in opening.predictions
    ]
    added = [
        np.frombuffer(each.token_bytes, np.int32).tolist()
        for more in message.predictions
        for each in more.predictions
    ]
    return openings, added


def test_a_message_carries_what_its_server_has_not_been_told() -> None:
    conversation = Conversation("a", "")
    sequence = TokenSequence(ids(1), options=SequenceOptions(predictions=(Prediction(ids(2)),)))
    for _ in range(2):  # again on a stream after the first
        conversation.begin()
        known = [each.tokens.tolist() for each in sequence.predictions]
        assert told(conversation.ask([step_of(sequence)], 0.0, 1.0)[0]) == (known, [])
        conversation.settle(pb.DraftStreamResponse(sequence_number=1, trees=[pb.DraftTree()]))
        sequence.expect([Prediction(ids(len(known) + 5)), Prediction(ids(2))])
        message, _ = conversation.ask([step_of(sequence)], 0.0, 1.0)
        assert told(message) == ([], [[len(known) + 5]])
        conversation.settle(pb.DraftStreamResponse(sequence_number=2, trees=[pb.DraftTree()]))
        assert told(conversation.ask([step_of(sequence)], 0.0, 1.0)[0]) == ([], [])


def test_a_server_that_refuses_predictions_is_told_of_the_sequence_without() -> None:
    """Its limits may be lower than the client's: that costs the predictions, not all drafts."""
    now_s = 0.0
    conversation = Conversation("a", "", clock=lambda: now_s)
    conversation.begin()
    sequence = TokenSequence(ids(1), options=SequenceOptions(predictions=(Prediction(ids(2)),)))
    message, _ = conversation.ask([step_of(sequence)], 0.0, 1.0)
    refusal = LimitExceededError("too long", limit="max_sequence_tokens")
    status = session_status(message.openings[0].session_id, refusal)
    conversation.settle(
        pb.DraftStreamResponse(sequence_number=1, trees=[pb.DraftTree()], statuses=[status])
    )
    now_s += 60.0  # the pause is over
    message, _ = conversation.ask([step_of(sequence)], 0.0, 1.0)
    assert len(message.openings) == 1
    assert told(message) == ([], [])


def test_predictions_beyond_a_drafters_limits_cost_themselves_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    drafter = EmbeddedDrafter(limits=Limits(max_sequence_tokens=100))
    sequence = TokenSequence(
        ids(*[1, 2, 3] * 5), options=SequenceOptions(predictions=(Prediction(ids(*range(500))),))
    )
    follower = Followers(drafter).follow(sequence)
    assert len(follower.draft(8)) == 8
    assert follower.num_failures == 0
    assert caplog.text.count("drafting continues without") == 1
    for tokens, num_refused in ((ids(*range(40, 90)), 1), (ids(*range(600)), 2)):
        sequence.expect([Prediction(tokens)])
        sequence.extend([40, 41])
        assert len(follower.draft(8)) == 8
        assert caplog.text.count("drafting continues without") == num_refused


def test_a_follower_tells_of_predictions_that_come_later() -> None:
    sequence = TokenSequence(ids(*PROMPT))
    follower = Followers(EmbeddedDrafter()).follow(sequence)
    assert len(follower.draft(8)) == 0
    sequence.expect([Prediction(ids(*FILE))])
    assert begins(follower.draft(8), FILE)
    sequence.extend(FILE[:5])
    assert begins(follower.draft(8), FILE[5:])


def test_bare_contexts_are_drafted_for_and_explained_with_predictions() -> None:
    service = EmbeddedDrafter()
    expected = [Prediction(ids(*FILE), "the file")]
    with serving(service) as address, RemoteDrafter(address, timeout_s=LONG_S) as drafter:
        assert begins(drafter.draft_context(PROMPT, 8, predictions=expected), FILE)
        explained = drafter.explain(PROMPT, 8, predictions=expected)
        assert explained == explain(service, PROMPT, 8, predictions=expected) or begins(
            explained.tree, FILE
        )
        assert [node.predictions[0].label for node in explained.nodes] == ["the file"] * 8
        assert [node.predictions[0].position for node in explained.nodes] == list(range(8))
    service.shut_down()


def test_nobody_adds_predictions_to_sessions_of_others() -> None:
    drafter = EmbeddedDrafter()
    drafter.state.begin(
        SessionKey("a", "s"), drafter.state.prepare(PROMPT, SequenceOptions(tenant="a"))
    )
    with pytest.raises(UnknownSessionError):
        drafter.state.add_predictions(SessionKey("b", "s"), [Prediction(ids(1))])


def test_a_message_has_few_predictions() -> None:
    """However often each is repeated: what a message costs is bounded before it is looked at."""
    service = EmbeddedDrafter()
    with serving(service) as address, grpc.insecure_channel(address) as channel:
        stub = RetrieverServiceStub(channel)
        many = SequenceOptions(predictions=(Prediction(ids(2)),) * 1000)
        opening = opening_message("s", ids(1), many, "")
        stub.OpenSession(opening)
        addition = addition_message("s", [Prediction(ids(2))] * 1025)
        with pytest.raises(grpc.RpcError, match="1025 predictions in one message") as refused:
            stub.AddPredictions(addition)
        assert isinstance(error_of(refused.value), LimitExceededError)
    service.shut_down()


def test_tokens_of_predictions_count_as_work() -> None:
    options = SequenceOptions(predictions=(Prediction(ids(*range(9))),))
    opening = opening_message("s", ids(1, 2), options, "")
    assert tokens_of_opening(opening) == 11
    assert tokens_of_addition(addition_message("s", [Prediction(ids(*range(9)))])) == 9
