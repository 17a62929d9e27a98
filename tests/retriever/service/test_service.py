"""The service against a real server in another process."""

import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from indexer.reader import Index
from retriever.client.strict import RemoteDrafter
from retriever.drafter import DraftRequest
from retriever.errors import (
    DrafterUnavailableError,
    InvalidRequestError,
    LimitExceededError,
    OutOfSequenceError,
    SessionExistsError,
    UnknownSessionError,
    VocabularyMismatchError,
)
from retriever.tree import DraftTree, Source
from retriever.v1 import retriever_pb2 as pb, retriever_pb2_grpc as pb_grpc
from retriever.v1.retriever_pb2_grpc import RetrieverServiceStub
from retriever.wire.messages import tree_from_message
from tests.patience import can_be_kept
from tests.retriever.conftest import start_service, stop_service
from tests.retriever.warm_interpreter import run


def test_default_budget_is_32_nodes(service: str) -> None:
    with grpc.insecure_channel(service) as channel:
        response = RetrieverServiceStub(channel).Draft(pb.DraftRequest(context=[1, 1, 1, 1]))
    assert len(response.tree.token_ids) == 32


def test_indexes_are_listed(service: str, index: Path) -> None:
    with RemoteDrafter(service) as remote:
        (info,) = remote.list_indexes()
    opened = Index.open(index)
    assert (info.name, info.num_tokens, info.num_documents) == ("corpus", opened.num_tokens, 40)
    assert info.vocabulary_fingerprint == opened.vocabulary.fingerprint


def test_errors_reach_the_client_as_they_are_embedded(service: str) -> None:
    with RemoteDrafter(service) as remote:
        remote.open("s", [1, 2, 3])
        with pytest.raises(SessionExistsError):
            remote.open("s", [1])
        with pytest.raises(OutOfSequenceError, match="lost or repeated"):
            remote.draft([DraftRequest("s", np.array([4], np.int32), 9, 4)])
        with pytest.raises(LimitExceededError, match="max_budget_nodes"):
            remote.draft([DraftRequest("s", np.array([4], np.int32), 4, 4000)])
        with pytest.raises(InvalidRequestError, match="outside the vocabulary"):
            remote.draft([DraftRequest("s", np.array([50], np.int32), 4, 4)])
        for tokens in ([-1], [0.5], ["a"], [[1]]):
            with pytest.raises(InvalidRequestError):
                remote.draft([DraftRequest("s", np.array(tokens), 4, 4)])
            with pytest.raises(InvalidRequestError):
                remote.draft_context(tokens, 4)
        for budget in (-1, 1 << 40):
            with pytest.raises(InvalidRequestError):
                remote.draft_context([1], budget)
            with pytest.raises(InvalidRequestError):
                remote.draft([DraftRequest("s", np.array([4], np.int32), 4, budget)])
        for name in ("", "x" * 257):
            with pytest.raises(InvalidRequestError, match="bytes"):
                remote.open(name, [1])
        assert len(remote.draft_context([1, 1, 1, 1], 0)) == 0
        with pytest.raises(UnknownSessionError):
            remote.draft([DraftRequest("t", np.array([4], np.int32), 4, 4)])
        with pytest.raises(UnknownSessionError):
            remote.close("t")
        (tree,) = remote.draft([DraftRequest("s", np.array([4], np.int32), 4, 4)])
        assert isinstance(tree, DraftTree)
        remote.close("s")


def test_unknown_session_on_the_wire_is_told_and_the_stream_goes_on(service: str) -> None:
    step = pb.SessionStep(session_id="nobody", length=1)
    with grpc.insecure_channel(service) as channel:
        messages = [pb.DraftStreamRequest(sequence_number=n, steps=[step]) for n in (1, 2)]
        answers = list(RetrieverServiceStub(channel).DraftStream(iter(messages)))
    assert [answer.sequence_number for answer in answers] == [1, 2]
    for answer in answers:
        (status,) = answer.statuses
        assert (status.session_id, status.code) == ("nobody", grpc.StatusCode.NOT_FOUND.value[0])


def test_another_tokenizer_is_refused(service: str) -> None:
    with (
        RemoteDrafter(service, vocabulary_fingerprint="cd" * 32) as remote,
        pytest.raises(VocabularyMismatchError, match="model's own tokenizer"),
    ):
        remote.open("s", [1])


def test_two_clients_may_use_one_session_name(service: str) -> None:
    with RemoteDrafter(service) as one, RemoteDrafter(service) as other:
        one.open("s", [1])
        other.open("s", [1])
        one.close("s")
        other.close("s")


def test_source_of_a_newer_service_is_unspecified() -> None:
    message = pb.DraftTree(token_ids=[1], parents=[-1], probabilities=[0.5])
    message.sources.append(99)  # type: ignore[arg-type]  # what the enumeration does not name yet
    assert tree_from_message(message).sources.tolist() == [Source.UNSPECIFIED]


@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:1", "unix:no-such.sock"])
def test_nobody_listening_is_unavailable(address: str) -> None:
    message = (
        rf"no draft service answers at {re.escape(address)} \(.*foredraft serve` running there"
    )
    with RemoteDrafter(address) as remote, pytest.raises(DrafterUnavailableError, match=message):
        remote.open("s", [1])


@can_be_kept
def test_paused_service_is_given_up_after_the_timeout(index: Path) -> None:
    process, address = start_service("--index", str(index), "--address", "127.0.0.1:0")
    with RemoteDrafter(address, timeout_s=0.5) as remote:
        remote.open("s", [1, 2, 3])
        request = DraftRequest("s", np.array([4], np.int32), 4, 4)
        remote.draft([request])
        os.kill(process.pid, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(DrafterUnavailableError, match=r"no answer within 0\.5 s"):
            remote.draft([DraftRequest("s", np.array([5], np.int32), 5, 4)])
        assert time.monotonic() - began < 1.5
        os.kill(process.pid, signal.SIGCONT)
        with pytest.raises(DrafterUnavailableError, match="lost"):
            remote.draft([DraftRequest("s", np.array([6], np.int32), 6, 4)])
        remote.close("s")
        remote.open("s", [1, 2, 3])
        remote.draft([request])
    stop_service(process)


def test_killed_service_is_unavailable(index: Path) -> None:
    process, address = start_service("--index", str(index), "--address", "127.0.0.1:0")
    with RemoteDrafter(address) as remote:
        remote.open("s", [1, 2, 3])
        process.kill()
        process.communicate(timeout=60)
        with pytest.raises(DrafterUnavailableError):
            remote.draft([DraftRequest("s", np.array([4], np.int32), 4, 4)])


def refused(*arguments: str) -> str:
    done = run("-m", "retriever", "serve", *arguments)
    assert done.returncode == 1, done
    assert "Traceback" not in done.stderr
    return done.stderr


def test_address_in_use_is_a_clear_error(service: str, tmp_path: Path) -> None:
    assert "choose another" in refused("--address", service)
    address = f"unix:{tmp_path}/draft.sock"
    process, _ = start_service("--address", address)
    assert "choose another" in refused("--address", address)
    process.kill()  # leaves its socket behind, which the next service takes over
    process.communicate(timeout=60)
    process, _ = start_service("--address", address)
    stop_service(process)


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:99999", ":50051", "127.0.0.1:x", ""])
def test_what_is_no_address_is_a_clear_error(address: str) -> None:
    assert "HOST:PORT" in refused("--address", address)


@pytest.mark.parametrize("address", ["unix:/nonexistent/x.sock", "192.0.2.1:50051"])
def test_address_that_cannot_be_bound_is_one_clear_line(address: str) -> None:
    errors = refused("--address", address)
    assert errors.startswith("error: cannot listen on")
    assert errors.count("\n") == 1


def test_missing_index_is_a_clear_error(tmp_path: Path) -> None:
    assert "no index" in refused("--index", str(tmp_path / "none"))


def test_what_one_session_is_refused_costs_the_others_nothing(service: str) -> None:
    with RemoteDrafter(service) as remote:
        remote.open("good", [1, 2])
        remote.open("bad", [1, 2])
        good = DraftRequest("good", np.array([3], np.int32), 3, 4)
        with pytest.raises(OutOfSequenceError, match="length of 9"):
            remote.draft([good, DraftRequest("bad", np.array([3], np.int32), 9, 4)])
        right = DraftRequest("bad", np.array([3], np.int32), 3, 4)
        assert len(remote.draft([good, right])) == 2  # as if nothing had been noted of either
        after = DraftRequest("good", np.array([4], np.int32), 4, 4)
        with pytest.raises(OutOfSequenceError):
            remote.draft([after, right])
        with pytest.raises(DrafterUnavailableError, match="taken back"):
            remote.draft([DraftRequest("good", np.array([5], np.int32), 4, 4)])
        remote.close("good")
        remote.close("bad")


class OutOfStep(pb_grpc.RetrieverServiceServicer):
    """Answers every message with the response to the one before."""

    def OpenSession(self, request: Any, context: Any) -> pb.OpenSessionResponse:  # noqa: N802
        del request, context
        return pb.OpenSessionResponse()

    def DraftStream(  # noqa: N802
        self, request_iterator: Iterator[pb.DraftStreamRequest], context: Any
    ) -> Iterator[pb.DraftStreamResponse]:
        del context
        for message in request_iterator:
            yield pb.DraftStreamResponse(
                sequence_number=message.sequence_number - 1, trees=[pb.DraftTree()]
            )


class Ending(OutOfStep):
    """Ends every stream at its first message."""

    def DraftStream(  # noqa: N802
        self, request_iterator: Iterator[pb.DraftStreamRequest], context: Any
    ) -> Iterator[pb.DraftStreamResponse]:
        del context
        next(request_iterator)
        return iter(())


@contextmanager
def connected(servicer: pb_grpc.RetrieverServiceServicer) -> Iterator[RemoteDrafter]:
    """Serve in this process during the block; give a client that has a session s of one token."""
    server = grpc.server(ThreadPoolExecutor(2))
    pb_grpc.add_RetrieverServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with RemoteDrafter(f"127.0.0.1:{port}") as remote:
        remote.open("s", [1])
        yield remote
    server.stop(0)


def test_an_answer_to_another_message_is_no_draft() -> None:
    with connected(OutOfStep()) as remote:  # type: ignore[abstract]
        with pytest.raises(DrafterUnavailableError, match="message 0 where 1 was expected"):
            remote.draft([DraftRequest("s", np.empty(0, np.int32), 1, 4)])
        with pytest.raises(DrafterUnavailableError, match="was lost"):
            remote.draft([DraftRequest("s", np.empty(0, np.int32), 1, 4)])


def test_a_stream_that_the_service_ends_is_no_answer_and_the_next_step_has_another() -> None:
    with connected(Ending()) as remote:  # type: ignore[abstract]
        for _ in range(2):
            with pytest.raises(DrafterUnavailableError, match="ended the stream"):
                remote.draft([DraftRequest("s", np.empty(0, np.int32), 1, 4)])
            remote.open("s", [1])
