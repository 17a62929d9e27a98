"""A draft model's trees are its most probable continuations, whatever its cache went through."""

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from decoder.drafters.model_drafter import DraftingOptions, ModelDrafter
from tests.decoder.decoding import (
    MODELS,
    VOCABULARY,
    WINDOW,
    decoder_with,
    prompt_of,
    tiny_llama,
)
from tests.decoder.drafters.model_drafter.draft_models import (
    FREE,
    all_prefixes,
    distribution,
    drafted,
    llama,
    most_probable_prefixes,
    next_draft,
    path_probability,
    paths,
    unbounded,
)
from tests.decoder.rounding import Rounding


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_probabilities_are_those_of_paths_without_a_cache(name: str, attention: str) -> None:
    model = MODELS[name](attention, torch.float64)
    # Eager attention's softmax is single precision, and so are the products of a tree's shares.
    inner = Rounding.of(model, dtype=torch.float32 if attention == "eager" else torch.float64)
    for length in (1, WINDOW - 2, 3 * WINDOW):
        prompt = prompt_of(length)
        scale = float(np.abs(np.log(distribution(model, prompt))).max())
        tree = drafted(ModelDrafter(model, DraftingOptions(costs=FREE)), prompt, 24)
        assert len(tree) == 24
        assert tree.depths().max() > 2
        for path, probability in paths(tree).items():
            products = Rounding(torch.float32, width=1, operations=len(path))
            apart = products.tolerance(1.0) + len(path) * inner.tolerance(scale)
            assert probability == pytest.approx(path_probability(model, prompt, path), rel=apart)


@pytest.mark.parametrize("width", [1, 4])
def test_nodes_are_the_most_probable_prefixes(width: int) -> None:
    for seed in range(4):
        model, prompt = llama(seed, layers=2), prompt_of(7, seed)
        expected = most_probable_prefixes(model, prompt, 20)
        found = paths(drafted(ModelDrafter(model, unbounded(width)), prompt, 20))
        assert found.keys() == expected.keys()


def test_no_continuation_left_out_is_more_probable() -> None:
    model, prompt, vocabulary = llama(1, vocabulary=4, layers=1), [1, 3, 2], 4
    everything = all_prefixes(model, prompt, vocabulary, 6)
    found = paths(drafted(ModelDrafter(model, unbounded(1)), prompt, 14))
    assert max(map(len, found)) < 6
    best = sorted(everything, key=everything.__getitem__, reverse=True)[:14]
    assert set(found) == set(best)


def test_improbable_nodes_are_left_out() -> None:
    model, prompt = llama(), prompt_of(9)
    drafter = ModelDrafter(model, unbounded())
    everything, probable = (paths(drafted(drafter, prompt, 30, least)) for least in (0.0, 0.05))
    assert probable == {path: p for path, p in everything.items() if p >= 0.05}
    assert 0 < len(probable) < len(everything)


def steps_of_a_sequence(
    rng: np.random.Generator, drafter: ModelDrafter, model: PreTrainedModel
) -> None:
    """Commit all, a part or none of a draft and then some, and compare with a fresh drafter."""
    tokens = prompt_of(6)
    drafter.open("long", np.array(tokens, np.int32))
    new: list[int] = []
    for _ in range(12):
        tree = next_draft(drafter, "long", new, len(tokens), 16)
        fresh = drafted(ModelDrafter(model, DraftingOptions(costs=FREE)), tokens, 16)
        # A drafter that learns corrects probabilities; the tree itself stays the same.
        assert list(paths(tree)) == list(paths(fresh))
        accepted = list(paths(tree))[int(rng.integers(len(tree)))]
        accepted = accepted[: int(rng.integers(len(accepted) + 1))]
        jump = rng.integers(VOCABULARY, size=1 if rng.random() < 0.7 else 9).tolist()
        new = [*accepted, *jump]
        tokens = [*tokens, *new]


@pytest.mark.parametrize("name", MODELS)
def test_cache_keeps_step_with_whatever_is_committed(name: str) -> None:
    model = MODELS[name]("sdpa", torch.float64)
    drafter = ModelDrafter(model, DraftingOptions(costs=FREE))
    steps_of_a_sequence(np.random.default_rng(3), drafter, model)


def test_what_came_true_is_not_read_again() -> None:
    model, prompt = llama(), prompt_of(10)
    drafter = ModelDrafter(model, DraftingOptions(costs=FREE))
    widths: list[int] = []
    model.register_forward_pre_hook(
        lambda _module, _args, given: widths.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    drafter.open("a", np.array(prompt, np.int32))
    tree = next_draft(drafter, "a", [], 10, 8)
    longest = max(paths(tree), key=len)
    widths.clear()
    next_draft(drafter, "a", [*longest[:-1], 3], 10 + len(longest), 8)
    assert widths[0] == 1


def test_sessions_do_not_mix_even_where_caches_are_few() -> None:
    model = llama()
    drafter = ModelDrafter(model, DraftingOptions(costs=FREE, max_caches=2))
    prompts = {f"s{seed}": prompt_of(5 + seed, seed) for seed in range(3)}
    for name, prompt in prompts.items():
        drafter.open(name, np.array(prompt, np.int32))
    for step in range(3):
        for name, prompt in prompts.items():
            new = [step] if step else []
            prompt.extend(new)
            tree = next_draft(drafter, name, new, len(prompt), 8)
            fresh = drafted(ModelDrafter(model, DraftingOptions(costs=FREE)), prompt, 8)
            assert list(paths(tree)) == list(paths(fresh))


def test_target_as_its_own_draft_model_is_nearly_always_right() -> None:
    target = tiny_llama()
    prompt = prompt_of(12)
    drafter = ModelDrafter(target, DraftingOptions(costs=FREE, max_passes=6))
    generation = decoder_with(target, drafter).generate(prompt, 120)
    assert sum(map(len, generation)) == 120
    assert generation.statistics.tokens_per_pass > 4
