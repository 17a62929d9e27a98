"""A model with a recurrent state in a real vLLM: wrong with a naive proposer, right with ours.

The model is a tiny Qwen3-Next with random weights: gated delta nets beside attention. vLLM's
kernels for CPUs take bfloat16 alone for it, where another order of additions decides between tokens
that are about as likely: what is generated is compared with the model's own logits.
"""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-engine-vllm")

import torch
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from indexer.tokenizer import load_tokenizer
from tests.decoder.plugins.vllm.vllm_jobs import run
from tests.indexer.engines.corpora import save_byte_tokenizer

NEAR = 0.5
"""Of logits: what bfloat16 chooses lies within 0.1 of the best one, a wrong token 5 below it."""
NUM_TOKENS = 40
PROMPTS = [[7 * at % 240 + 2 for at in range(first, first + 12 + first)] for first in range(1, 5)]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    load_tokenizer(str(save_byte_tokenizer(folder / "bytes"))).save_pretrained(folder)
    torch.manual_seed(0)
    model = Qwen3NextForCausalLM(
        Qwen3NextConfig(
            vocab_size=320,
            hidden_size=128,
            intermediate_size=128,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            num_experts=4,
            num_experts_per_tok=2,
            mlp_only_layers=[0, 1, 2],
            layer_types=["linear_attention", "full_attention"] * 2,
        )
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2 and "conv" not in name:  # else all logits are alike
                weight.normal_(0, 0.12)
    model.save_pretrained(folder)
    return folder


def decoded(hybrid: Path, folder: Path, **more: Any) -> Any:
    return run(
        folder,
        {
            "model": str(hybrid),
            "prompts": PROMPTS,
            "max_tokens": NUM_TOKENS,
            "dtype": "bfloat16",
            "enable_prefix_caching": False,
            "num_speculative_tokens": 4,
        },
        **more,
    )


def num_wrong(hybrid: Path, outputs: list[Any]) -> list[int]:
    """Return how many tokens of each output are none that the model would have chosen."""
    model = Qwen3NextForCausalLM.from_pretrained(hybrid, dtype=torch.float32)
    wrong = []
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        row = torch.tensor([prompt + output["tokens"]])
        with torch.no_grad():
            logits = model(row).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, row[0, len(prompt) :, None])[:, 0]
        wrong.append(int((logits.max(dim=-1).values - chosen > NEAR).sum()))
    return wrong


def test_without_the_guard_outputs_are_wrong_even_if_nothing_is_proposed(
    hybrid: Path, tmp_path: Path
) -> None:
    done = decoded(hybrid, tmp_path, proposer="tests.decoder.plugins.vllm.engine.NeverProposes")
    assert min(num_wrong(hybrid, done["alone"])) > NUM_TOKENS / 2


def test_with_the_guard_vllm_does_not_start(hybrid: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="the model has a recurrent state") as raised:
        decoded(hybrid, tmp_path, watch=True)  # in one process, so that the error comes last
    assert "leave out speculative_config, or set always_propose" in str(raised.value)


def test_with_proposals_of_one_length_outputs_are_right(hybrid: Path, tmp_path: Path) -> None:
    done = decoded(hybrid, tmp_path, settings={"always_propose": True}, together=True)
    assert num_wrong(hybrid, done["alone"]) == [0] * len(PROMPTS)
    ends = [done["together"][str(number)] for number in range(len(PROMPTS))]
    assert all(len(end["tokens"]) >= NUM_TOKENS - 10 for end in ends)
    assert done["counts"]["vllm:spec_decode_num_accepted_tokens"] > 0, json.dumps(done["counts"])
