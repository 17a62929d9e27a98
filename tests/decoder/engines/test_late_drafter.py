"""An engine that starts decodes without drafts while kernels are compiled, and with them after."""

import time
from collections.abc import Callable
from threading import Event

import numpy as np
import pytest

from decoder.drafters.following import NoDrafter
from decoder.engines import late_drafter
from decoder.engines.late_drafter import LateDrafter, without_waiting
from retriever.drafter import DraftRequest, keeps_tenants
from retriever.errors import DrafterUnavailableError
from retriever.sessions import cold_start
from retriever.sessions.embedded import EmbeddedDrafter

PROMPT = np.array([1, 2, 3, 4, 5, 6] * 4, np.int32)


class Compiler:
    """A process that compiles until it is told to be done."""

    def __init__(self) -> None:
        self.done = Event()
        self.was_killed = False

    def poll(self) -> int | None:
        return 0 if self.done.is_set() else None

    def kill(self) -> None:
        self.was_killed = True


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    made = Compiler()
    monkeypatch.setattr(late_drafter, "_LOOK_S", 0.01)
    monkeypatch.setattr(cold_start, "begin_compiling", lambda _: made)
    return made


def wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_drafts_come_once_kernels_are_compiled(compiler: Compiler) -> None:
    drafter = LateDrafter(EmbeddedDrafter)
    assert keeps_tenants(drafter)
    with pytest.raises(DrafterUnavailableError, match="being compiled"):
        drafter.open("a", PROMPT)
    compiler.done.set()
    wait_until(lambda: drafter.is_ready)
    drafter.open("a", PROMPT)
    (tree,) = drafter.draft([DraftRequest("a", PROMPT[:1], len(PROMPT) + 1, 8)])
    assert len(tree.token_ids) > 0
    drafter.close("a")
    drafter.shut_down()


def test_an_engine_that_ends_ends_the_compiler(compiler: Compiler) -> None:
    drafter = LateDrafter(EmbeddedDrafter)
    drafter.shut_down()
    wait_until(lambda: compiler.was_killed)
    assert not drafter.is_ready


def test_a_drafter_that_cannot_be_opened_is_told(
    compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses() -> EmbeddedDrafter:
        raise ValueError("no such thing")

    compiler.done.set()
    LateDrafter(refuses)
    wait_until(lambda: "cannot be opened" in caplog.text)


def test_an_engine_that_is_given_a_drafter_waits_for_no_compiler(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing, given = NoDrafter(), EmbeddedDrafter()
    assert without_waiting(nothing) is nothing
    assert without_waiting(given) is given  # its kernels are kept, as of all tests
    monkeypatch.setattr(cold_start, "are_kept", lambda _: False)
    late = without_waiting(given)
    with pytest.raises(DrafterUnavailableError, match="being compiled"):
        late.open("a", PROMPT)
    compiler.done.set()
    wait_until(lambda: isinstance(late, LateDrafter) and late.is_ready)
    late.open("a", PROMPT)
    assert given.stats().num_sessions == 1
    late.close("a")
    given.shut_down()
