"""Logs tell what happened, and hold no caller's text."""

import json
import logging
import re
import signal
import sys
from collections.abc import Iterator

import grpc
import numpy as np
import pytest

from retriever.client.strict import RemoteDrafter
from retriever.drafter import DraftRequest
from retriever.errors import InvalidRequestError, OutOfSequenceError
from retriever.operations.logs import JsonLines, TextLines, log_event
from retriever.v1 import retriever_pb2 as pb
from retriever.v1.retriever_pb2_grpc import RetrieverServiceStub
from tests.retriever.conftest import start_service

TOKENS = np.array([48611, 48612, 48613], np.int32)
NAME = "a-name-that-nobody-may-see"


def used(address: str) -> None:
    """Have a session, and provoke whatever an error's text could show."""
    with RemoteDrafter(address, timeout_s=5) as remote:
        remote.open(NAME, TOKENS)
        remote.draft([DraftRequest(NAME, TOKENS, 6, 8)])
        with pytest.raises(OutOfSequenceError):
            remote.draft([DraftRequest(NAME, TOKENS, 48614, 8)])
        remote.draft_context(TOKENS, 8)
        with grpc.insecure_channel(address) as channel:
            stub = RetrieverServiceStub(channel)
            for _ in range(2):
                with pytest.raises(grpc.RpcError):  # not open, and the name is in the error's text
                    stub.CloseSession(pb.CloseSessionRequest(session_id=NAME))
        with pytest.raises(InvalidRequestError):
            remote.open("other", TOKENS.astype(np.int64) * 48615)
        remote.close(NAME, TOKENS)


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_no_token_and_no_text_is_logged_at_any_level(log_format: str) -> None:
    options = ("--address", "127.0.0.1:0", "--log-level", "debug", "--log-format", log_format)
    process, address = start_service(*options)
    used(address)
    process.send_signal(signal.SIGTERM)
    _, logged = process.communicate(timeout=60)
    assert logged.count("OpenSession") == 1
    assert "ABORTED" in logged
    assert "NOT_FOUND" in logged
    assert "Traceback" not in logged
    assert not re.search("4861[0-9]", logged)
    assert NAME not in logged
    if log_format == "json":
        events = [json.loads(line) for line in logged.splitlines()]
        assert {"time", "level", "logger", "event", "message"} <= events[0].keys()
        assert [each["event"] for each in events if each["event"] != "call"] == [
            "serving",
            "draining",
            "ended",
        ]
        assert events[0]["address"] == address


def test_at_the_usual_level_calls_are_not_logged() -> None:
    process, address = start_service("--address", "127.0.0.1:0", "--log-format", "json")
    used(address)
    process.send_signal(signal.SIGTERM)
    _, logged = process.communicate(timeout=60)
    assert len(logged.splitlines()) == 3


class Kept(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def records() -> Iterator[list[logging.LogRecord]]:
    kept, logger = Kept(), logging.getLogger("retriever.tests")
    logger.addHandler(kept)
    logger.setLevel(logging.DEBUG)
    yield kept.records
    logger.removeHandler(kept)


def test_of_an_exception_its_place_is_logged_and_not_its_text(
    records: list[logging.LogRecord],
) -> None:
    logger = logging.getLogger("retriever.tests")
    for error in (ValueError("secret 48611"), OSError(28, "No space left on device", "secret")):
        try:
            raise error
        except (ValueError, OSError):
            logger.exception("it failed")
    for formatter in (JsonLines(), TextLines()):
        first, second = (formatter.format(record) for record in records)
        assert "secret" not in first + second
        assert "48611" not in first
        assert "ValueError" in first
        assert "test_logs.py" in first
        assert "No space left" in second
        assert "\n" not in first


def test_a_line_stays_a_line_whatever_is_in_it(records: list[logging.LogRecord]) -> None:
    logger = logging.getLogger("retriever.tests")
    log_event(logger, logging.INFO, "odd", "a\nb\x1b[31m", path="c\nd", size=3)
    (record,) = records
    entry = json.loads(JsonLines().format(record))
    assert (entry["event"], entry["path"], entry["size"]) == ("odd", "c\nd", 3)
    line = TextLines().format(record)
    assert line.isprintable()
    assert line.endswith('info a\\x0ab\\x1b[31m path="c\\nd" size=3')


def test_of_others_messages_only_the_first_line_is_logged() -> None:
    told = "Task exception was never retrieved\nfuture: ValueError('secret')"
    record = logging.LogRecord("asyncio", logging.ERROR, "x", 1, told, (), sys.exc_info())
    assert "secret" not in JsonLines().format(record)
    assert "never retrieved" in JsonLines().format(record)
