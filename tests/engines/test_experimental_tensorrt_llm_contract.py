"""The drafter for TensorRT-LLM against its published interface, without the engine.

What is known of it is in `tensorrt_llm/_torch/speculative/drafter.py` and `ngram.py`: which
attributes of a request are read and set, what constructors take, and how drafts are padded.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from decoder.errors import UnsupportedEngineError
from tests.engines.scripted import ScriptedDrafter

MODULE = "decoder.engines.experimental_tensorrt_llm"
MAX_DRAFT_LEN = 4


class DrafterOfMain(ABC):
    def __init__(self, max_concurrency: int | None = None) -> None:
        self.max_concurrency = max_concurrency

    @abstractmethod
    def prepare_draft_tokens(
        self, scheduled_requests: Any, resource_manager: Any | None = None
    ) -> None: ...

    def pad(self, request: "Request") -> None:  # noqa: B027  (it does no padding)
        """Leave the drafts as they are."""


class DrafterThatPads(DrafterOfMain):
    """Those of 1.0 and 1.1: a subclass names its length."""

    def pad(self, request: "Request") -> None:
        length: int = self.max_draft_len  # type: ignore[attr-defined]
        request.py_draft_tokens.extend(0 for _ in range(length - len(request.py_draft_tokens)))


class DrafterWithLengths(DrafterOfMain):
    def __init__(
        self,
        max_draft_len: int | None = None,
        max_total_draft_tokens: int | None = None,
        max_concurrency: int | None = None,
        draft_len_schedule: dict[int, int] | None = None,
    ) -> None:
        super().__init__(max_concurrency)
        self.max_draft_len = max_draft_len
        self.max_total_draft_tokens = self.static = max_total_draft_tokens
        self.draft_len_schedule = draft_len_schedule

    def pad(self, request: "Request") -> None:
        assert self.static is not None
        request.py_draft_tokens.extend(0 for _ in range(self.static - len(request.py_draft_tokens)))


@dataclass
class Request:
    """What the engine shows of a request."""

    request_id: int
    tokens: list[int]
    py_orig_prompt_len: int
    py_max_new_tokens: int
    py_draft_tokens: list[int] = field(default_factory=list)
    is_dummy: bool = False

    def get_tokens(self, beam: int) -> list[int]:
        assert beam == 0
        return self.tokens


def script(tokens: list[int], number: int) -> list[int]:
    """A model whose choice depends on all tokens before it."""
    out = list(tokens)
    for _ in range(number):
        out.append(2 + (31 * sum(out[-3:]) + len(out)) % 60)
    return out[len(tokens) :]


class Engine:
    """Schedules some of its requests in each step, verifies their drafts, and rewinds."""

    def __init__(self, drafter: Any, *, pads: bool) -> None:
        self.drafter = drafter
        self.pads = pads
        self.requests: list[Request] = []
        self.num_passes = 0
        self.num_drafted = 0

    def submit(self, number: int, prompt: list[int], max_new: int) -> Request:
        request = Request(number, [*prompt, *script(prompt, 1)], len(prompt), max_new)
        self.requests.append(request)
        return request

    def step(self, scheduled: list[Request]) -> None:
        self.drafter.prepare_draft_tokens(SimpleNamespace(generation_requests=scheduled), None)
        for request in scheduled:
            if request.is_dummy:
                continue
            self.num_passes += 1
            self.num_drafted += len(request.py_draft_tokens)
            assert len(request.py_draft_tokens) <= MAX_DRAFT_LEN
            end = request.py_orig_prompt_len + request.py_max_new_tokens
            assert len(request.tokens) + len(request.py_draft_tokens) < end or not (
                request.py_draft_tokens
            )
            if self.pads:
                self.drafter.pad(request)
            self._verify(request)

    def run(self, order: Callable[[list[Request]], list[Request]]) -> None:
        while running := [each for each in self.requests if not self._is_done(each)]:
            self.step(order(running))

    def _verify(self, request: Request) -> None:
        for drafted in [*request.py_draft_tokens, -1]:
            if self._is_done(request):
                return
            choice = script(request.tokens, 1)[0]
            request.tokens.append(choice)
            if choice != drafted:
                return

    def _is_done(self, request: Request) -> bool:
        return len(request.tokens) >= request.py_orig_prompt_len + request.py_max_new_tokens


@pytest.fixture(params=[DrafterOfMain, DrafterThatPads, DrafterWithLengths])
def adapter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The adapter's module over a base class of each published version."""
    with loaded_over(request.param, monkeypatch) as module:
        yield module


@contextmanager
def loaded_over(drafter: type, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    names = ("tensorrt_llm", "tensorrt_llm._torch", "tensorrt_llm._torch.speculative")
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    base = ModuleType("tensorrt_llm._torch.speculative.drafter")
    base.Drafter = drafter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, base.__name__, base)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    yield import_module(MODULE)
    sys.modules.pop(MODULE, None)


def engine_with(adapter: Any, drafter: ScriptedDrafter) -> Engine:
    ours = adapter.DraftsForTensorRtLlm(
        drafter, 64, max_draft_len=MAX_DRAFT_LEN, max_concurrency=8, deadline_s=None
    )
    assert ours.max_concurrency == 8
    return Engine(ours, pads=True)


@pytest.mark.parametrize("wrong_at", [0, 1, 3])
def test_requests_that_come_and_go_are_served_by_their_own_drafts(
    adapter: Any, wrong_at: int
) -> None:
    drafter = ScriptedDrafter(script, wrong_at)
    engine = engine_with(adapter, drafter)
    random = np.random.default_rng(7)
    prompts = {number: random.integers(2, 64, 3 + number).tolist() for number in range(6)}
    for number, prompt in prompts.items():
        engine.submit(number, prompt, 40)

    def some(running: list[Request]) -> list[Request]:
        shuffled: list[Request] = random.permutation(np.array(running, object)).tolist()
        return shuffled[: max(1, len(shuffled) - 1)]

    engine.run(some)
    for request in engine.requests:
        assert request.tokens[request.py_orig_prompt_len :] == script(
            prompts[request.request_id], 40
        )
    assert (engine.num_passes < 6 * 39 * 0.6) == (wrong_at != 1)
    engine.drafter.close()
    assert len(drafter.outputs) == 6
    assert not drafter.sessions


def test_only_new_tokens_reach_the_drafter(adapter: Any) -> None:
    drafter = ScriptedDrafter(script)
    engine = engine_with(adapter, drafter)
    request = engine.submit(1, [5] * 500, 100)
    engine.run(lambda running: running)
    assert drafter.told <= len(request.tokens)


def test_a_drafter_that_fails_leaves_requests_without_drafts(adapter: Any) -> None:
    drafter = ScriptedDrafter(script)
    engine = engine_with(adapter, drafter)
    engine.submit(1, [5, 6, 7], 30)
    drafter.failure = RuntimeError("our bug")

    def failing_at_times(running: list[Request]) -> list[Request]:
        drafter.is_away = engine.num_passes % 3 == 1
        return running

    engine.run(failing_at_times)
    assert engine.requests[0].tokens[3:] == script([5, 6, 7], 30)
    assert engine.num_drafted > 0


def test_requests_that_end_unseen_are_closed_and_remembered(adapter: Any) -> None:
    drafter = ScriptedDrafter(script)
    engine = engine_with(adapter, drafter)
    gone, stays = engine.submit(1, [5, 6], 30), engine.submit(2, [7, 8], 1000)
    engine.step([gone, stays])
    for _ in range(adapter.MAX_IDLE_STEPS + 1):
        engine.step([stays])
    assert len(drafter.sessions) == len(engine.drafter.sequences) == 1
    assert len(drafter.outputs) == 1


def test_dummies_are_left_as_they_are(adapter: Any) -> None:
    engine = engine_with(adapter, ScriptedDrafter(script))
    dummy = Request(9, [1], 1, 1, [1, 1, 1, 1], is_dummy=True)
    engine.step([engine.submit(1, [5, 6], 30), dummy])
    assert dummy.py_draft_tokens == [1, 1, 1, 1]


def test_a_request_that_was_rewound_begins_anew(adapter: Any) -> None:
    drafter = ScriptedDrafter(script)
    engine = engine_with(adapter, drafter)
    request = engine.submit(1, [5, 6, 7], 30)
    for _ in range(3):
        engine.step([request])
    del request.tokens[5:]
    engine.run(lambda running: running)
    assert request.tokens[3:] == script([5, 6, 7], 30)


class DrafterThatFinishes(DrafterOfMain):
    @abstractmethod
    def prepare_draft_tokens(  # type: ignore[override]  # as another version has it
        self, scheduled_requests: Any, sampler: Any, states: Any
    ) -> None: ...

    @abstractmethod
    def finish(self, request: Request) -> None: ...


class DrafterThatAsksOtherwise:
    def __init__(self, config: Any) -> None: ...

    def propose(self, requests: Any) -> None: ...


@pytest.mark.parametrize(
    ("base", "told"),
    [
        (
            DrafterThatFinishes,
            [
                "Drafter demands a method `finish`",
                "Drafter.prepare_draft_tokens gives `sampler` in the place of `resource_manager`",
                "Drafter.prepare_draft_tokens has a new parameter `states`",
            ],
        ),
        (
            DrafterThatAsksOtherwise,
            [
                "Drafter has no `prepare_draft_tokens`",
                "Drafter.__init__ needs `config`, which the adapter does not pass",
            ],
        ),
    ],
)
def test_a_version_that_asks_otherwise_is_refused_with_what_changed(
    base: type, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with loaded_over(base, monkeypatch) as module, pytest.raises(UnsupportedEngineError) as caught:
        module.DraftsForTensorRtLlm(ScriptedDrafter(script), 64, max_draft_len=4)
    assert "; ".join(told) in str(caught.value)
