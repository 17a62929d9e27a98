"""Two processes share a model's passes, and only the first one decides what is read."""

import os
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from queue import Empty
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedModel

from decoder.budget.budget import FixedBudget
from decoder.budget.cost_store import CostStore, known_costs
from decoder.budget.costs import CostSurface, measure_costs
from decoder.drafters.following import NoDrafter
from decoder.engines.transformers.assisted import assisted_generate
from decoder.engines.transformers.custom_generate import Foredraft
from decoder.errors import (
    DecoderError,
    InvalidPromptError,
    SharedPassError,
    UnsupportedModelError,
)
from decoder.loop import Decoder, Request
from decoder.model.compatibility import Capability
from decoder.model.ranks import ranks_of
from decoder.model.target import Target
from decoder.sampling.rule import accept_rule
from decoder.sampling.sampling_settings import SamplingSettings
from retriever.tree import DraftTree
from tests.decoder.decoding import (
    ScriptedDrafter,
    decoded,
    decoder_with,
    oracle_tree,
    plainly,
    prompt_of,
    tiny_llama,
)

NUM_TOKENS = 24
PROMPTS = [prompt_of(length, seed=length) for length in (3, 9, 5, 14, 7, 11)]
PATIENCE_S = 150.0


def sampling() -> Any:
    return accept_rule(SamplingSettings(temperature=1.3, seed=5))


def drafting(rank: int) -> ScriptedDrafter:
    """Draft bushes that only the first process knows; the other one's would be of another size."""
    rng = np.random.default_rng(rank)
    truths = {tuple(prompt): plainly(tiny_llama(), prompt, NUM_TOKENS) for prompt in PROMPTS}

    def guess(tokens: list[int], budget: int) -> DraftTree:
        for prompt, truth in truths.items():
            if tuple(tokens[: len(prompt)]) == prompt:
                rest = truth[len(tokens) - len(prompt) :]
                return oracle_tree(rng, rest, min(budget, int(rng.integers(1, 12)) + 3 * rank))
        return DraftTree.empty()

    return ScriptedDrafter(guess)
