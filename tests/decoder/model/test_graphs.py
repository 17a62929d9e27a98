"""Passes of fixed shapes: what a captured graph computes, checked without a device for graphs.

`Traced` records the operations of a function, not its Python code, and runs those: whatever a graph
would freeze, a length or a slot taken from the host, is frozen here, too.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar, Final

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import (
    Llama4ForCausalLM,
    Llama4TextConfig,
    MinPLogitsWarper,
    PreTrainedModel,
    masking_utils,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from decoder.budget.budget import FixedBudget, MeasuredBudget
from decoder.budget.costs import CostSurface
from decoder.budget.pass_timing import measure_costs
from decoder.errors import OutOfMemoryError
from decoder.loop import Decoder, Request
from decoder.model import graphs as passes_module, target as target_module
from decoder.model.attention import tree_attention
from decoder.model.cache import Frame, GrowingLayer, TreeCache
from decoder.model.capability_check import agree
from decoder.model.compatibility import Capability, Compatibility, compatibility_of
from decoder.model.graphs import (
    CapturedPasses,
    CaptureMaker,
    Grid,
    Inputs,
    Output,
    PassLayout,
    PassShape,
    SplitMask,
    _choice_table,
    capture_on,
    split_over_keys,
)
from decoder.model.passes import Read, Reading
from decoder.model.states import FINAL
from decoder.model.target import Target
from decoder.sampling.processors import PathScores
from decoder.sampling.rule import ProcessedRule, accept_rule
from decoder.sampling.sampling_settings import SamplingSettings
from decoder.sampling.verification import (
    AcceptRule,
    Choices,
    ChoiceTable,
    PassContext,
    SampledTree,
    SelectingRule,
    accept_greedy,
)
from decoder.sampling.walk import Acceptance
from retriever.drafter import Drafter
from retriever.tree import ROOT, DraftTree
from tests.decoder.decoding import (
    MODELS,
    VOCABULARY,
    ScriptedDrafter,
    at_random,
    decoded,
    evaluated,
    oracle,
    plainly,
    prompt_of,
    random_tree,
    tiny_convolution,
    tiny_gemma,
    tiny_llama,
    tree_of,
)
from tests.decoder.model.test_pretrained import TWO_LAYERS, tiny_bloom
from tests.decoder.model.test_target import layers_of
from tests.decoder.rounding import SHOWN, Rounding
from tests.oracles.exactness.tiny_models import tiny_model
from tests.oracles.pass_operations import SETTINGS, counted_steps
from tests.suite_parts import cases, draws_all_cases


@pytest.fixture(autouse=True)
def _short_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let buffers grow on the way."""
    monkeypatch.setattr(passes_module, "_FEWEST_TOKENS", 1)


class Uncaptured:
    """Captures nothing: what fixed shapes compute can be had, and checked, on every device."""

    def __call__(self, function: Callable[[], Output]) -> Callable[[], Output]:
        return function


READ: Final = ("item", "_local_scalar_dense", "is_nonzero")
"""Operations that read a value; the first comes undivided where torch infers only."""


class Tape(TorchDispatchMode):
    """Notes down every operation on tensors, with its arguments and what it gave."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(
        self, func: Any, _: object, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.name().removeprefix("aten::") in READ:
            raise RuntimeError("a value is read while operations are noted")
        found = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, found))
        return found

    def play(self, output: Any) -> Any:
        """Do the same operations again; return what stands for this output then."""
        again: dict[int, Any] = {}

        def now(value: Any) -> Any:
            return again.get(id(value), value)

        for func, args, kwargs, found in self._calls:
            new = func(*tree_map(now, args), **tree_map(now, kwargs))
            again.update(zip(map(id, tree_leaves(found)), tree_leaves(new), strict=True))
        return tree_map(now, output)


class Traced:
    """Captures by running once and noting down every operation on tensors."""

    def __call__(self, function: Callable[[], Output]) -> Callable[[], Output]:
        with Tape() as tape:
            output = function()
        return functools.partial(tape.play, output)


def unlimited(name: str) -> PreTrainedModel:
    model = MODELS[name](dtype=torch.float64)
    model.config.max_position_embeddings = 1024
    return model


def random_path(rng: np.random.Generator, tree: DraftTree) -> np.ndarray[Any, np.dtype[np.int64]]:
    node = int(rng.integers(-1, len(tree)))
    return tree.path_to(node) if node >= 0 else np.zeros(0, np.int64)


def pair(model: PreTrainedModel, capture: CaptureMaker, **options: Any) -> tuple[Target, Target]:
    """Return a target of fixed shapes, and one that reads eagerly."""
    fixed = Target(model, capture=capture, verdicts=None, **options)
    assert isinstance(fixed._captured, CapturedPasses)
    eager = Target(model, verdicts=None, **options)
    eager._captured = None  # as it would not be on CUDA
    return fixed, eager


def apart(rounding: Rounding, found: Read, expected: Read) -> float:
    """Return how far two readings part, in logits and in states, in what rounding explains."""
    assert found.logits.shape == expected.logits.shape
    error = rounding.apart(found.logits, expected.logits)
    for number, rows in expected.states.items():
        error = max(error, rounding.apart(found.states[number], rows))
    return error


def caches_apart(rounding: Rounding, targets: tuple[Target, Target]) -> float:
    error = 0.0
    for layer, other in zip(*map(layers_of, targets), strict=True):
        assert layer.lengths == other.lengths
        for place in range(len(layer.lengths)):
            layer.place = other.place = place
            for held, also in zip(layer.held(), other.held(), strict=True):
                error = max(error, rounding.apart(held, also))
        layer.place = other.place = 0
    return error


def largest_error(
    model: PreTrainedModel,
    capture: CaptureMaker,
    widths: Sequence[int],
    length: int,
    *,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> float:
    """Verify and commit trees of so many nodes in step with eager passes; return how far they part.

    Logits and caches, in what rounding explains, where `dtype` is the coarsest precision if not the
    model's.
    """
    rng, rounding = np.random.default_rng(len(widths)), Rounding.of(model, length, dtype)
    targets = pair(model, capture, **options)
    for target in targets:
        target.prefill(np.array(prompt_of(length), np.int32))
    error = 0.0
    for width in widths:
        tree = random_tree(rng, width)
        [found], [expected] = (target.read([Reading.of(0, 7, tree)]) for target in targets)
        error = max(error, apart(rounding, found, expected))
        path = random_path(rng, tree)
        for target in targets:
            target.commit(path)
    return max(error, caches_apart(rounding, targets))


def drawn_widths(steps: int) -> list[int]:
    widths: list[int] = np.random.default_rng(steps).choice([0, 1, 2, 5, 20, 40], steps).tolist()
    return widths


TRACED = list(MODELS) if draws_all_cases() else ["gemma"]
"""Models whose passes are traced, which takes seconds: one with layers that slide, and others."""

STEPS: Final = cases(20, of=40)
"""Of a sequence, or of several that share passes; planted errors show within six."""

LENGTHS = (2, 30, 7, 90)
"""Of prompts: within a window and past it."""


def largest_error_of_many(
    model: PreTrainedModel,
    capture: CaptureMaker,
    steps: int,
    *,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> float:
    """Let four sequences share passes, one alone at times, and some read pieces of prompts."""
    rng, rounding = np.random.default_rng(steps), Rounding.of(model, max(LENGTHS), dtype)
    targets = pair(model, capture, **options)
    for target in targets:
        target._is_packing_checked = True
        target.make_places(len(LENGTHS))
        for place, length in enumerate(LENGTHS):
            target.prefill(np.array(prompt_of(length, seed=place), np.int32), place)
    error = 0.0
    for _ in range(steps):
        places = np.flatnonzero(rng.random(len(LENGTHS)) < rng.choice([0.3, 0.8]))
        readings = [drawn(rng, int(place)) for place in places] or [drawn(rng, 2)]
        read = [target.read(readings) for target in targets]
        error = max(error, *(apart(rounding, *each) for each in zip(*read, strict=True)))
        trees = {each.place: each.tree for each in readings if each.tree is not None}
        paths = [(place, random_path(rng, tree)) for place, tree in trees.items()]
        for target in targets:
            target.commit_all(paths)
    return max(error, caches_apart(rounding, targets))


def drawn(rng: np.random.Generator, place: int) -> Reading:
    tokens = rng.integers(4, 40, int(rng.integers(1, 30))).astype(np.int32)
    if rng.random() < 0.2:
        return Reading(place, tokens)
    return Reading.of(place, int(tokens[0]), random_tree(rng, int(rng.integers(0, 20))))


@pytest.mark.seeds
@pytest.mark.parametrize("length", [3, 200])
@pytest.mark.parametrize("name", MODELS)
def test_padded_passes_and_commits_are_those_of_eager_passes(name: str, length: int) -> None:
    assert largest_error(unlimited(name), Uncaptured, drawn_widths(STEPS), length) <= 1


@pytest.mark.seeds
@pytest.mark.parametrize("name", MODELS)
def test_passes_of_many_places_are_those_of_eager_passes(name: str) -> None:
    assert largest_error_of_many(unlimited(name), Uncaptured, STEPS) <= 1


@pytest.mark.seeds
@pytest.mark.parametrize("name", TRACED)
def test_captured_passes_are_eager_ones_and_keep_states(name: str) -> None:
    """Each width twice, so that what was frozen is used again; buffers grow for the widest."""
    states = (0, 2, FINAL)
    assert largest_error(unlimited(name), Traced, (2, 3, 20, 16, 2), 240, states=states) <= 1
    assert largest_error_of_many(unlimited(name), Traced, 3) <= 1


@pytest.mark.parametrize("name", MODELS)
def test_states_are_kept_as_in_eager_passes(name: str) -> None:
    assert largest_error_of_many(unlimited(name), Uncaptured, 8, states=(0, 2, FINAL)) <= 1


def test_attention_of_transformers_gets_dense_masks_and_the_first_place_alone() -> None:
    model = tiny_gemma("eager", torch.float64)
    model.config.max_position_embeddings = 1024
    # That attention's softmax is in single precision whatever the model's.
    single: Any = {"dtype": torch.float32}
    assert largest_error(model, Traced, (20, 16), 40, **single) <= 1
    assert largest_error_of_many(model, Uncaptured, 8, **single) <= 1


def test_half_precision_differs_by_rounding_only() -> None:
    assert largest_error_of_many(tiny_llama(dtype=torch.bfloat16), Uncaptured, 8) <= 1


def test_what_was_traced_is_frozen() -> None:
    tensor, addend = torch.zeros(1), [1]
    run = Traced()(lambda: tensor.add_(addend[0]))
    addend[0] = 100
    before = tensor.clone()
    assert run() == before + 1


OF, CONTEXT, FILL = PassLayout.of, Grid.context, Inputs.fill


def stale_rows_shown(self: Grid, num_keys: int, window: int | None) -> torch.Tensor:
    """Show what earlier passes left behind the context."""
    return CONTEXT(replace(self, pasts=self.pasts + 2), num_keys, window)


def slots_of_a_neighbour(numbers: torch.Tensor, shape: PassShape, capacity: int) -> PassLayout:
    layout = OF(numbers, shape, capacity)
    return replace(layout, slots=(layout.slots + capacity) % (shape.num_places * capacity))


def mask_of_a_neighbour(numbers: torch.Tensor, shape: PassShape, capacity: int) -> PassLayout:
    layout = OF(numbers, shape, capacity)
    return replace(layout, grid=replace(layout.grid, visible=layout.grid.visible.roll(1, 0)))


def lengths_of_a_neighbour(
    self: Inputs, readings: Sequence[Reading], pasts: list[int], *drawings: Any
) -> None:
    FILL(self, readings, pasts[1:] + pasts[:1], *drawings)


def parents_forgotten(
    self: Inputs, readings: Sequence[Reading], pasts: list[int], *drawings: Any
) -> None:
    FILL(self, [Reading(each.place, each.tokens) for each in readings], pasts, *drawings)


@pytest.mark.parametrize(
    ("owner", "name", "planted"),
    [
        (Grid, "context", stale_rows_shown),
        (PassLayout, "of", slots_of_a_neighbour),
        (PassLayout, "of", mask_of_a_neighbour),
        (Inputs, "fill", lengths_of_a_neighbour),
        (Inputs, "fill", parents_forgotten),
    ],
)
def test_a_planted_error_is_caught(
    owner: Any, name: str, planted: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, planted)
    assert largest_error_of_many(unlimited("gemma"), Uncaptured, 6) > SHOWN


def test_a_length_taken_from_the_host_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def put(self: GrowingLayer, frame: Frame, keys: torch.Tensor, values: torch.Tensor) -> Any:
        start, end = self.get_seq_length(), self.get_seq_length() + keys.shape[-2]
        self._key_buffer[..., start:end, :] = keys
        self._value_buffer[..., start:end, :] = values
        shown = slice(frame.num_keys)
        return self._key_buffer[..., shown, :], self._value_buffer[..., shown, :]

    monkeypatch.setattr(GrowingLayer, "put", put)
    assert largest_error(unlimited("llama"), Uncaptured, (5, 6, 4), 20) <= 1
    assert largest_error(unlimited("llama"), Traced, (5, 6, 4), 20) > SHOWN


class Watched(TorchDispatchMode):
    """Notes the operations that make a host wait for its device, or bring values from it."""

    waits = (*READ, "nonzero", "masked_select", "unique", "lift_fresh")

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
    largest_error(unlimited(name), Watching, drawn_widths(10), 20)
    largest_error_of_many(unlimited(name), Watching, 10)
    assert Watching.num_operations > before + 100
    assert caplog.records == []


@pytest.mark.parametrize("infers", [True, False])
def test_waiting_for_the_device_is_noticed(*, infers: bool) -> None:
    with torch.inference_mode(infers), pytest.raises(RuntimeError, match="waits for"):
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


class Failing:
    """Cannot capture, as where a model waits for its device."""

    def __call__(self, function: Callable[[], Output]) -> Callable[[], Output]:
        function()
        raise RuntimeError("operation not permitted when stream is capturing")


def test_where_capturing_fails_passes_run_eagerly_and_a_line_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert largest_error_of_many(unlimited("gemma"), Failing, 8) <= 1
    assert [record.getMessage() for record in caplog.records] == [
        "passes run without captured graphs: operation not permitted when stream is capturing"
    ]


def test_passes_wider_than_any_shape_run_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes_module, "MOST_ROWS", 4)
    Counted.functions.clear()
    assert largest_error(unlimited("gemma"), Counted, drawn_widths(20), 20) <= 1
    assert Counted.functions


def test_measured_budgets_ask_for_no_pass_that_is_too_wide_to_be_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Costs are those of captured passes, and behind the widest of them they leap."""
    for module in (passes_module, target_module):
        monkeypatch.setattr(module, "MOST_ROWS", 32)
    widths, read = list[int](), CapturedPasses.read

    def noted(self: CapturedPasses, readings: Sequence[Reading]) -> list[Read] | None:
        found = read(self, readings)
        if any(each.tree is not None for each in readings):
            widths.append(sum(len(each.tokens) for each in readings))
            assert found is not None
        return found

    monkeypatch.setattr(CapturedPasses, "read", noted)
    rng = np.random.default_rng(0)
    drafter = ScriptedDrafter(lambda _, most: random_tree(rng, most))
    free = MeasuredBudget(CostSurface.flat((1, 32), (1.0, 1.0)))
    decoder = Decoder(Target(tiny_llama(), capture=Uncaptured, verdicts=None), drafter, free)
    requests = [Request(prompt_of(length, seed=length), 25) for length in (70, 5, 200, 3, 17, 30)]
    assert sum(len(tokens) for _, tokens in decoder.generate_many(requests, 4)) == 6 * 25
    assert max(widths) == 32


def test_costs_are_measured_where_they_leap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    Counted.functions.clear()
    target = Target(tiny_llama(), capture=Counted, verdicts=None)
    surface = measure_costs(target, (1, 2, 4, 8), (20, 100), 0.5)
    assert surface.widths == (1, 2, 3, 4, 5, 8)
    assert len(Counted.functions) == 4  # one for each power of two: no buffer grows


def _scale(model: Any) -> None:
    model.model.layers[1].self_attn.scaling *= 2


def _reconfigure(model: Any) -> None:
    model.config.attention_dropout = 0.25


def _move_a_weight(model: Any) -> None:
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.data = weight.data.clone()


def _move_a_buffer(model: Any) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.clone()


@pytest.mark.parametrize("change", [_scale, _reconfigure, _move_a_weight, _move_a_buffer])
def test_what_a_captured_pass_repeats_is_captured_anew_once_it_changes(
    change: Callable[[Any], None],
) -> None:
    model = unlimited("llama")
    counting, fixed = (Target(model, capture=each, verdicts=None) for each in (Counted, Traced))
    tree = random_tree(np.random.default_rng(0), 9)
    for target in (counting, fixed):
        target.prefill(np.array(prompt_of(100), np.int32))
        target.verify(3, tree)
    Counted.functions.clear()
    counting.verify(3, tree)
    assert not Counted.functions
    change(model)
    found = counting.verify(3, tree)
    assert len(Counted.functions) == 1
    assert largest([found], [fixed.verify(3, tree)]) < 1e-4
    counting.verify(3, tree)
    assert len(Counted.functions) == 1


def _foreign(*args: Any, **options: Any) -> Any:
    output, weights = sdpa_attention_forward(*args, **options)
    return output * 0.5, weights


@pytest.mark.parametrize(("dtype", "keeps"), [(torch.bfloat16, True), (torch.float32, False)])
def test_in_half_precision_one_choice_of_tokens_may_round_badly(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, *, keeps: bool
) -> None:
    target = Target(tiny_llama(dtype=dtype), capture=Uncaptured, verdicts=None)
    answers = [True, True, False]  # the two that are read together, and the first captured
    monkeypatch.setattr(
        target_module, "agree", lambda *rows: answers.pop(0) if answers else agree(*rows)
    )
    target.make_places(2)
    assert not answers
    assert (target._captured is not None) is keeps


@pytest.mark.parametrize("capture", [None, Traced])
@pytest.mark.parametrize("kind", ["eager", "foreign"])
def test_attention_may_be_exchanged_within_a_generation(
    kind: str, capture: CaptureMaker | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks of packed and captured passes say nothing to an attention that is not ours."""
    model: Any = unlimited("llama")
    target = Target(model, capture=capture)
    target.make_places(2)
    target.renew()
    rng = np.random.default_rng(0)
    trees = [random_tree(rng, 9), random_tree(rng, 5)]
    readings = [Reading.of(place, 3, tree) for place, tree in enumerate(trees)]
    for place in range(2):
        target.prefill(np.array(prompt_of(40 + place), np.int32), place)
    before = [each.logits for each in target.read(readings)]
    if kind == "eager":
        model.set_attn_implementation("eager")
    else:
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", _foreign)
    found = [each.logits for each in target.read(readings)]
    if kind == "eager":
        assert largest(before, found) < 1e-4
        return
    assert largest(before[:1], found[:1]) > 1e-2
    assert largest(before[1:], found[1:]) > 1e-2


def largest(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


def test_code_for_all_models_that_comes_later_ends_captures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model: Any = unlimited("llama")
    target = Target(model, capture=Traced, verdicts=None)
    target.prefill(np.array(prompt_of(100), np.int32))
    tree = random_tree(np.random.default_rng(0), 9)
    target.verify(3, tree)
    mlp = type(model.model.layers[0].mlp)
    forward = mlp.forward
    calls: list[Any] = []

    def telling(*given: Any) -> Any:
        calls.append(given)
        return forward(*given)

    monkeypatch.setattr(mlp, "forward", telling)
    for _ in range(2):
        target.verify(3, tree)
        assert len(calls) == len(model.model.layers)
        calls.clear()
    monkeypatch.undo()
    target = Target(model, capture=Traced, verdicts=None)
    target.prefill(np.array(prompt_of(100), np.int32))
    target.verify(3, tree)
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: calls.append(_))
    for _ in range(2):
        target.verify(3, tree)
        assert len(calls) > len(model.model.layers)
        calls.clear()
    handle.remove()


def test_graphs_are_for_cuda_and_trees_and_models_as_they_come() -> None:
    assert capture_on(torch.device("cpu")) is None
    assert Target(tiny_llama())._captured is None
    assert Target(tiny_llama(), capture=Uncaptured)._captured is not None
    assert Target(tiny_convolution(), capture=Uncaptured)._captured is None
    patched = tiny_llama()
    patched.forward = functools.partial(type(patched).forward, patched)
    assert Target(patched, capture=Uncaptured)._captured is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", MODELS)
def test_cuda_graphs_compute_what_eager_passes_compute(name: str) -> None:
    model = unlimited(name).to("cuda")  # type: ignore[arg-type]  # wrapped without its types
    make = capture_on(torch.device("cuda"))
    assert make is not None
    assert largest_error(model, make, drawn_widths(40), 3) <= 1
    assert largest_error(model, make, drawn_widths(40), 200) <= 1
    assert largest_error_of_many(model, make, 40) <= 1


SCALE = 32**-0.5


def attended_densely(
    query: torch.Tensor, context: list[torch.Tensor], own: list[torch.Tensor], seen: torch.Tensor
) -> torch.Tensor:
    """Attend to all keys at once by one dense mask, in double precision."""
    keys, values = (torch.cat(each, 2) for each in zip(context, own, strict=True))
    groups = len(query) // len(keys)
    attended = torch.nn.functional.scaled_dot_product_attention(
        query.double().transpose(0, 1),
        keys.double().repeat_interleave(groups, 0).transpose(0, 1),
        values.double().repeat_interleave(groups, 0).transpose(0, 1),
        attn_mask=seen[:, None],
        scale=SCALE,
    )
    return attended.transpose(0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("most_scores", [1 << 25, 3 * 8 * 16 * 50])
@pytest.mark.parametrize(("window", "num_keys"), [(None, 256), (5, 256), (60, 253)])
def test_pieces_of_keys_give_what_one_dense_mask_gives(
    dtype: torch.dtype,
    most_scores: int,
    window: int | None,
    num_keys: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(passes_module, "_MOST_SCORES", most_scores)
    torch.manual_seed(0)
    shape = PassShape(3, 64, 16, num_keys)
    inputs = Inputs(shape, torch.device("cpu"))
    rng = np.random.default_rng(0)
    trees = {0: random_tree(rng, 15), 2: random_tree(rng, 7)}
    inputs.fill([Reading.of(place, 1, tree) for place, tree in trees.items()], [0, 252, 120])
    grid = PassLayout.of(inputs.numbers, shape, 512).grid
    query = torch.randn(8, 3, 16, 32, dtype=dtype)
    context = [torch.randn(2, 3, num_keys, 32, dtype=dtype) for _ in range(2)]
    mask = SplitMask.of(grid, window, num_keys, 512, dtype)
    assert (num_keys + mask.slots.shape[1]) % 8 == 0
    own = [torch.randn(2, 3, mask.slots.shape[1], 32, dtype=dtype) for _ in range(2)]
    found = split_over_keys(query, context, own, mask, SCALE)
    before = grid.context(num_keys, window).expand(-1, 16, -1)
    seen = torch.cat([before, grid.among(window)], 2)
    own = [each[:, :, :16] for each in own]
    expected = attended_densely(query, context, own, seen)
    # Scores of 32 terms, their softmax, and averages: of their values, few weigh much.
    Rounding(dtype, width=32, operations=3).check(found, expected)


def test_rows_that_pad_stand_where_a_model_knows_positions() -> None:
    """The last place is full; the next position may be one that no embedding is there for."""
    shape = PassShape(4, 16, 8, 256)
    inputs = Inputs(shape, torch.device("cpu"))
    tree = random_tree(np.random.default_rng(0), 4)
    inputs.fill([Reading.of(1, 1, tree)], [9, 5, 0, 100])
    layout = PassLayout.of(inputs.numbers, shape, 256)
    assert layout.positions[0] == 5
    assert set(layout.positions[5:].tolist()) == {5}
    assert layout.slots[5:].tolist() == list(range(3 * 256 + 100, 3 * 256 + 111))


def test_captured_passes_that_are_wrong_for_several_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Inputs, "fill", lengths_of_a_neighbour)
    model, prompts = tiny_llama(), [prompt_of(5), prompt_of(9)]
    decoder = Decoder(
        Target(model, capture=Uncaptured, verdicts=None),
        ScriptedDrafter(lambda _, most: random_tree(np.random.default_rng(most), most)),
        FixedBudget(6),
    )
    found: dict[int, list[int]] = {}
    for generation, tokens in decoder.generate_many([Request(each, 8) for each in prompts], 2):
        found.setdefault(generation.number, []).extend(tokens)
    assert [found[0], found[1]] == [plainly(model, prompt, 8) for prompt in prompts]
    [record] = caplog.records
    assert "for several sequences captured graphs give different logits" in record.getMessage()
    assert decoder.target.packs


@pytest.mark.parametrize(
    ("shape", "num_places"), [(PassShape(1, 4, 4, 8), 3), (PassShape(3, 4, 4, 8), 3)]
)
def test_no_key_of_the_context_is_copied(
    shape: PassShape, num_places: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    attended, found = passes_module._attended_to, []

    def noted(runs: Any, queries: torch.Tensor, scale: float) -> Any:
        found.extend(runs[:1])
        return attended(runs, queries, scale)

    monkeypatch.setattr(passes_module, "_attended_to", noted)
    inputs = Inputs(shape, torch.device("cpu"))
    inputs.fill([Reading.of(0, 1, random_tree(np.random.default_rng(0), 3))], [5, 0, 0])
    mask = SplitMask.of(PassLayout.of(inputs.numbers, shape, 16).grid, None, 8, 16, torch.float32)
    query, key = torch.randn(1, 4, 4, 8), torch.randn(1, 2, num_places * 16, 8)
    tree_attention(torch.nn.Module(), query, key, key + 1, mask)
    [run] = found
    assert run.keys.data_ptr() == key.data_ptr()


def test_attention_with_an_unknown_option_is_not_captured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Passes run eagerly, as where capturing fails; there, transformers' attention is asked."""
    split = SplitMask.attend

    def capped(*args: Any, **options: Any) -> Any:
        return split(*args, **options, softcap=50.0)

    monkeypatch.setattr(SplitMask, "attend", capped)
    assert largest_error_of_many(unlimited("llama"), Uncaptured, 4) <= 1
    [record] = caplog.records
    assert "attention with softcap cannot be split over keys" in record.getMessage()


def test_choices_are_those_of_the_logits() -> None:
    """The walk is that of the host, duplicates among the nodes included."""
    for seed in range(20):
        check_choices(np.random.default_rng(seed))


def check_choices(rng: np.random.Generator) -> None:
    trees = [bushy(rng, int(rng.integers(0, 12))) for _ in range(3)]
    readings = [Reading.of(place, 0, tree) for place, tree in zip((0, 1, 3), trees, strict=True)]
    readings.insert(2, Reading(2, np.zeros(3, np.int32)))
    shape = PassShape(4, 64, 16, 256)
    inputs = Inputs(shape, torch.device("cpu"))
    inputs.fill(readings, [3, 0, 9, 100])
    logits = torch.from_numpy(rng.random((64, 9), np.float32))
    logits[:, :2] += 1.0  # so that paths are long
    found = _choice_table(PassLayout.of(inputs.numbers, shape, 512), logits)
    start = 0
    for reading in readings:
        own = logits[start : start + len(reading.tokens)][-reading.num_logits :]
        end = start + len(reading.tokens)
        choices = Choices(ChoiceTable(found), slice(end - reading.num_logits, end), own)
        tree = DraftTree.empty() if reading.tree is None else reading.tree
        path, token = accept_greedy(tree, own, PassContext(0, reading.tokens))
        assert choices.greedy()[0].tolist() == path.tolist()
        assert choices.greedy()[1] == token
        tokens, values = choices.likeliest()
        for row, columns, given in zip(own.numpy(), tokens, values, strict=True):
            assert row[columns].tolist() == given.tolist() == sorted(row, reverse=True)[:8]
        assert not choices.are_of(own + 1)
        start = end


def bushy(rng: np.random.Generator, num_nodes: int) -> DraftTree:
    """Return a tree of few tokens, some of them twice below one parent."""
    parents = [int(rng.integers(max(-1, node - 4), node)) for node in range(num_nodes)]
    return DraftTree(
        rng.integers(0, 2, num_nodes).astype(np.int32),
        np.array(parents, np.int32),
        np.linspace(0.9, 0.1, num_nodes, dtype=np.float32),
        np.zeros(num_nodes, np.uint8),
    )


def test_nothing_is_captured_after_preparing_until_more_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(passes_module, "_FEWEST_KEYS", 16)
    model, rng = tiny_llama(), np.random.default_rng(0)
    target = Target(model, capture=Counted)
    target.prepare(60, 3, 64)
    Counted.functions.clear()
    decoder = Decoder(
        target,
        ScriptedDrafter(lambda _, most: random_tree(rng, int(rng.integers(most)))),
        FixedBudget(10),
    )
    prompts = [prompt_of(length, seed=length) for length in (5, 20, 3, 17, 30)]
    found: dict[int, list[int]] = {}
    for generation, tokens in decoder.generate_many([Request(each, 25) for each in prompts], 3):
        found.setdefault(generation.number, []).extend(tokens)
    assert not Counted.functions
    assert [found[n] for n in range(5)] == [plainly(model, prompt, 25) for prompt in prompts]
    longer = prompt_of(150)
    assert decoded(decoder, longer, 10) == plainly(model, longer, 10)
    assert Counted.functions


def test_preparing_is_for_all_devices_and_models() -> None:
    for make in (tiny_llama, tiny_convolution):
        target = Target(make())
        target.prepare(100, 2)
        decoder = Decoder(target, ScriptedDrafter(lambda *_: DraftTree.empty()), FixedBudget(4))
        assert decoded(decoder, [5, 6, 7], 5) == plainly(make(), [5, 6, 7], 5)


def test_no_room_for_what_is_prepared_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def reserve(_self: object, _length: int) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    target = Target(tiny_llama(), capture=Uncaptured)
    target.prefill(np.array([1, 2], np.int32))
    monkeypatch.setattr(TreeCache, "reserve", reserve)
    with pytest.raises(OutOfMemoryError, match="at 200 tokens"):
        target.prepare(200)
    with pytest.raises(OutOfMemoryError):
        target.verify(3, DraftTree.empty())


@pytest.mark.parametrize(
    ("num_sequences", "choosing", "forks"),
    [(1, "greedy", True), (1, "sampled", False), (4, "greedy", False), (4, "sampled", True)],
)
def test_a_step_asks_the_device_for_little_and_waits_once(
    num_sequences: int, choosing: str, *, forks: bool
) -> None:
    steps = counted_steps(num_sequences, SETTINGS[choosing], forks=forks, num_tokens=12)
    assert len(steps) > 1
    for step in steps:
        assert 0 < step.outside + step.replays <= 8
        assert step.replays >= 1 + (choosing == "sampled")
        assert step.waits == step.downloads == 1


def test_choosing_outside_of_the_pass_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProcessedRule, "selection", lambda *_: None)
    steps = counted_steps(4, SETTINGS["sampled"], num_tokens=8)
    assert max(step.outside for step in steps) > 100
    assert max(step.waits for step in steps) > 1


def sampled_by(
    capture: CaptureMaker | None,
    rules: Sequence[AcceptRule],
    drafter: Drafter | None = None,
    num_tokens: int = 12,
) -> dict[int, list[int]]:
    """Decode a sequence by each rule, three at a time."""
    target = Target(tiny_llama(dtype=torch.float64), capture=capture, verdicts=None)
    decoder = Decoder(target, drafter or ScriptedDrafter(at_random(12)), FixedBudget(12))
    requests = [
        Request(prompt_of(5 + 4 * number, seed=number), num_tokens, accept=rule)
        for number, rule in enumerate(rules)
    ]
    found: dict[int, list[int]] = {}
    for generation, tokens in decoder.generate_many(requests, 3):
        assert generation.error is None
        found.setdefault(generation.number, []).extend(tokens)
    return found


def biased(tree: DraftTree, logits: torch.Tensor, context: PassContext) -> Acceptance:
    changed = logits.clone()
    changed[:, 7:9] += 4.0
    return accept_greedy(tree, changed, context)


DRAWN = [
    accept_rule(SamplingSettings(1.0, seed=1)),
    accept_rule(SamplingSettings(0.7, top_k=20, top_p=0.95, min_p=0.01, seed=2)),
    accept_rule(SamplingSettings(1.3, top_p=0.9, seed=3, coupled=False)),
    accept_rule(SamplingSettings(1.0, seed=4)),
    accept_rule(SamplingSettings(0.7, min_p=0.05, seed=5)),
]
"""Rules whose choices a pass makes; the first and the fourth differ in their seeds alone."""

FOLLOWING = [
    accept_rule(SamplingSettings(1.0, 20, 0.95, 0.01, 1.2, seed=5)),
    accept_rule(SamplingSettings(0.9, seed=6), [MinPLogitsWarper(0.02)]),
    accept_greedy,
    biased,
]
"""Rules that penalise, are shown rows, or change logits: a pass chooses nothing for them, and gives
them no greedy path but their own."""


@functools.cache
def drawn_eagerly() -> dict[int, list[int]]:
    return sampled_by(None, DRAWN)


@pytest.mark.parametrize(
    ("capture", "rules", "num_tokens"),
    [(Uncaptured, [*DRAWN, *FOLLOWING], 12), (Traced, [DRAWN[1], FOLLOWING[0]], 8)],
)
def test_sampling_by_captured_passes_is_that_of_eager_ones(
    capture: CaptureMaker,
    rules: list[AcceptRule],
    num_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_selected, selected_for = 0, Choices.selected_for

    def counted(self: Choices, rule: object) -> torch.Tensor | None:
        nonlocal num_selected
        chosen = selected_for(self, rule)
        num_selected += chosen is not None
        assert (chosen is not None) == (rule in DRAWN)
        return chosen

    monkeypatch.setattr(Choices, "selected_for", counted)
    found = sampled_by(capture, rules, num_tokens=num_tokens)
    assert found == sampled_by(None, rules, num_tokens=num_tokens)
    assert num_selected > num_tokens // 2


@pytest.mark.plugin("decoder.plugins.contenders")
def test_contenders_of_a_benchmark_draw_in_captured_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from decoder.plugins.contenders.contender import DrawnByPrompt  # noqa: PLC0415

    rules = [DrawnByPrompt(rule) for rule in DRAWN]
    expected = sampled_by(None, rules)
    num_eager, of = 0, PathScores.of

    def counted(self: PathScores, rows: slice) -> torch.Tensor:
        nonlocal num_eager
        num_eager += 1
        return of(self, rows)

    monkeypatch.setattr(PathScores, "of", counted)
    assert sampled_by(Uncaptured, rules) == expected
    # First tokens, where all that share the pass read prompts; every other pass draws by itself.
    assert num_eager <= len(rules)


def test_what_one_rule_asked_for_is_not_shown_to_another() -> None:
    asking, other = DRAWN[:2]
    assert isinstance(asking, SelectingRule)
    selection = asking.selection(DraftTree.empty(), PassContext(0, np.zeros(3, np.int32)))
    table, logits = ChoiceTable(torch.full((1, 5), 9, dtype=torch.int32)), torch.zeros(1, 40)
    choices = Choices(table, slice(0, 1), logits, selection)
    chosen = choices.selected_for(asking)
    assert chosen is not None
    assert chosen.tolist() == [9]
    assert choices.selected_for(other) is None


def test_settings_beyond_those_that_are_captured_choose_by_themselves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = drawn_eagerly()
    monkeypatch.setattr(passes_module, "_MOST_DRAWINGS", 2)
    assert sampled_by(Uncaptured, DRAWN) == expected
    assert caplog.records == []


def points_of_a_neighbour(
    self: Inputs, readings: Sequence[Reading], pasts: list[int], *drawings: Any
) -> None:
    FILL(self, readings, pasts, *drawings)
    points = self.numbers[-2 * self._shape.num_rows : -self._shape.num_rows]
    points.copy_(points.roll(1))


def drawings_of_a_neighbour(
    self: Inputs,
    readings: Sequence[Reading],
    pasts: list[int],
    drawings: Any = MappingProxyType({}),
) -> None:
    numbers = list(drawings.values())
    mixed = dict(zip(drawings, numbers[1:] + numbers[:1], strict=True))
    FILL(self, readings, pasts, mixed)


@pytest.mark.parametrize("planted", [points_of_a_neighbour, drawings_of_a_neighbour])
def test_a_draw_that_is_mixed_up_is_caught(
    planted: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = drawn_eagerly()
    monkeypatch.setattr(Inputs, "fill", planted)
    assert sampled_by(Uncaptured, DRAWN) != expected


def test_drawn_drafts_are_judged_by_their_distributions_after_captured_passes() -> None:
    """A pass chooses nothing there: what is accepted depends on what was drawn."""
    rule = accept_rule(SamplingSettings(1.0, seed=1, coupled=False))
    outputs = []
    for capture in (Uncaptured, None):
        guess = functools.partial(drawn_siblings, np.random.default_rng(0))
        outputs.append(sampled_by(capture, [rule] * 4, ScriptedDrafter(guess)))
    assert outputs[0] == outputs[1]
    assert isinstance(rule, SelectingRule)
    context = PassContext(0, np.zeros(3, np.int32))
    assert rule.selection(drawn_siblings(np.random.default_rng(0), [], 6), context) is None
    assert rule.selection(DraftTree.empty(), context) is not None


def drawn_siblings(rng: np.random.Generator, _tokens: list[int], budget: int) -> SampledTree:
    """Return next tokens, drawn one after the other from all that are left."""
    count = min(budget, 6)
    tree = tree_of([(ROOT, token) for token in rng.permutation(VOCABULARY)[:count].tolist()])
    return SampledTree(
        tree.token_ids,
        tree.parents,
        tree.probabilities,
        tree.sources,
        torch.full((1, VOCABULARY), 1 / VOCABULARY),
        np.zeros(count, np.int32),
    )


def test_what_draws_is_captured_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes_module, "_FEWEST_KEYS", 16)
    rule = accept_rule(SamplingSettings(0.8, top_k=30, seed=4))
    assert isinstance(rule, SelectingRule)
    assert rule.drawing is not None
    target = Target(tiny_llama(), capture=Counted, verdicts=None)
    target.prepare(60, 3, 64)
    Counted.functions.clear()
    target.prepare_drawing(rule.drawing, 64)
    assert len(Counted.functions) == 6  # for 2, 4 ... 64 rows
    Counted.functions.clear()
    rng = np.random.default_rng(0)
    drafter = ScriptedDrafter(lambda _, most: random_tree(rng, int(rng.integers(most))))
    decoder = Decoder(target, drafter, FixedBudget(10), rule)
    requests = [Request(prompt_of(length, seed=length), 25) for length in (5, 20, 3, 17, 30)]
    assert sum(len(tokens) for _, tokens in decoder.generate_many(requests, 3)) == 5 * 25
    assert not Counted.functions
    eager = Target(tiny_llama())
    eager.prepare_drawing(rule.drawing)  # nothing is captured there


def tiny_chunked() -> PreTrainedModel:
    """Return a model with a layer of chunks and one of full attention, scaled by positions."""
    torch.manual_seed(0)
    config = Llama4TextConfig(
        **TWO_LAYERS,
        intermediate_size_mlp=64,
        num_local_experts=2,
        head_dim=8,
        attention_chunk_size=8,
        no_rope_layers=[1, 0],
        floor_scale=4,
        attn_scale=2.0,
    )
    return evaluated(Llama4ForCausalLM(config))


def chain(rng: np.random.Generator, num_nodes: int) -> DraftTree:
    return tree_of([(node - 1, int(rng.integers(4, 40))) for node in range(num_nodes)])


def largest_error_of_chains(
    make: Callable[[], PreTrainedModel], capture: CaptureMaker, length: int
) -> float:
    """Verify and commit chains in step with eager passes; return how far logits and caches part.

    In what rounding explains: parts of these models are of single precision in any case.
    """
    rng, model = np.random.default_rng(length), make().double()
    rounding = Rounding.of(model, length, torch.float32)
    targets = pair(model, capture)
    for target in targets:
        target.prefill(np.array(prompt_of(length), np.int32))
    error = 0.0
    for width in (0, 1, 3, 9, 20, 0, 5, 2):
        draft = chain(rng, width)
        [found], [expected] = (target.read([Reading.of(0, 7, draft)]) for target in targets)
        assert found.choices is not None
        assert expected.choices is None
        error = max(error, apart(rounding, found, expected))
        path = np.arange(int(rng.integers(width + 1)))
        for target in targets:
            target.commit(path)
    return max(error, caches_apart(rounding, targets))


@pytest.fixture
def _capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have transformers read no value to make masks, as while a stream of CUDA captures."""
    monkeypatch.setattr(masking_utils, "is_tracing", lambda *_: True)


@pytest.fixture
def _chains_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have models promise chains, whose masks they make themselves."""

    def promised(model: PreTrainedModel) -> Compatibility:
        found = compatibility_of(model)
        unbounded = tuple((kind, None) for kind, _ in found.layers or ())
        return Compatibility(Capability.CHAINS, "", unbounded)

    monkeypatch.setattr("decoder.model.target.compatibility_of", promised)


@pytest.mark.usefixtures("_chains_alone")
@pytest.mark.parametrize("length", [3, 60])
@pytest.mark.parametrize("make", [tiny_chunked, tiny_bloom])
def test_padded_chains_by_masks_of_the_model_are_those_of_eager_passes(
    make: Callable[[], PreTrainedModel], length: int
) -> None:
    """Chunks of eight tokens end on the way."""
    assert largest_error_of_chains(make, Uncaptured, length) <= 1


@pytest.mark.usefixtures("_capturing", "_chains_alone")
@pytest.mark.parametrize(("capture", "length"), [(Traced, 3), (Watching, 60)])
@pytest.mark.parametrize("make", [tiny_chunked, tiny_bloom])
def test_captured_chains_by_masks_of_the_model_are_those_of_eager_passes(
    make: Callable[[], PreTrainedModel], capture: CaptureMaker, length: int
) -> None:
    assert largest_error_of_chains(make, capture, length) <= 1


def length_of_the_host(self: GrowingLayer) -> int:
    return self._lengths[self.place]


@pytest.mark.usefixtures("_capturing", "_chains_alone")
@pytest.mark.parametrize("make", [tiny_chunked, tiny_bloom])
def test_chains_that_know_lengths_from_the_host_run_eagerly(
    make: Callable[[], PreTrainedModel],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(GrowingLayer, "get_seq_length", length_of_the_host)
    assert Target(make(), capture=Traced, verdicts=None)._captured is None
    assert "which give different logits" in caplog.text


def test_chains_that_cannot_be_captured_run_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    """BART makes a tensor as long as the context."""
    model, prompt = tiny_model("bart"), prompt_of(5)
    target = Target(model, capture=Traced)
    assert target.capability is Capability.CHAINS
    assert not target.pads_passes
    assert "passes run without captured graphs" in caplog.text
    expected = plainly(model, prompt, 20)
    drafter = ScriptedDrafter(oracle(prompt + expected))
    assert decoded(Decoder(target, drafter, FixedBudget(8)), prompt, 20) == expected


def test_chains_of_models_that_promised_trees_run_eagerly() -> None:
    """GPT-Neo's window follows slots: behind few tokens, where chains are tried, nothing shows."""
    model = tiny_model("gpt_neo", window_size=256, max_position_embeddings=1024)
    target = Target(model, capture=Uncaptured)
    assert target.capability is Capability.CHAINS
    assert target._captured is None


@pytest.mark.usefixtures("_chains_alone")
@pytest.mark.parametrize("make", [tiny_chunked, tiny_bloom])
def test_generation_by_captured_chains_is_that_of_the_model(
    make: Callable[[], PreTrainedModel],
) -> None:
    model, prompt = evaluated(make()), prompt_of(5)
    expected = plainly(model, prompt, 40)
    rng, truth = np.random.default_rng(0), prompt + expected
    for drafter in (
        ScriptedDrafter(oracle(truth)),
        ScriptedDrafter(lambda _, most: random_tree(rng, most)),
    ):
        Counted.functions.clear()
        target = Target(model, capture=Counted)
        assert target.capability is Capability.CHAINS
        target.prepare(64, 1, 16)
        num_captured = len(Counted.functions)
        assert num_captured > 3
        assert decoded(Decoder(target, drafter, FixedBudget(9)), prompt, 40) == expected
        assert len(Counted.functions) == num_captured
        assert target.pads_passes


@pytest.mark.usefixtures("_chains_alone")
def test_chains_are_padded_within_the_positions_that_a_model_knows() -> None:
    model = evaluated(tiny_chunked())
    limit = model.config.max_position_embeddings = 64
    target = Target(model, capture=Uncaptured, verdicts=None)
    assert target.max_length == limit
    target.prefill(np.array(prompt_of(limit - 4), np.int32))
    rng = np.random.default_rng(0)
    [read] = target.read([Reading.of(0, 7, chain(rng, 3))])
    assert read.choices is not None
    target.commit(np.arange(0))
    [read] = target.read([Reading.of(0, 7, chain(rng, 2))])  # three rows, and one that pads
    assert read.choices is None
    assert read.logits.shape[0] == 3
