"""The copy of a model that verifies: it shares weights, attends by groups and packs weights."""

import copy
import functools
from typing import Any, Final

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from decoder.model import attention
from decoder.model.adapted import LeastWeights, PackedLinear, pack_linears, structural_copy
from decoder.model.attention import TREE_ATTENTION, tree_attention
from decoder.model.target import Target
from retriever.tree import DraftTree
from tests.decoder.decoding import MODELS, plainly, prompt_of, random_tree, tiny_llama
from tests.decoder.model.test_target import FORKED, largest_error
from tests.decoder.rounding import SHOWN, Rounding

ALL_LAYERS: Final = {torch.float32: 1}
"""Packs the layers of a tiny model as well."""


def heads_dealt_out(query: torch.Tensor, key_heads: int) -> torch.Tensor:
    """Fold as if head h belonged to key head h % key heads."""
    batch, heads, rows, size = query.shape
    dealt = query.view(batch, heads // key_heads, key_heads, rows, size).transpose(1, 2)
    return dealt.reshape(batch, key_heads, -1, size)


@pytest.mark.parametrize("name", MODELS)
def test_a_planted_error_in_the_grouping_of_heads_is_caught(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = MODELS[name](dtype=torch.float64), prompt_of(12)
    assert largest_error(model, prompt, FORKED) <= 1
    monkeypatch.setattr(attention, "folded", heads_dealt_out)
    assert largest_error(model, prompt, FORKED) > SHOWN


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5, 16, 33])
def test_attention_by_groups_is_attention(rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    module = nn.Module()
    module.num_key_value_groups = 3  # type: ignore[assignment]  # as transformers sets it
    query = torch.randn(1, 9, rows, 16, dtype=dtype)
    key, value = (torch.randn(1, 3, 300, 16, dtype=dtype) for _ in range(2))
    mask = torch.zeros(1, 1, rows, 300, dtype=dtype)
    mask.masked_fill_(torch.rand(rows, 300) < 0.5, torch.finfo(dtype).min)
    wide = query.double(), key.double(), value.double(), mask.double()
    expected, _ = sdpa_attention_forward(module, *wide, 0.0, 0.3)
    output, _ = tree_attention(module, query, key, value, mask, scaling=0.3)
    # Scores, their softmax, and averages of 300 values.
    Rounding(dtype, width=300, operations=3).check(output, expected)


def test_options_that_change_attention_are_left_to_transformers() -> None:
    query, key, value = (torch.randn(1, 2, 4, 8) for _ in range(3))
    mask, bias = torch.zeros(1, 1, 4, 4), torch.randn(1, 2, 4, 4)
    module = nn.Module()
    biased, _ = tree_attention(module, query, key, value, mask, position_bias=bias)
    expected, _ = sdpa_attention_forward(module, query, key, value, mask, position_bias=bias)
    Rounding(torch.float32, width=8, operations=3).check(biased, expected)
    with pytest.raises(ValueError, match="softcap"):
        tree_attention(module, query, key, value, mask, softcap=30.0)


def test_the_model_itself_stays_as_it_was() -> None:
    model = tiny_llama().train()
    calls: list[str] = []
    model.lm_head.register_forward_hook(lambda *_: calls.append("head"))
    expected = plainly(model, prompt_of(9), 5)
    classes = [type(module) for module in model.modules()]
    state = copy.deepcopy(model.state_dict())
    target = Target(model, pack=ALL_LAYERS)
    before = len(calls)
    target.prefill(np.array(prompt_of(9), np.int32))
    assert len(calls) == before + 1  # hooks go on working in the copy
    assert [type(module) for module in model.modules()] == classes
    assert model.config._attn_implementation == "sdpa"
    assert model.training
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    assert plainly(model, prompt_of(9), 5) == expected


def test_a_copy_shares_every_weight() -> None:
    model = tiny_llama()
    copied = structural_copy(model)
    assert copied is not model
    pairs = zip(model.parameters(), copied.parameters(), strict=True)
    assert all(mine is theirs for mine, theirs in pairs)
    assert copied.config is not model.config
    configs = [vars(part).get("config", copied.config) for part in copied.modules()]
    assert all(config is copied.config for config in configs)


def logits_of(
    model: PreTrainedModel, tree: DraftTree, *, pack: bool | LeastWeights
) -> tuple[torch.Tensor, int]:
    target = Target(model, pack=pack)
    target.prefill(np.array(prompt_of(20), np.int32))
    return target.verify(5, tree), target.packed_bytes


@pytest.mark.parametrize("name", MODELS)
def test_packed_weights_change_nothing_but_rounding(name: str) -> None:
    model = MODELS[name]()
    linear_bytes = sum(
        4 * part.weight.numel() for part in model.modules() if isinstance(part, nn.Linear)
    )
    for width in (0, 1, 20, 60):
        tree = random_tree(np.random.default_rng(width), width)
        packed, num_bytes = logits_of(model, tree, pack=ALL_LAYERS)
        plain, none = logits_of(model, tree, pack=False)
        assert (num_bytes, none) == (linear_bytes, 0)
        Rounding.of(model, keys=21 + width).check(packed, plain)


def test_layers_that_cannot_be_packed_stay_as_they_are() -> None:
    hooked, bare, small, double = (
        nn.Linear(8, 8),
        nn.Linear(8, 8),
        nn.Linear(8, 2),
        nn.Linear(8, 8),
    )
    hooked.register_forward_pre_hook(lambda *_: None)
    part = nn.Sequential(hooked, bare, small, double.double())
    assert pack_linears(part, {torch.float32: 64}) == 4 * 64
    assert [type(layer) for layer in part] == [nn.Linear, PackedLinear, nn.Linear, nn.Linear]
    inputs = torch.randn(3, 5, 8)[:, ::2]
    expected = inputs @ bare.weight.T + bare.bias
    rounding = Rounding(torch.float32, width=8, operations=1)
    rounding.check(bare(inputs), expected)
    rounding.check(bare(inputs[:, :0]), expected[:, :0])


def test_models_that_a_library_patched_run_as_they_are() -> None:
    model = tiny_llama()
    prompt = np.array(prompt_of(9), np.int32)
    expected = Target(model).prefill(prompt)
    layer = model.model.layers[0]
    layer.forward = functools.partial(type(layer).forward, layer)
    target = Target(model)
    assert target._model is model
    Rounding.of(model).check(target.prefill(prompt), expected)


def test_grouped_attention_is_used() -> None:
    target = Target(tiny_llama())
    assert target._model.config._attn_implementation == TREE_ATTENTION
    assert Target(tiny_llama("eager"))._model.config._attn_implementation == "eager"


class CountedProducts(TorchDispatchMode):
    """Counts products with packed weights."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self.count += func.overloadpacket is torch.ops.mkldnn._linear_pointwise
        return func(*args, **(kwargs or {}))


class Attention(nn.Module):
    """Three layers of one input, under the names that transformers gives them."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.q_proj = nn.Linear(8, 12, bias=bias)
        self.k_proj = nn.Linear(8, 4, bias=bias)
        self.v_proj = nn.Linear(8, 4, bias=bias)


@pytest.mark.parametrize("bias", [False, True])
def test_layers_of_one_input_are_multiplied_together(*, bias: bool) -> None:
    part = Attention(bias=bias)
    layers = (part.q_proj, part.k_proj, part.v_proj)
    plain = [copy.deepcopy(layer) for layer in layers]
    rounding = Rounding(torch.float32, width=8, operations=1)
    assert pack_linears(part, ALL_LAYERS) == 4 * (12 + 4 + 4) * 8
    with torch.inference_mode(), CountedProducts() as products:
        inputs = [torch.randn(1, rows, 8) for rows in (1, 3, 3)]
        for states in inputs:
            for layer, expected in zip(layers, plain, strict=True):
                rounding.check(layer(states), expected(states))
        assert products.count == 3
        for number in (2, 0, 1, 0, 2, 1):  # in any order, with inputs that differ
            states = inputs[number]
            rounding.check(layers[number](states), plain[number](states))
