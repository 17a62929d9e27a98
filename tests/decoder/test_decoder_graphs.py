"""Passes of fixed shapes: what a captured graph computes, checked without a device for graphs.

`Traced` records the operations of a function, not its Python code, and runs those: whatever a graph
would freeze, a length or a slot taken from the host, is frozen here, too.
"""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import PreTrainedModel

from decoder.budget.budget import FixedBudget
from decoder.loop import Decoder
from decoder.target.graphs import passes as passes_module
from decoder.target.graphs.capture import Capture, CaptureMaker, Uncaptured, capture_on
from decoder.target.graphs.inputs import FixedInputs
from decoder.target.graphs.passes import GraphPasses
from decoder.target.passes import CachedPasses
from decoder.target.target import Target
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
from tests.decoder.test_decoder_target import layers_of


class Traced:
    """Captures by running once and noting down every operation on tensors."""

    num_captured = 0

    def __call__(self, function: Callable[[], Any]) -> Callable[[], Any]:
        type(self).num_captured += 1
        function()
        with torch.no_grad():
            traced: Callable[[], Any] = make_fx(lambda: function())()
        return traced


def unlimited(name: str) -> PreTrainedModel:
    model = MODELS[name](dtype=torch.float64)
    model.config.max_position_embeddings = 1024
    return model


def random_path(rng: np.random.Generator, tree: DraftTree) -> np.ndarray[Any, np.dtype[np.int64]]:
    node = int(rng.integers(-1, len(tree)))
    return tree.path_to(node) if node >= 0 else np.zeros(0, np.int64)


def largest_error(model: PreTrainedModel, capture: CaptureMaker, steps: int, length: int) -> float:
    """Verify and commit in step with eager passes; return how far logits and caches part."""
    rng = np.random.default_rng(steps)
    targets = [Target(model, capture=capture), Target(model)]
    assert [type(target._passes) for target in targets] == [GraphPasses, CachedPasses]
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


@pytest.mark.parametrize("capture", [Uncaptured, Traced])
@pytest.mark.parametrize("name", MODELS)
def test_padded_passes_and_commits_are_those_of_eager_passes(
    name: str, capture: Callable[[], Capture]
) -> None:
    model = unlimited(name)
    assert largest_error(model, capture, 30, 3) < 1e-9
    assert largest_error(model, capture, 40, 200) < 1e-9  # grows past 256 keys on the way
