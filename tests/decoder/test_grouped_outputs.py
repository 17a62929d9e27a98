"""Sequences of a group save one another passes, and change no output."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from decoder.errors import InvalidPromptError
from decoder.loop import Generation, Request
from decoder.sampling.rule import accept_rule
from decoder.sampling.sampling_settings import SamplingSettings
from retriever.drafter import DEFAULT, SequenceOptions
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.tree import Source
from tests.decoder.decoding import decoder_with, fused, plainly, prompt_of, tiny_llama

NEW_TOKENS = 40
PROMPT = prompt_of(12)


@cache
def double_llama() -> PreTrainedModel:
    return tiny_llama(dtype=torch.float64)


@cache
def truth() -> list[int]:
    return plainly(double_llama(), PROMPT, NEW_TOKENS)


def decoded(drafter: Any, stated: SequenceOptions, **options: Any) -> list[Generation]:
    """Four sequences of one prompt at once, of which two begin later."""
    stated = replace(stated, remember=False)
    short = [Request(PROMPT, 12, stated) for _ in range(2)]
    long = [Request(PROMPT, NEW_TOKENS, stated) for _ in range(4)]
    decoder = decoder_with(double_llama(), drafter, **options)
    done: dict[int, Generation] = {}
    for generation, _ in decoder.generate_many([*long[:2], *short, *long[2:]], 4):
        done[generation.number] = generation
    return [done[number] for number in (0, 1, 4, 5)]


@pytest.mark.parametrize(
    ("make", "ahead"), [(EmbeddedDrafter, 0), (fused, 4)], ids=["embedded", "fused and ahead"]
)
def test_later_samples_of_a_prompt_follow_earlier_ones(make: Any, ahead: int) -> None:
    passes = []
    grouped = SequenceOptions(group="samples")
    for stated in (DEFAULT, grouped, replace(grouped, policy_version=3)):
        generations = decoded(make(), stated, num_ahead=ahead)
        for each in generations:
            assert each.tokens[len(PROMPT) :].tolist() == truth()
            assert ahead or not each.statistics.num_failures
        passes.append(sum(each.statistics.num_passes for each in generations[2:]))
        from_siblings = sum(each.statistics.accepted[Source.SIBLINGS] for each in generations)
        assert (from_siblings > 0) == bool(stated.group)
    if make is EmbeddedDrafter and not ahead:
        assert passes[1] < passes[0]
        assert passes[2] < passes[0]


def test_drawn_outputs_are_those_of_their_seeds() -> None:
    rule = accept_rule(SamplingSettings(temperature=1.0, seed=5))
    alone, grouped = (
        [each.tokens.tolist() for each in decoded(EmbeddedDrafter(), stated, accept=rule)]
        for stated in (DEFAULT, SequenceOptions(group="samples"))
    )
    assert alone == grouped
    assert len({tuple(each) for each in alone}) == len(alone)


@pytest.mark.parametrize(
    "stated",
    [
        SequenceOptions(group="g" * 300),
        SequenceOptions(group="g", policy_version=-1),
        SequenceOptions(group="g", oldest_version=3),
    ],
)
def test_what_is_no_group_is_refused_before_it_is_decoded(stated: SequenceOptions) -> None:
    decoder = decoder_with(tiny_llama(), EmbeddedDrafter())
    with pytest.raises(InvalidPromptError):
        decoder.generate(PROMPT, options=stated)
