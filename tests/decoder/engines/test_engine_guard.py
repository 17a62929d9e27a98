"""Errors of ours cost drafts: the engine that called goes on."""

import logging

import pytest

from decoder.engines.engine_guard import EngineGuard
from decoder.errors import UnsupportedEngineError

LOG = logging.getLogger(__name__)


def test_the_first_error_is_logged_and_each_drops_all_sequences(
    caplog: pytest.LogCaptureFixture,
) -> None:
    dropped: list[str] = []

    def abandon() -> None:
        dropped.append("all")
        raise RuntimeError("even this fails")

    guard = EngineGuard("llama.cpp", LOG, abandon)
    for _ in range(3):
        with guard:
            raise ZeroDivisionError("a fault")
    assert (guard.num_failures, len(dropped)) == (3, 3)
    assert caplog.messages == ["llama.cpp goes on without drafts for now: a fault"]
    assert caplog.records[0].exc_info is None


@pytest.mark.parametrize(
    ("error", "has_trace"), [(ZeroDivisionError(), True), (UnsupportedEngineError("it"), False)]
)
def test_a_server_logs_the_trace_of_what_only_we_can_mend(
    error: Exception,
    has_trace: bool,  # noqa: FBT001
    caplog: pytest.LogCaptureFixture,
) -> None:
    with EngineGuard("vLLM", LOG, lambda: None, logging.ERROR):
        raise error
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert (caplog.records[0].exc_info is not None) == has_trace


def test_what_ends_a_process_ends_it() -> None:
    guard = EngineGuard("vLLM", LOG, lambda: None)
    with pytest.raises(KeyboardInterrupt), guard:
        raise KeyboardInterrupt
    with guard:
        pass
    assert guard.num_failures == 0


def test_an_error_that_was_dealt_with_is_counted_and_drops_nothing() -> None:
    dropped: list[str] = []
    guard = EngineGuard("llama.cpp", LOG, lambda: dropped.append("all"))
    guard.count(ValueError("refused"))
    assert (guard.num_failures, dropped) == (1, [])
