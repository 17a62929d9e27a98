from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel
from transformers.masking_utils import causal_mask_function

from decoder.model.attention import tree_mask
from decoder.model.cache import GrowingLayer, TreeCache
from decoder.model.passes import CachedPasses, within_depth
from decoder.model.target import Target
from decoder.model.tree_rows import TreeRows
from retriever.tree import ROOT, DraftTree
from tests.decoder.decoding import MODELS, VOCABULARY, prompt_of, random_tree, tree_of
from tests.decoder.rounding import SHOWN, Rounding

FORKED = tree_of([(ROOT, 5), (ROOT, 6), (0, 7), (1, 8), (0, 9), (2, 10), (3, 10), (5, 11)])


def plain_logits(model: PreTrainedModel, texts: list[list[int]]) -> torch.Tensor:
    """Return the logits behind each text, from plain passes: texts of one length share one."""
    found: dict[int, torch.Tensor] = {}
    with torch.inference_mode():
        for length in {len(text) for text in texts}:
            numbers = [number for number, text in enumerate(texts) if len(text) == length]
            logits = model(torch.tensor([texts[number] for number in numbers])).logits[:, -1]
            found |= dict(zip(numbers, logits, strict=True))
    return torch.stack([found[number] for number in range(len(texts))])


def layers_of(target: Target) -> list[GrowingLayer]:
    passes = target._places.at(0)
    assert isinstance(passes, CachedPasses)
    assert isinstance(passes.cache, TreeCache)
    return passes.cache.growing_layers


def largest_error(
    model: PreTrainedModel, prompt: list[int], tree: DraftTree, dtype: torch.dtype | None = None
) -> float:
    """Return how far logits of a tree pass and of plain passes part: 1 is what rounding explains.

    `dtype` is the coarsest precision, if not the model's.
    """
    target = Target(model, verdicts=None)  # planted errors are to be seen here
    target.prefill(np.array(prompt[:-1], np.int32))
    logits = target.verify(prompt[-1], tree)
    paths = [[], *(tree.token_ids[tree.path_to(node)].tolist() for node in range(len(tree)))]
    expected = plain_logits(model, [prompt + path for path in paths])
    return Rounding.of(model, len(prompt), dtype).apart(logits, expected)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("length", [2, 7, 20])
def test_every_node_sees_its_path_and_nothing_else(name: str, attention: str, length: int) -> None:
    rng = np.random.default_rng(length)
    # Eager attention's softmax is single precision.
    exact = torch.float64 if attention == "sdpa" else torch.float32
    for dtype, coarsest in ((torch.float64, exact), (torch.float32, torch.float32)):
        model = MODELS[name](attention, dtype)
        for tree in (FORKED, random_tree(rng, 20), DraftTree.empty()):
            assert largest_error(model, prompt_of(length), tree, coarsest) <= 1


OF = TreeRows.of


def with_siblings_visible(parents: Sequence[int], past: int) -> TreeRows:
    return replace(OF(parents, past), visible=np.tri(len(parents), dtype=np.bool_))


def positions_by_slot(parents: Sequence[int], past: int) -> TreeRows:
    return replace(OF(parents, past), depths=np.arange(len(parents)))


@pytest.mark.parametrize(
    ("name", "planted"),
    [
        ("llama", with_siblings_visible),
        ("gemma", with_siblings_visible),
        ("llama", positions_by_slot),
        ("gemma", positions_by_slot),
    ],
)
def test_planted_mask_error_is_caught(
    name: str, planted: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TreeRows, "of", planted)
    assert largest_error(MODELS[name](dtype=torch.float64), prompt_of(12), FORKED) > SHOWN


def test_a_mask_that_leaves_out_the_window_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_window(rows: TreeRows, _: object, **options: Any) -> torch.Tensor | None:
        return tree_mask(rows, **{**options, "mask_function": causal_mask_function})

    monkeypatch.setattr("decoder.model.user_model.tree_mask", without_window)
    assert largest_error(MODELS["gemma"](dtype=torch.float64), prompt_of(12), FORKED) > SHOWN


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("path", [[], [0], [0, 2], [0, 2, 5, 7], [1, 3, 6], [0, 4]])
def test_commit_leaves_the_cache_as_if_fed_plainly(name: str, path: list[int]) -> None:
    model = MODELS[name](dtype=torch.float64)
    prompt = prompt_of(20)
    target, reference = Target(model), Target(model)
    target.prefill(np.array(prompt[:-1], np.int32))
    target.verify(prompt[-1], FORKED)
    target.commit(np.array(path, np.int64))
    reference.prefill(np.array(prompt + FORKED.token_ids[path].tolist(), np.int32))
    for layer, expected in zip(layers_of(target), layers_of(reference), strict=True):
        for held, plain in zip(layer.held(), expected.held(), strict=True):
            Rounding.of(model).check(held, plain)
        assert layer.get_seq_length() == len(prompt) + len(path)


def test_verifying_again_forgets_what_was_not_committed() -> None:
    model = MODELS["gemma"](dtype=torch.float64)
    target = Target(model)
    target.prefill(np.array(prompt_of(12), np.int32))
    first = target.verify(5, FORKED)
    target.verify(7, FORKED.prefix(3))
    Rounding.of(model).check(target.verify(5, FORKED), first)


def test_cache_outgrows_its_first_buffer() -> None:
    model = MODELS["llama"](dtype=torch.float64)
    model.config.max_position_embeddings = 1024
    assert largest_error(model, prompt_of(600), FORKED) <= 1


def test_prefill_forgets_the_sequence_before() -> None:
    model = MODELS["llama"](dtype=torch.float64)
    target, prompt = Target(model), np.array(prompt_of(9), np.int32)
    first = target.prefill(prompt)
    target.verify(5, FORKED)
    target.commit(np.array([1, 3]))
    Rounding.of(model).check(target.prefill(prompt), first)
    assert first.shape == (1, VOCABULARY)


def test_nodes_beyond_a_depth_are_left_out() -> None:
    rng = np.random.default_rng(0)
    for max_depth in (0, 1, 2, 5, 99):
        tree = random_tree(rng, 30)
        cut = within_depth(tree, max_depth)
        DraftTree.checked(cut.token_ids, cut.parents, cut.probabilities, cut.sources)
        kept = [node for node in range(30) if len(tree.path_to(node)) <= max_depth]
        paths = [cut.token_ids[cut.path_to(node)].tolist() for node in range(len(cut))]
        assert paths == [tree.token_ids[tree.path_to(node)].tolist() for node in kept]
