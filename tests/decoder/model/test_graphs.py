"""Passes of fixed shapes: what a captured graph computes, checked without a device for graphs.

`Traced` records the operations of a function, not its Python code, and runs those: whatever a graph
would freeze, a length or a slot taken from the host, is frozen here, too.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from decoder.budget.budget import FixedBudget
from decoder.budget.costs import measure_costs
from decoder.loop import Decoder
from decoder.model import graphs as passes_module
from decoder.model.cache import Frame, GrowingLayer, TreeCache
from decoder.model.compatibility import compatibility_of
from decoder.model.graphs import (
    Capture,
    CaptureMaker,
    FixedInputs,
    GraphPasses,
    Output,
    capture_on,
)
from decoder.model.passes import CachedPasses
from decoder.model.target import Target, _Places
from retriever.tree import DraftTree
from tests.decoder.decoding import (
    MODELS,
    ScriptedDrafter,
    decoded,
    oracle,
    plainly,
    prompt_of,
    random_tree,
    tiny_convolution,
    tiny_llama,
)
from tests.decoder.model.test_target import layers_of


@pytest.fixture(autouse=True)
def _short_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let buffers grow on the way."""
    monkeypatch.setattr(passes_module, "_FEWEST_TOKENS", 1)


class Uncaptured:
    """Captures nothing: what fixed shapes compute can be had, and checked, on every device."""

    def __call__(self, function: Callable[[], Output]) -> Callable[[], Output]:
        return function


class Traced:
    """Captures by running once and noting down every operation on tensors."""

    def __call__(self, function: Callable[[], Any]) -> Callable[[], Any]:
        traced: Callable[[], Any] = make_fx(lambda: function())()  # noqa: PLW0108  not a method
        return traced


def unlimited(name: str) -> PreTrainedModel:
    model = MODELS[name](dtype=torch.float64)
    model.config.max_position_embeddings = 1024
    return model


def random_path(rng: np.random.Generator, tree: DraftTree) -> np.ndarray[Any, np.dtype[np.int64]]:
    node = int(rng.integers(-1, len(tree)))
    return tree.path_to(node) if node >= 0 else np.zeros(0, np.int64)


def windows_of(model: PreTrainedModel) -> list[int | None]:
    layers = compatibility_of(model).layers
    assert layers is not None
    return [window for _, window in layers]


def largest_error(model: PreTrainedModel, capture: CaptureMaker, steps: int, length: int) -> float:
    """Verify and commit in step with eager passes; return how far logits and caches part."""
    rng = np.random.default_rng(steps)
    fixed, eager = targets = (
        Target(model, capture=capture, verdicts=None),
        Target(model, verdicts=None),
    )
    eager._places = _Places(lambda: CachedPasses(eager._model, TreeCache([*windows_of(model)])))
    assert isinstance(fixed._places.at(0), GraphPasses)
    for target in targets:
        target.prefill(np.array(prompt_of(length), np.int32))
    error = 0.0
    for _ in range(steps):
        tree = random_tree(rng, int(rng.choice([0, 1, 2, 5, 20, 40])))
        logits, expected = (target.verify(7, tree) for target in targets)
        assert logits.shape == expected.shape
        error = max(error, float((logits - expected).abs().max()))
        path = random_path(rng, tree)
        for target in targets:
            target.commit(path)
    for layer, other in zip(*map(layers_of, targets), strict=True):
        assert layer.get_seq_length() == other.get_seq_length()
        for held, also in zip(layer.held(), other.held(), strict=True):
            error = max(error, float((held - also).abs().max()))
    return error


@pytest.mark.parametrize(
    ("capture", "steps", "length"), [(Uncaptured, 40, 3), (Uncaptured, 40, 200), (Traced, 8, 235)]
)
@pytest.mark.parametrize("name", MODELS)
def test_padded_passes_and_commits_are_those_of_eager_passes(
    name: str, capture: Callable[[], Capture], steps: int, length: int
) -> None:
    assert largest_error(unlimited(name), capture, steps, length) < 1e-9


def test_what_was_traced_is_frozen() -> None:
    tensor, addend = torch.zeros(1), [1]
    run = Traced()(lambda: tensor.add_(addend[0]))
    addend[0] = 100
    before = tensor.clone()
    assert run() == before + 1


def shown_what_is_not_there(self: FixedInputs, *arguments: Any) -> None:
    fill(self, *arguments)
    for mask in self.masks.values():
        mask[..., 128:] = 0


def a_slot_too_far(self: FixedInputs, *arguments: Any) -> None:
    fill(self, *arguments)
    self.slots.add_(1)


fill = FixedInputs.fill


@pytest.mark.parametrize("planted", [shown_what_is_not_there, a_slot_too_far])
def test_a_planted_error_in_padded_passes_is_caught(
    planted: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FixedInputs, "fill", planted)
    assert largest_error(unlimited("gemma"), Uncaptured, 4, 40) > 1e-3


def test_a_length_taken_from_the_host_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def put(self: GrowingLayer, frame: Frame, keys: torch.Tensor, values: torch.Tensor) -> Any:
        start, end = self.get_seq_length(), self.get_seq_length() + keys.shape[-2]
        self._key_buffer[..., start:end, :] = keys
        self._value_buffer[..., start:end, :] = values
        shown = slice(frame.num_keys)
        return self._key_buffer[..., shown, :], self._value_buffer[..., shown, :]

    monkeypatch.setattr(GrowingLayer, "put", put)
    assert largest_error(unlimited("llama"), Uncaptured, 6, 20) < 1e-9
    assert largest_error(unlimited("llama"), Traced, 6, 20) > 1e-3


class Watched(TorchDispatchMode):
    """Notes the operations that make a host wait for its device, or bring values from it."""

    waits = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "lift_fresh")

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.found: list[str] = []
        self.num_operations = 0

    def __torch_dispatch__(
        self, func: Any, _: object, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.num_operations += 1
        name = func.name().removeprefix("aten::")
        if name.startswith(self.waits):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


class Watching:
    """Captures nothing, and fails where a graph of CUDA could not be captured."""

    num_operations = 0

    def __call__(self, function: Callable[[], Output]) -> Callable[[], Output]:
        with Watched() as watched:
            function()
        type(self).num_operations += watched.num_operations
        if watched.found:
            raise RuntimeError(f"waits for {watched.found}")
        return function


@pytest.mark.parametrize("name", MODELS)
def test_no_pass_waits_for_its_device(name: str, caplog: pytest.LogCaptureFixture) -> None:
    before = Watching.num_operations
    largest_error(unlimited(name), Watching, 10, 20)
    assert Watching.num_operations > before + 100
    assert caplog.records == []


def test_waiting_for_the_device_is_noticed() -> None:
    with pytest.raises(RuntimeError, match="waits for"):
        Watching()(lambda: torch.zeros(3).sum().item())


class Counted(Uncaptured):
    """Counts what it is asked to capture."""

    functions: ClassVar[list[object]] = []

    def __call__(self, function: Callable[[], Output]) -> Callable[[], Output]:
        self.functions.append(function)
        return super().__call__(function)


def test_a_shape_is_captured_once_until_buffers_grow_or_weights_move() -> None:
    Counted.functions.clear()
    model = unlimited("llama")
    target = Target(model, capture=Counted, verdicts=None)
    target.prefill(np.array(prompt_of(100), np.int32))
    rng = np.random.default_rng(0)
    for width in (20, 17, 31, 22):
        target.verify(3, random_tree(rng, width))
        target.commit(np.array([0]))
    assert len(Counted.functions) == 1
    target.verify(3, random_tree(rng, 3))
    assert len(Counted.functions) == 2
    target.prefill(np.array(prompt_of(300), np.int32))
    target.verify(3, random_tree(rng, 20))
    assert len(Counted.functions) == 3
    target.verify(3, random_tree(rng, 20))
    assert len(Counted.functions) == 3
    for weight in model.parameters():
        weight.data = weight.data.clone()
    target.prefill(np.array(prompt_of(300), np.int32))
    target.verify(3, random_tree(rng, 20))
    assert len(Counted.functions) == 4


def test_generation_with_fixed_shapes_is_that_of_the_model() -> None:
    model, prompt = tiny_llama(), prompt_of(10)
    expected = plainly(model, prompt, 60)
    drafter = ScriptedDrafter(oracle(prompt + expected))
    decoder = Decoder(Target(model, capture=Uncaptured), drafter, FixedBudget(64))
    assert decoded(decoder, prompt, 60) == expected


class Failing:
    """Cannot capture, as where a model waits for its device."""

    def __call__(self, function: Callable[[], Output]) -> Callable[[], Output]:
        function()
        raise RuntimeError("operation not permitted when stream is capturing")


def test_where_capturing_fails_passes_run_eagerly_and_a_line_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert largest_error(unlimited("gemma"), Failing, 8, 20) < 1e-9
    assert [record.getMessage() for record in caplog.records] == [
        "passes run without captured graphs: operation not permitted when stream is capturing"
    ]


def test_passes_wider_than_any_shape_run_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes_module, "_MOST_ROWS", 4)
    Counted.functions.clear()
    assert largest_error(unlimited("gemma"), Counted, 20, 20) < 1e-9
    assert Counted.functions


def test_costs_are_measured_where_they_leap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    Counted.functions.clear()
    target = Target(tiny_llama(), capture=Counted, verdicts=None)
    surface = measure_costs(target, (1, 2, 4, 8), (20, 100), 0.5)
    assert surface.widths == (1, 2, 3, 4, 5, 8)
    assert len(Counted.functions) == 4  # one for each power of two: no buffer grows


def test_graphs_are_for_cuda_and_trees_and_models_as_they_come() -> None:
    assert capture_on(torch.device("cpu")) is None
    assert isinstance(Target(tiny_llama())._places.at(0), CachedPasses)
    assert not isinstance(Target(tiny_llama())._places.at(0), GraphPasses)
    assert not isinstance(Target(tiny_convolution(), capture=Uncaptured)._places.at(0), GraphPasses)
    patched = tiny_llama()
    patched.forward = functools.partial(type(patched).forward, patched)
    assert not isinstance(Target(patched, capture=Uncaptured)._places.at(0), GraphPasses)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", MODELS)
def test_cuda_graphs_compute_what_eager_passes_compute(name: str) -> None:
    model = unlimited(name).to("cuda")  # type: ignore[arg-type]  # wrapped without its types
    make = capture_on(torch.device("cuda"))
    assert make is not None
    assert largest_error(model, make, 40, 3) < 1e-8
    assert largest_error(model, make, 40, 200) < 1e-8
