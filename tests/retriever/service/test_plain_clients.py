"""Clients that have the contract alone: a step is a call, an end may be repeated."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf import json_format

from retriever.drafter import DraftRequest
from retriever.sessions.drafter_state import DrafterState
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.sessions.session_table import Session
from retriever.v1 import retriever_pb2 as pb
from retriever.v1.retriever_pb2_grpc import RetrieverServiceStub
from retriever.wire.messages import trees_from_messages
from retriever.wire.statuses import error_of, refusal_of
from tests.retriever.security.in_process import serving
from tests.test_wire_contract import examples

ROOT = Path(__file__).parents[3]
CLIENT = ROOT / "examples" / "grpc" / "draft_client.py"
PROMPT = [1, 2, 3, 4, 5] * 6


@pytest.fixture
def stub() -> Iterator[RetrieverServiceStub]:
    drafter = EmbeddedDrafter()
    with serving(drafter) as address, grpc.insecure_channel(address) as channel:
        yield RetrieverServiceStub(channel)
    drafter.shut_down()


def opened(stub: RetrieverServiceStub, name: str = "s") -> None:
    stub.OpenSession(pb.OpenSessionRequest(session_id=name, prompt=PROMPT))


def step(name: str, tokens: list[int], length: int, **more: object) -> pb.StepRequest:
    return pb.StepRequest(
        step=pb.SessionStep(session_id=name, new_token_ids=tokens, length=length, **more)  # type: ignore[arg-type]  # fields of the message
    )


def test_a_client_from_the_contract_alone_drafts_as_in_process(tmp_path: Path) -> None:
    made = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'proto'}"]
    made += [f"--python_out={tmp_path}", f"--grpc_python_out={tmp_path}"]
    subprocess.run([*made, "retriever/v1/retriever.proto"], check=True, cwd=tmp_path)
    steps = [PROMPT, [1], [2, 3], [9], [1, 2]]
    lines = "\n".join(" ".join(map(str, tokens)) for tokens in steps)
    drafter = EmbeddedDrafter()
    with serving(drafter) as address:
        ran = subprocess.run(
            [sys.executable, str(CLIENT), address],
            input=lines + "\n",
            env=os.environ | {"PYTHONPATH": str(tmp_path)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
    *drafts, keeping = map(json.loads, ran.stdout.splitlines())
    assert keeping == "SAVE_STATUS_MEMORY"
    alone, length = EmbeddedDrafter(), len(PROMPT)
    alone.open("a", np.array(PROMPT, np.int32))
    for tokens, draft in zip(steps[1:], drafts, strict=True):
        length += len(tokens)
        request = DraftRequest("a", np.array(tokens, np.int32), length, 8)
        (tree,) = alone.draft([request])
        assert draft == [tree.token_ids.tolist(), tree.parents.tolist()]
    assert any(tokens for tokens, _ in drafts)
    alone.shut_down()
    drafter.shut_down()


def test_a_step_that_is_a_call_drafts_as_one_of_a_stream(stub: RetrieverServiceStub) -> None:
    opened(stub, "called")
    outcomes = [pb.Outcome(token_ids=[2]), pb.Outcome(token_ids=[3])]
    called = stub.Step(step("called", [1], 31, outcomes=outcomes))
    streamed = next(
        stub.DraftStream(
            iter(
                [
                    pb.DraftStreamRequest(
                        sequence_number=1,
                        openings=[pb.OpenSessionRequest(session_id="streamed", prompt=PROMPT)],
                        steps=[step("streamed", [1], 31, outcomes=outcomes).step],
                    )
                ]
            )
        )
    )
    assert called.tree == streamed.trees[0]
    assert called.tree.token_ids
    assert list(called.outcome_trees) == list(streamed.outcome_trees[0].trees)
    assert len(called.outcome_trees) == 2


def refused(call: object, request: object) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as raised:
        call(request)  # type: ignore[operator]  # a stub's
    error = raised.value
    assert str(error_of(error))
    return error.code(), refusal_of(error.trailing_metadata()).reason


def test_what_a_step_is_refused_for_is_the_status_of_the_call(stub: RetrieverServiceStub) -> None:
    assert refused(stub.Step, pb.StepRequest())[0] is grpc.StatusCode.INVALID_ARGUMENT
    unknown = refused(stub.Step, step("nobody", [1], 1))
    assert unknown == (grpc.StatusCode.NOT_FOUND, "UNKNOWN_SESSION")
    opened(stub)
    lost = refused(stub.Step, step("s", [1], 99))
    assert lost == (grpc.StatusCode.ABORTED, "OUT_OF_SEQUENCE")
    beyond = refused(stub.Step, step("s", [1], 31, budget_nodes=1 << 20))
    assert beyond == (grpc.StatusCode.RESOURCE_EXHAUSTED, "LIMIT_EXCEEDED")
    stub.Step(step("s", [1], 31))
    repeated = refused(stub.Step, step("s", [1], 31))  # it was made, and its length is known
    assert repeated == (grpc.StatusCode.ABORTED, "OUT_OF_SEQUENCE")
    stub.Step(step("s", [2], 32))
    stub.CloseSession(pb.CloseSessionRequest(session_id="s"))
    assert refused(stub.Step, step("s", [1], 33))[1] == "UNKNOWN_SESSION"


def test_a_lost_last_step_is_noticed_and_an_end_may_be_repeated(
    stub: RetrieverServiceStub,
) -> None:
    opened(stub)
    stub.Step(step("s", [1], 31))
    lost = pb.CloseSessionRequest(session_id="s", new_token_ids=[3], length=33)
    assert refused(stub.CloseSession, lost) == (grpc.StatusCode.ABORTED, "OUT_OF_SEQUENCE")
    stub.Step(step("s", [2], 32))  # it is open still
    closing = pb.CloseSessionRequest(session_id="s", new_token_ids=[3], length=33)
    first = stub.CloseSession(closing)
    assert first.save_status == pb.SAVE_STATUS_MEMORY
    assert stub.CloseSession(closing) == first
    other = pb.CloseSessionRequest(session_id="s", new_token_ids=[3], length=34)
    assert refused(stub.CloseSession, other)[1] == "UNKNOWN_SESSION"
    unstated = pb.CloseSessionRequest(session_id="s", new_token_ids=[3])
    assert refused(stub.CloseSession, unstated)[1] == "UNKNOWN_SESSION"
    stub.DeleteSessionData(pb.DeleteSessionDataRequest(session_id="s"))
    assert refused(stub.CloseSession, closing)[1] == "UNKNOWN_SESSION"  # nothing is left of it
    opened(stub)  # a new one of the name
    assert refused(stub.CloseSession, closing)[1] == "OUT_OF_SEQUENCE"
    ended = pb.CloseSessionRequest(session_id="s", length=30)
    assert stub.CloseSession(ended).save_status == pb.SAVE_STATUS_NOTHING


def test_fingerprints_are_of_either_case(stub: RetrieverServiceStub) -> None:
    lower, upper = "ab" * 32, "AB" * 32
    for number, fingerprint in enumerate((lower, upper, "aB" * 32)):
        opening = pb.OpenSessionRequest(
            session_id=str(number), prompt=PROMPT, vocabulary_fingerprint=fingerprint
        )
        stub.OpenSession(opening)
    strange = pb.DraftRequest(context=PROMPT, vocabulary_fingerprint="CD" * 32)
    assert refused(stub.Draft, strange)[1] == "VOCABULARY_MISMATCH"


IDS = np.array(PROMPT, np.int32).tobytes()
ONE = np.array([1], np.int32).tobytes()


def test_ids_and_trees_as_bytes_bring_the_same_drafts(stub: RetrieverServiceStub) -> None:
    lists = stub.Draft(pb.DraftRequest(context=PROMPT)).tree
    form = pb.TreeForm(packed=True, ancestors=True)
    packed = stub.Draft(pb.DraftRequest(context_bytes=IDS, tree_form=form)).tree
    assert trees_from_messages([packed], 1)[0].token_ids.tolist() == list(lists.token_ids)
    assert len(packed.packed) == 13 * len(lists.token_ids)
    assert len(packed.ancestors) == len(lists.token_ids) * -(-len(lists.token_ids) // 8)
    assert stub.Explain(pb.ExplainRequest(context_bytes=IDS)).tree == lists
    opened(stub, "numbers")
    stub.OpenSession(pb.OpenSessionRequest(session_id="bytes", prompt_bytes=IDS))
    in_bytes = pb.SessionStep(
        session_id="bytes",
        new_token_bytes=ONE,
        length=31,
        outcomes=[pb.Outcome(token_bytes=ONE)],
    )
    one = stub.Step(step("numbers", [1], 31, outcomes=[pb.Outcome(token_ids=[1])]))
    other = stub.Step(pb.StepRequest(step=in_bytes))
    assert (one.tree, list(one.outcome_trees)) == (other.tree, list(other.outcome_trees))
    predicted = [pb.Prediction(token_bytes=IDS)]
    stub.AddPredictions(pb.AddPredictionsRequest(session_id="bytes", predictions=predicted))
    closing = pb.CloseSessionRequest(session_id="bytes", new_token_bytes=ONE, length=32)
    assert stub.CloseSession(closing).save_status == pb.SAVE_STATUS_MEMORY


@pytest.mark.parametrize("form", ["numbers", "bytes"])
def test_megabytes_of_ids_are_refused_in_either_form(stub: RetrieverServiceStub, form: str) -> None:
    tokens = np.ones((15 << 20) // (1 if form == "numbers" else 4), np.int32)
    opening = (
        pb.OpenSessionRequest(session_id="s", prompt=tokens.tolist())
        if form == "numbers"
        else pb.OpenSessionRequest(session_id="s", prompt_bytes=tokens.tobytes())
    )
    code, reason = refused(stub.OpenSession, opening)
    assert (code, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "LIMIT_EXCEEDED")
    assert stub.Draft(pb.DraftRequest(context=PROMPT)).tree.token_ids


def test_bytes_that_are_no_ids_are_refused_alone(stub: RetrieverServiceStub) -> None:
    both = pb.DraftRequest(context=PROMPT, context_bytes=IDS)
    assert refused(stub.Draft, both)[1] == "INVALID_REQUEST"
    assert refused(stub.Draft, pb.DraftRequest(context_bytes=IDS[:-1]))[1] == "INVALID_REQUEST"
    negative = np.array([-5], np.int32).tobytes()
    assert refused(stub.Draft, pb.DraftRequest(context_bytes=negative))[1] == "INVALID_REQUEST"


def test_a_constraint_is_not_served_without_a_tokenizer(stub: RetrieverServiceStub) -> None:
    constraint = pb.Constraint(regular_expression="[0-9]+")
    constrained = pb.OpenSessionRequest(session_id="s", prompt=PROMPT, constraint=constraint)
    assert refused(stub.OpenSession, constrained) == (
        grpc.StatusCode.UNIMPLEMENTED,
        "NOT_SERVED",
    )
    opened(stub)  # nothing is left of it


def test_a_client_of_an_earlier_contract_is_told_what_to_do(stub: RetrieverServiceStub) -> None:
    of_before = pb.OpenSessionRequest.FromString(
        pb.OpenSessionRequest(session_id="s", prompt=PROMPT).SerializeToString()
        + bytes([5 << 3 | 2, 3, 10, 1, 97])
    )
    with pytest.raises(grpc.RpcError) as raised:
        stub.OpenSession(of_before)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "foredraft proto --output DIR" in (raised.value.details() or "")


@pytest.mark.plugin("retriever.plugins.findings")
def test_the_examples_of_the_contract_are_answered(tmp_path: Path) -> None:
    drafter = EmbeddedDrafter(state=tmp_path)
    with serving(drafter) as address, grpc.insecure_channel(address) as channel:
        stub: Any = RetrieverServiceStub(channel)
        for name in (
            *("GetServerInfo", "ListIndexes", "Draft", "Explain"),
            *("OpenSession", "AddPredictions", "Step", "CloseSession", "DeleteSessionData"),
            *("ShareFindings", "FetchFindings", "DeleteTenantData"),
        ):
            request = json_format.Parse(examples()[name], getattr(pb, f"{name}Request")())
            getattr(stub, name)(request)
        message = json_format.Parse(examples()["DraftStream"], pb.DraftStreamRequest())
        (response,) = stub.DraftStream(iter([message]))
        assert not response.statuses
        assert response.trees[0].token_ids
    drafter.shut_down()


def tokens_of(tree: pb.DraftTree) -> list[int]:
    (read,) = trees_from_messages([tree], 1)
    return [int(token) for token in read.token_ids]


def test_a_step_for_a_session_that_reads_its_prompt_waits_for_nothing_and_harms_nothing(
    stub: RetrieverServiceStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, gate, prepare = threading.Event(), threading.Event(), DrafterState.prepare

    def slowly(state: DrafterState, *arguments: Any) -> Session:
        if len(arguments[0]) > len(PROMPT):
            begun.set()
            assert gate.wait(60)
        return prepare(state, *arguments)

    monkeypatch.setattr(DrafterState, "prepare", slowly)
    long = np.tile(np.arange(5000, dtype=np.int32), 2)
    request = pb.OpenSessionRequest(session_id="long", prompt_bytes=long.tobytes())
    opening = stub.OpenSession.future(request)
    assert begun.wait(60)
    early = refused(stub.Step, step("long", [1], 10_001))
    assert early == (grpc.StatusCode.NOT_FOUND, "UNKNOWN_SESSION")
    assert refused(stub.CloseSession, pb.CloseSessionRequest(session_id="long"))[1] == early[1]
    opened(stub)  # others do not wait
    assert tokens_of(stub.Step(step("s", [1], 31)).tree)
    gate.set()
    opening.result(timeout=60)
    tree = stub.Step(step("long", [0, 1, 2], 10_003)).tree
    assert tokens_of(tree)[0] == 3


def test_two_openings_of_one_name_at_once_make_one_session(
    stub: RetrieverServiceStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, prepare = threading.Barrier(2), DrafterState.prepare

    def together(state: DrafterState, *arguments: Any) -> Session:
        prepared = prepare(state, *arguments)
        with suppress(threading.BrokenBarrierError):
            both.wait(0.5)  # one tenant's are read one after the other
        return prepared

    monkeypatch.setattr(DrafterState, "prepare", together)
    long = np.zeros(5000, np.int32).tobytes()
    calls = [
        stub.OpenSession.future(pb.OpenSessionRequest(session_id="s", prompt_bytes=long))
        for _ in range(2)
    ]
    codes = sorted(call.code().name for call in calls)
    assert codes == ["ALREADY_EXISTS", "OK"]


def test_a_stream_that_is_half_closed_is_answered_to_the_end(stub: RetrieverServiceStub) -> None:
    opening = pb.OpenSessionRequest(session_id="s", prompt=PROMPT)
    messages = [
        pb.DraftStreamRequest(sequence_number=1, openings=[opening]),
        pb.DraftStreamRequest(sequence_number=2, steps=[step("s", [1], 31).step]),
    ]
    answers = list(stub.DraftStream(iter(messages), timeout=60))
    assert [each.sequence_number for each in answers] == [1, 2]
    assert tokens_of(answers[1].trees[0])
    # Its sessions have ended with it.
    assert refused(stub.Step, step("s", [2], 32))[1] == "UNKNOWN_SESSION"
    assert list(stub.DraftStream(iter(()), timeout=60)) == []


def test_steps_after_an_end_are_refused_alone(stub: RetrieverServiceStub) -> None:
    for name in ("a", "b"):
        opened(stub, name)
    closing = pb.CloseSessionRequest(session_id="a")
    messages = [
        pb.DraftStreamRequest(sequence_number=1, closings=[closing]),
        pb.DraftStreamRequest(
            sequence_number=2, steps=[step(name, [1], 31).step for name in ("a", "b")]
        ),
        pb.DraftStreamRequest(sequence_number=3, closings=[closing, closing]),
    ]
    _, stepped, closed = stub.DraftStream(iter(messages), timeout=60)
    assert [each.session_id for each in stepped.statuses] == ["a"]
    assert [bool(tokens_of(tree)) for tree in stepped.trees] == [False, True]
    assert [each.session_id for each in closed.statuses] == ["a", "a"]


@pytest.mark.parametrize("length", [30, 0, (1 << 31) - 1, 1 << 31, (1 << 32) - 1])
def test_lengths_that_overflow_are_out_of_sequence(stub: RetrieverServiceStub, length: int) -> None:
    opened(stub)
    stated = step("s", [1], length)
    assert refused(stub.Step, stated)[1] == "OUT_OF_SEQUENCE"
    if length:
        closing = pb.CloseSessionRequest(session_id="s", new_token_ids=[1], length=length)
        assert refused(stub.CloseSession, closing)[1] == "OUT_OF_SEQUENCE"
    message = pb.DraftStreamRequest(
        sequence_number=1, steps=[stated.step], timeout_us=(1 << 32) - 1
    )
    (answer,) = stub.DraftStream(iter([message]), timeout=60)
    assert [each.session_id for each in answer.statuses] == ["s"]
    strange = pb.DraftStreamRequest(sequence_number=(1 << 64) - 1)
    (answer,) = stub.DraftStream(iter([strange]), timeout=60)
    assert "was lost" in answer.statuses[0].message
    assert tokens_of(stub.Step(step("s", [1], 31)).tree)
