"""Which settings of transformers' prompt lookup are the best, found without running a model."""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

Lookup = tuple[int, int]
"""Settings: tokens that it proposes, longest n-gram that it looks for."""


def tokens_per_step(
    lookups: Sequence[Lookup], prompts: Sequence[list[int]], outputs: Sequence[list[int]]
) -> dict[Lookup, float]:
    """Return the tokens per step that each setting brings for recorded outputs.

    Args:
        lookups: the settings.
        prompts: token ids.
        outputs: token ids, greedy: no setting changes them.
    """
    num_tokens = sum(map(len, outputs))
    pairs = list(zip(prompts, outputs, strict=True))
    return {
        lookup: num_tokens / sum(num_lookup_steps(lookup, *pair) for pair in pairs)
        for lookup in lookups
    }


def num_lookup_steps(lookup: Lookup, prompt: list[int], output: list[int]) -> int:
    """Return in how many steps prompt lookup makes an output, by replaying transformers' own.

    Args:
        lookup: tokens that it proposes, longest n-gram that it looks for.
        prompt: token ids.
        output: token ids.
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
