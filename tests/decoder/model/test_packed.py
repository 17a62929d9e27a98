"""Passes of many sequences give what each gives alone, and planted errors show."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from decoder.model import packed as packed_module
from decoder.model.cache import TreeCache
from decoder.model.packed import PackedPart, PackedPasses, grouped
from decoder.model.passes import Reading
from decoder.model.target import Target
from retriever.tree import DraftTree
from tests.decoder.decoding import (
    MODELS,
    prompt_of,
    random_tree,
    tiny_convolution,
    tiny_gemma,
    tiny_llama,
    tiny_mamba,
)
from tests.decoder.rounding import SHOWN, Rounding

LENGTHS = (2, 30, 7, 11)
"""Of prompts: within a window and past it."""


def read_at_once(target: Target, readings: Sequence[Reading]) -> list[torch.Tensor]:
    return [read.logits for read in target.read(readings)]


def unchecked(model: PreTrainedModel) -> Target:
    """Return a target that packs without having been compared with single passes."""
    target = Target(model)
    target._is_packing_checked = True
    return target


def begun(target: Target, lengths: Sequence[int] = LENGTHS) -> Target:
    target.make_places(len(lengths))
    for place, length in enumerate(lengths):
        target.prefill(np.array(prompt_of(length, seed=place), np.int32), place)
    return target


def largest_error(model: PreTrainedModel, seed: int = 0, num_steps: int = 6) -> float:
    """Return how far logits of shared passes and of passes alone part, in what rounding explains.

    Sequences grow by accepted paths and by pieces of their prompts, which others read beside.
    """
    rng, rounding = np.random.default_rng(seed), Rounding.of(model, keys=100)
    together, alone = begun(unchecked(model)), begun(unchecked(model))
    assert together.packs
    worst = 0.0
    for _ in range(num_steps):
        places = np.flatnonzero(rng.random(len(LENGTHS)) < 0.8)
        readings = [_drawn(rng, int(place)) for place in places]
        found = read_at_once(together, readings)
        for reading, logits in zip(readings, found, strict=True):
            [(expected, *_)] = alone.read([reading])
            worst = max(worst, rounding.apart(logits, expected))
            if not np.isfinite(worst):
                return worst
            if reading.tree is not None:
                path = _some_path(rng, reading.tree)
                together.commit(path, reading.place)
                alone.commit(path, reading.place)
    return worst


def _drawn(rng: np.random.Generator, place: int) -> Reading:
    tokens = rng.integers(4, 40, int(rng.integers(1, 13))).astype(np.int32)
    if rng.random() < 0.3:
        return Reading(place, tokens)
    tree = random_tree(rng, int(rng.integers(0, 13)))
    return Reading.of(place, int(tokens[0]), tree)


def _some_path(rng: np.random.Generator, tree: DraftTree) -> Any:
    if not len(tree) or rng.random() < 0.2:
        return np.empty(0, np.int64)
    return np.array(tree.path_to(int(rng.integers(0, len(tree)))), np.int64)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seed", range(3))
def test_every_sequence_reads_as_it_does_alone(name: str, seed: int) -> None:
    assert largest_error(MODELS[name](dtype=torch.float64), seed) <= 1


@pytest.mark.parametrize("call", [0, 10**9])
def test_grouping_changes_nothing(call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_module, "_CALL", call)
    assert largest_error(tiny_gemma(dtype=torch.float64)) <= 1


def test_layers_with_options_of_their_own_attend_by_groups_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """transformers' own function reads these; here it is made to read all."""
    monkeypatch.setattr(packed_module, "refused_options", lambda _: ["sinks"])
    assert largest_error(tiny_gemma(dtype=torch.float64)) <= 1


def test_half_precision_differs_by_rounding_only() -> None:
    assert largest_error(tiny_llama(dtype=torch.bfloat16)) <= 1


ORIGINAL = packed_module._mask


def _mask_of_a_neighbour(group: Sequence[PackedPart], *rest: Any) -> torch.Tensor:
    return ORIGINAL(group, *rest).roll(1, 0)


def _rows_mixed_up(self: PackedPasses, readings: Sequence[Reading]) -> Any:
    read = READ(self, readings)
    return [*read[1:], read[0]]


READ = PackedPasses.read


def _slots_of_a_neighbour(self: PackedPasses, parts: Sequence[PackedPart]) -> torch.Tensor:
    return SLOTS(self, parts).roll(1)


SLOTS = PackedPasses._slots


def _dealt_to_a_neighbour(*arguments: Any) -> packed_module.Dealing:
    dealing = DEAL(*arguments)
    return replace(dealing, taken=dealing.taken.roll(1))


DEAL = packed_module.Dealing.of


@pytest.mark.parametrize(
    ("owner", "name", "planted"),
    [
        (packed_module, "_mask", _mask_of_a_neighbour),
        (PackedPasses, "read", _rows_mixed_up),
        (PackedPasses, "_slots", _slots_of_a_neighbour),
        (packed_module.Dealing, "of", _dealt_to_a_neighbour),
    ],
)
def test_a_planted_error_is_found(
    owner: Any, name: str, planted: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, planted)
    monkeypatch.setattr(packed_module, "_CALL", 10**9)
    assert largest_error(tiny_llama(dtype=torch.float64)) > SHOWN


def test_a_place_freed_too_early_is_found() -> None:
    """What another sequence writes over shows in the next logits."""
    model = tiny_llama(dtype=torch.float64)
    target, alone = begun(Target(model)), begun(Target(model))
    target.prefill(np.array(prompt_of(30, seed=9), np.int32), place=1)
    target._committed[1] = LENGTHS[1]
    reading = Reading.of(1, 5, DraftTree.empty())
    [(found, *_)] = target.read([reading])
    [(expected, *_)] = alone.read([reading])
    assert Rounding.of(model).apart(found, expected) > SHOWN


@pytest.mark.parametrize("make", [tiny_convolution, tiny_mamba])
def test_models_that_do_not_pack_read_one_after_another(make: Any) -> None:
    model = make()
    together, alone = begun(Target(model)), begun(Target(model))
    assert not together.packs
    readings = [Reading.of(place, 5 + place, DraftTree.empty()) for place in (0, 2, 3)]
    for reading, logits in zip(readings, read_at_once(together, readings), strict=True):
        [(expected, *_)] = alone.read([reading])
        torch.testing.assert_close(logits, expected)


def test_eager_attention_of_transformers_is_not_packed() -> None:
    assert not Target(tiny_llama("eager")).packs


def test_places_keep_what_they_hold_when_others_grow_or_come() -> None:
    cache = TreeCache([None])
    layer = cache.growing_layers[0]
    states = torch.randn(1, 2, 10, 4)
    layer.update(states, states + 1)
    cache.make_places(3)
    longer = torch.randn(1, 2, 700, 4)
    cache.at(2)
    layer.update(longer, longer)
    cache.at(0)
    torch.testing.assert_close(layer.held(), (states, states + 1))
    cache.at(2)
    torch.testing.assert_close(layer.held(), (longer, longer))
    assert layer.capacity >= 700


def _part(place: int, past: int, num_tokens: int) -> PackedPart:
    reading = Reading(place, np.zeros(num_tokens, np.int32))
    return PackedPart(reading, reading.rows(past))


def test_like_sequences_attend_together_and_others_alone() -> None:
    alike = [_part(place, 300, 2) for place in range(4)]
    assert list(grouped(alike)) == [alike]
    wide = [*alike[:2], _part(2, 300, 64), alike[3]]
    assert [len(group) for group in grouped(wide)] == [2, 1, 1]
    assert [len(group) for group in grouped(wide, packed_module._LAUNCHES)] == [4]
    assert list(grouped([])) == []


def test_a_model_that_packs_wrongly_reads_for_one_at_a_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(packed_module, "_mask", _mask_of_a_neighbour)
    monkeypatch.setattr(packed_module, "_CALL", 10**9)
    model = tiny_llama()
    together, alone = begun(Target(model)), begun(Target(model))
    assert not together.packs
    assert "LlamaForCausalLM reads one sequence at a time" in caplog.text
    readings = [Reading.of(place, 5 + place, DraftTree.empty()) for place in (0, 2, 3)]
    for reading, logits in zip(readings, read_at_once(together, readings), strict=True):
        [(expected, *_)] = alone.read([reading])
        torch.testing.assert_close(logits, expected)
