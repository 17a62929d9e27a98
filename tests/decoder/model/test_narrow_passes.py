"""Attention by groups of heads, and the functions that stand in for others during a pass."""

import copy
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from decoder.model import attention
from decoder.model.attention import tree_attention
from decoder.model.target import Target
from tests.decoder.decoding import MODELS, plainly, prompt_of, tiny_llama
from tests.decoder.model.test_target import FORKED, largest_error
from tests.decoder.rounding import SHOWN, Rounding


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


@pytest.fixture(params=[False, True], ids=["any processor", "one for bfloat16"])
def _both_processors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: request.param)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5, 16, 33])
@pytest.mark.usefixtures("_both_processors")
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.usefixtures("_both_processors")
def test_scores_beyond_half_precision_stay_numbers(dtype: torch.dtype) -> None:
    """Products of 96 to 73,728 before they are scaled, beyond the 65,504 of float16."""
    torch.manual_seed(0)
    module = nn.Module()
    module.num_key_value_groups = 3  # type: ignore[assignment]  # as transformers sets it
    query = torch.full((1, 9, 33, 16), 48.0, dtype=dtype) * torch.rand(33, 1).to(dtype)
    key = torch.full((1, 3, 300, 16), 96.0, dtype=dtype) * torch.rand(300, 1).to(dtype)
    value = torch.randn(1, 3, 300, 16, dtype=dtype)
    mask = torch.zeros(1, 1, 33, 300, dtype=dtype)
    output, _ = tree_attention(module, query, key, value, mask, scaling=0.25)
    expected, _ = sdpa_attention_forward(module, query, key, value, mask, 0.0, 0.25)
    assert output.isfinite().all()
    wide = query.double(), key.double(), value.double(), mask.double()
    exact, _ = sdpa_attention_forward(module, *wide, 0.0, 0.25)
    theirs = float((expected.double() - exact).norm())
    assert float((output.double() - exact).norm()) <= 4 * theirs + 1e-2


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
    functions = functional.linear, ALL_ATTENTION_FUNCTIONS["sdpa"]
    state = copy.deepcopy(model.state_dict())
    target = Target(model)
    before = len(calls)
    target.prefill(np.array(prompt_of(9), np.int32))
    assert len(calls) == before + 1  # hooks are called in passes
    assert [type(module) for module in model.modules()] == classes
    assert (functional.linear, ALL_ATTENTION_FUNCTIONS["sdpa"]) == functions
    assert model.config._attn_implementation == "sdpa"
    assert model.training
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    assert plainly(model, prompt_of(9), 5) == expected


def attended_in(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how many layers attend by groups in a pass over a tree."""
    calls = []

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(args)
        return tree_attention(*args, **options)

    target = Target(model, verdicts=None)
    target.prefill(np.array(prompt_of(9), np.int32))
    monkeypatch.setattr("decoder.model.user_model.tree_attention", counted)
    target.verify(5, FORKED)
    return len(calls)


def test_trees_are_attended_to_by_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = tiny_llama().config.num_hidden_layers
    assert attended_in(tiny_llama(), monkeypatch) == layers
    assert attended_in(tiny_llama("eager"), monkeypatch) == 0


def test_an_attention_of_the_users_own_is_left_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def own(*args: Any, **options: Any) -> Any:
        calls.append(args)
        return sdpa_attention_forward(*args, **options)

    model, prompt = tiny_llama(), np.array(prompt_of(9), np.int32)
    expected = Target(model).prefill(prompt)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", own)
    target = Target(model)
    calls.clear()
    Rounding.of(model).check(target.prefill(prompt), expected)
    assert len(calls) == model.config.num_hidden_layers
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is own


def test_threads_without_a_pass_compute_as_ever() -> None:
    model = tiny_llama()
    inputs = torch.tensor([prompt_of(9)])
    with torch.no_grad():
        expected = model(inputs).logits
    found: list[torch.Tensor] = []

    def elsewhere(*_: Any) -> None:
        def compute() -> None:
            with torch.no_grad():
                found.append(model(inputs).logits)

        if not found and threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=compute)
            thread.start()
            thread.join()

    target = Target(model, pack={torch.float32: 1}, states=[1])
    target.prefill(np.array(prompt_of(9), np.int32))
    handle = model.model.layers[0].register_forward_pre_hook(elsewhere)
    target.verify(5, FORKED)
    handle.remove()
    assert torch.equal(found[0], expected)
    assert target.states[1].shape[0] == 1 + len(FORKED)  # and not those of the other thread
