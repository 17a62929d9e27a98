"""Heads of every published layout compute what their publishers' code computes, at every depth."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from decoder.model.states import FINAL
from decoder.plugins.speculators.speculator import Speculator, load_speculator
from tests.decoder.decoding import prompt_of, tiny_llama
from tests.decoder.plugins.speculators.drafted_sequences import Reading, parts_of, rounding_of
from tests.decoder.plugins.speculators.published_heads import (
    DRAFTED,
    Published,
    eagle3_logits,
    eagle_logits,
    mlp_logits,
    mlp_speculator,
    official_eagle,
    official_eagle3,
    speculators_eagle,
    speculators_eagle3,
)

Reference = Callable[..., torch.Tensor]

# Made, its reference, and the states that it takes of a target of three layers.
LAYOUTS: dict[str, tuple[Published, Reference, Any]] = {
    "EAGLE-3": (official_eagle3(), eagle3_logits, (2, 1, 0)),
    "EAGLE-3 of speculators": (speculators_eagle3(states=(0, 2, 1)), eagle3_logits, (0, 2, 1)),
    "norms": (
        speculators_eagle3(
            norm_before_residual=True, norm_before_fc=True, norm_output=True, states=(1, 2, 0)
        ),
        eagle3_logits,
        (1, 2, 0),
    ),
    "a norm each": (
        speculators_eagle3(fc_norm=True, states=(1, 2)),
        eagle3_logits,
        (1, 2),
    ),
    "Qwen 3": (speculators_eagle3(model_type="qwen3", states=(1, 2, 0)), eagle3_logits, (1, 2, 0)),
    "two layers": (speculators_eagle3(num_layers=2, states=(0, 1, 2)), eagle3_logits, (0, 1, 2)),
    "a window": (
        speculators_eagle3(sliding_window=7, states=(0, 1, 2)),
        eagle3_logits,
        (0, 1, 2),
    ),
    "EAGLE-1": (official_eagle(), eagle_logits, FINAL),
    "EAGLE-1 without bias": (official_eagle(bias=False, embeds=False), eagle_logits, FINAL),
    "EAGLE-1 of two layers": (official_eagle(num_layers=2), eagle_logits, FINAL),
    "EAGLE-1 of speculators": (speculators_eagle(), eagle_logits, FINAL),
    "MLP": (mlp_speculator(), mlp_logits, FINAL),
    "tied MLP": (mlp_speculator(tied=True, scaled=True, depths=4), mlp_logits, FINAL),
}


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> tuple[Published, Reference, Any]:
    return LAYOUTS[request.param]


def loaded(made: Published, folder: Path) -> Speculator:
    return load_speculator(made.write(folder), tiny_llama(layers=3))


def test_logits_are_the_publishers_on_every_path_of_a_tree(
    layout: tuple[Published, Reference, Any], tmp_path: Path
) -> None:
    made, reference, states = layout
    model = tiny_llama(layers=3)
    reading = Reading(loaded(made, tmp_path), model, prompt_of(11))
    for _ in range(3):
        read = reading.draft(8)
        target = parts_of(model, reading.tokens)
        for leaf in {*range(len(read.tree))} - {*read.tree.parents.tolist()}:
            path = read.path_to(leaf)
            chain = read.tree.token_ids[path].tolist()
            expected = reference(made, target, states, reading.tokens, chain)
            for depth, node in enumerate(path, 1):
                rounding = rounding_of(made, model, depth)
                rounding.check(torch.stack([read.root, read.nodes[node]]), expected[[0, depth]])
        reading.verify()


def test_columns_stand_for_the_tokens_of_d2t(tmp_path: Path) -> None:
    speculator = loaded(official_eagle3(), tmp_path)
    assert tuple(speculator.columns.tolist()) == DRAFTED
    assert speculator.max_depth is None
