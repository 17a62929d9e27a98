"""A model whose layers lie on several devices is decoded as on one.

The other device is a stand-in: an operation that mixes devices is an error, as on CUDA.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import nn
from transformers import PreTrainedModel

from decoder.budget.budget import FixedBudget
from decoder.budget.cost_store import key_of
from decoder.drafters.draft_model import DraftModel
from decoder.errors import UnsupportedModelError
from decoder.loop import Decoder, Request
from decoder.model.capability_check import CannotCheckError, find_verdict
from decoder.model.compatibility import Capability
from decoder.model.states import FINAL
from decoder.model.target import Target
from retriever.tree import DraftTree
from tests.decoder.decoding import (
    MODELS,
    ScriptedDrafter,
    decoded,
    oracle_tree,
    plainly,
    prompt_of,
    random_tree,
)
from tests.decoder.rounding import Rounding
from tests.oracles.elsewhere import NAME, Device, elsewhere, sent

FAR = torch.device(NAME)
NEAR = torch.device("cpu")
PROMPTS = [prompt_of(length, seed=length) for length in (5, 12, 3)]
NUM_TOKENS = 6


@pytest.fixture(autouse=True)
def device() -> Iterator[Device]:
    with elsewhere() as device:
        yield device


def send(module: nn.Module) -> None:
    """Have the weights of a module on the other device."""
    for each in module.modules():
        for name, parameter in list(each.named_parameters(recurse=False)):
            each.register_parameter(name, nn.Parameter(sent(parameter.data), requires_grad=False))


def moved(value: Any, device: torch.device) -> Any:
    """Move all tensors of some arguments, as hooks between devices do."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(moved(each, device) for each in value)
    if isinstance(value, dict):
        return {name: moved(each, device) for name, each in value.items()}
    return value


def by_hooks(module: nn.Module, device: torch.device) -> None:
    """Move what a module takes by a hook of torch: the model's own modules are copied."""
    module.register_forward_pre_hook(
        lambda _, args, options: (moved(args, device), moved(options, device)), with_kwargs=True
    )


def by_patches(module: nn.Module, device: torch.device) -> None:
    """Move what a module takes as accelerate does for `device_map`, by replacing `forward`."""
    hook = AlignDevicesHook(skip_keys=["cache", "past_key_values"])
    add_hook_to_module(module, hook)
    hook.execution_device = device


Placed = Callable[[nn.Module, torch.device], None]
WAYS: dict[str, Placed] = {"hooks": by_hooks, "patches": by_patches}


def divided(name: str, place: Placed) -> PreTrainedModel:
    """Return a model whose middle layers are on the other device."""
    model: Any = MODELS[name]()
    layers = model.model.layers
    for number, layer in enumerate(layers):
        is_far = number < len(layers) - 1
        if is_far:
            send(layer)
        place(layer, FAR if is_far else NEAR)
    divided_model: PreTrainedModel = model
    return divided_model


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_the_check_finds_trees(name: str, way: str) -> None:
    model = divided(name, WAYS[way])
    target = Target(model, verdicts=None)
    try:
        verdict = find_verdict(model, Capability.TREES, lambda _: target)
    except CannotCheckError as error:
        pytest.fail(f"the stand-in cannot run the model: {error}")
    assert verdict.capability is Capability.TREES


@pytest.mark.parametrize(("name", "way"), [("gemma", "patches"), ("llama", "hooks")])
def test_paths_that_move_in_the_cache_are_kept(name: str, way: str) -> None:
    rng = np.random.default_rng(0)

    def guess(tokens: list[int], budget: int) -> DraftTree:
        rest = truths[tuple(tokens[:3])][len(tokens) :]
        return oracle_tree(rng, rest, budget)

    truths = {
        tuple(prompt[:3]): prompt + plainly(MODELS[name](), prompt, NUM_TOKENS)
        for prompt in PROMPTS
    }
    target = Target(divided(name, WAYS[way]), verdicts=None)
    decoder = Decoder(target, ScriptedDrafter(guess), FixedBudget(12))
    for prompt in PROMPTS:
        assert prompt + decoded(decoder, prompt, NUM_TOKENS) == truths[tuple(prompt[:3])]


@pytest.mark.parametrize(("name", "way"), [("gemma", "hooks"), ("llama", "patches")])
def test_many_sequences_are_read_together(name: str, way: str) -> None:
    rng = np.random.default_rng(1)
    target = Target(divided(name, WAYS[way]), verdicts=None)
    decoder = Decoder(target, ScriptedDrafter(lambda _, n: random_tree(rng, n)), FixedBudget(20))
    found: dict[int, list[int]] = {}
    requests = [Request(prompt, NUM_TOKENS) for prompt in PROMPTS]
    for generation, tokens in decoder.generate_many(requests, 2):
        found.setdefault(generation.number, []).extend(tokens)
    assert target.packs
    assert found == {
        at: plainly(MODELS[name](), prompt, NUM_TOKENS) for at, prompt in enumerate(PROMPTS)
    }


@pytest.mark.parametrize("way", WAYS)
def test_costs_are_measured_behind_a_pretended_context(way: str) -> None:
    target = Target(divided("llama", WAYS[way]), verdicts=None)
    target.pretend(30)
    assert target.verify(1, random_tree(np.random.default_rng(2), 5)).shape[0] == 6
    assert target.pretend_marked(30, np.arange(3))


def test_states_of_all_layers_come_to_one_device() -> None:
    tree = random_tree(np.random.default_rng(3), 4)
    model = MODELS["llama"]()
    alone, spread = (
        Target(each, states=(0, 1, 2, FINAL), verdicts=None)
        for each in (model, divided("llama", by_hooks))
    )
    for target in (alone, spread):
        target.prefill(np.array(PROMPTS[0], np.int32))
        target.verify(4, tree)
    for number, rows in alone.states.items():
        assert spread.states[number].device == NEAR
        Rounding.of(model).check(spread.states[number], rows)


def test_a_draft_model_on_several_devices_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="on one"):
        DraftModel(divided("llama", by_hooks))


def test_costs_of_a_model_on_several_devices_are_kept_apart() -> None:
    one, spread = (key_of(model) for model in (MODELS["llama"](), divided("llama", by_hooks)))
    assert "devices" not in one
    assert spread["devices"] == ["cpu", NAME]


def test_the_stand_in_notices_a_mixture() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        sent(torch.ones(3)) + torch.ones(3)
    with pytest.raises(RuntimeError, match="same device"):
        sent(torch.ones(1, 3)).index_select(-1, torch.zeros(1, dtype=torch.int64))


def test_passes_over_several_devices_are_not_captured() -> None:
    def capture() -> Any:
        raise AssertionError("captured")

    target = Target(divided("llama", by_hooks), capture=capture, verdicts=None)
    assert target._captured is None


def test_a_model_whose_first_weights_are_nowhere_is_refused() -> None:
    model: Any = MODELS["llama"]()
    with torch.device("meta"):
        model.model.embed_tokens = nn.Embedding(48, 32)
    with pytest.raises(UnsupportedModelError, match="is on the meta device"):
        Target(model)
