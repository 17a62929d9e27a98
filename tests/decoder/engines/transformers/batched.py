"""Calls of `model.generate` with several prompts."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from decoder.budget.budget import FixedBudget
from decoder.engines.transformers.custom_generate import Foredraft
from tests.decoder.decoding import prompt_of

NEW_TOKENS = 12
PROMPTS = [prompt_of(length, seed=length) for length in (3, 12, 1, 7)]
PAD = 0


def padded(prompts: Sequence[list[int]], pad: int = PAD) -> dict[str, torch.Tensor]:
    """Return the arguments for a batch that is padded on the left."""
    width = max(map(len, prompts))
    return {
        "input_ids": torch.tensor([[pad] * (width - len(p)) + p for p in prompts]),
        "attention_mask": torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts]),
    }


def generated(model: PreTrainedModel, prompts: Sequence[list[int]], **options: Any) -> Any:
    """Generate for a batch."""
    generate: Any = model.generate
    length = {} if "max_length" in options else {"max_new_tokens": NEW_TOKENS}
    return generate(**padded(prompts), **{"pad_token_id": PAD, **length, **options})


def foredraft(model: PreTrainedModel, drafter: Any, **options: Any) -> Foredraft:
    return Foredraft(model, drafter, budget=FixedBudget(12), **options)
