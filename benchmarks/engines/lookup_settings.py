"""The search for the best settings of transformers' prompt lookup, without running a model."""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

Lookup = tuple[int, int]
"""Settings of prompt lookup: number of tokens that it proposes, and its longest n-gram."""


def tokens_per_step(
    lookups: Sequence[Lookup], prompts: Sequence[list[int]], outputs: Sequence[list[int]]
) -> dict[Lookup, float]:
    """Return the tokens per step of each setting on recorded outputs.

    Args:
        lookups: the settings.
        prompts: token ids of the prompts.
        outputs: token ids of the greedy outputs, which no setting changes.
    """
    num_tokens = sum(map(len, outputs))
    pairs = list(zip(prompts, outputs, strict=True))
    return {
        lookup: num_tokens / sum(num_lookup_steps(lookup, *pair) for pair in pairs)
        for lookup in lookups
    }


def num_lookup_steps(lookup: Lookup, prompt: list[int], output: list[int]) -> int:
    """Return the number of steps of prompt lookup for an output, by replaying transformers' code.

    Args:
        lookup: number of tokens that it proposes, and its longest n-gram.
        prompt: token ids of the prompt.
        output: token ids of the output.
    """
    tokens, end, steps = [*prompt], len(prompt) + len(output), 0
    finder = PromptLookupCandidateGenerator(None, *lookup, max_length=end)
    truth = [*prompt, *output]
    while len(tokens) < end:
        ids: Any = torch.tensor([tokens])
        proposed = finder.get_candidates(ids)[0][0, len(tokens) :].tolist()
        pairs = zip(proposed, truth[len(tokens) :], strict=False)
        num_right = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        tokens = truth[: len(tokens) + num_right + 1]
        steps += 1
    return steps
