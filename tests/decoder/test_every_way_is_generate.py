"""Whatever drafts, and however sequences are read, the output is that of `model.generate`.

A row is a drafter, with the options it needs; a column is a way to choose and to read. What is
drawn with a seed is compared with the same rule without drafts, one sequence at a time.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    MistralConfig,
    MistralForCausalLM,
    NoRepeatNGramLogitsProcessor,
    PreTrainedModel,
)

from decoder.budget.budget import FixedBudget
from decoder.drafters.asking import StepCosts
from decoder.drafters.draft_model import DraftModel, ModelReader
from decoder.drafters.drawing import DrawnFusion, Draws
from decoder.drafters.following import NoDrafter, states_of
from decoder.drafters.fusion import FusedDrafter
from decoder.drafters.recycling import RecycledLogits
from decoder.loop import Decoder, Request
from decoder.model.target import Target
from decoder.sampling.rule import accept_rule
from decoder.sampling.sampling_settings import SamplingSettings
from decoder.sampling.verification import AcceptRule
from retriever.drafter import Drafter
from retriever.follower import DraftLimits
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.tree import Source
from tests.decoder.decoding import (
    SIZES,
    VOCABULARY,
    WINDOW,
    AheadDrafter,
    Guess,
    ScriptedDrafter,
    at_random,
    by_tokens,
    decoded,
    decoder_ahead,
    evaluated,
    every_token,
    plainly,
    prompt_of,
    tiny_convolution,
    tiny_gemma,
    tiny_llama,
    tiny_mamba,
)
from tests.decoder.drafters.draft_models import alone, llama
from tests.decoder.drafters.scripted_readers import ScriptedReader

NEW_TOKENS = 9
PROMPTS = [prompt_of(length, seed=length) for length in (3, 40, 1, 17)]
"""Within the window of a model that slides, and past it; one more than are read together."""
MANNERS = ((1, 2), (3, len(PROMPTS)))
"""How many sequences are read at once, and how many there are of them."""
LIMITS = DraftLimits(VOCABULARY, VOCABULARY)
FREE = StepCosts(target_s=1.0, pass_s=0.0)
SURE = 6.0

Texts = list[tuple[list[int], list[int]]]
"""Prompts, and what follows them."""


def right_and_wrong(texts: Texts) -> Guess:
    return by_tokens(texts, 0.7)


def scripted(texts: Texts) -> list[Drafter]:
    return [ScriptedDrafter(each) for each in (right_and_wrong(texts), at_random(), every_token)]


def readers(texts: Texts, *, reads_paths: bool) -> FusedDrafter:
    """One reader knows what comes, the other one counts."""

    def counting(tokens: list[int]) -> dict[int, float]:
        return {(tokens[-1] + 1) % VOCABULARY: SURE, (tokens[-1] + 2) % VOCABULARY: SURE - 0.7}

    def knowing(tokens: list[int]) -> dict[int, float]:
        wholes = [prompt + truth for prompt, truth in texts]
        right = [each for each in wholes if each[: len(tokens)] == tokens and each != tokens]
        return {right[0][len(tokens)]: SURE} if right else counting(tokens)

    made = [
        ScriptedReader(knowing, reads_paths=reads_paths),
        ScriptedReader(counting, columns=range(4, 30), source=Source.UNSPECIFIED),
    ]
    return FusedDrafter(
        scripted(texts), LIMITS, readers=made, recycled=RecycledLogits(1 << 10), costs=FREE
    )


def head(name: str, **options: Any) -> Callable[[Texts, PreTrainedModel, Path], Drafter]:
    """Draft with a head as it was published, of a plugin that may be absent."""

    def drafter(_: Texts, model: PreTrainedModel, folder: Path) -> Drafter:
        from decoder.plugins.speculators.speculator import load_speculator  # noqa: PLC0415
        from tests.decoder.plugins.speculators import published_heads  # noqa: PLC0415

        made = getattr(published_heads, name)(**options)
        reader = load_speculator(made.write(folder / "head"), model)
        return FusedDrafter([NoDrafter()], LIMITS, readers=[reader], costs=FREE)

    return drafter


def kept_of_a_draft_model(_: Texts, model: PreTrainedModel, __: Path) -> Drafter:
    kept = np.array([3, 7, 8, 20, 21, 40, 41, 47], np.int32)
    return alone(model, kept=kept)


ROWS: dict[str, Callable[[Texts, PreTrainedModel, Path], Drafter]] = {
    "no drafts": lambda *_: NoDrafter(),
    "right and wrong trees": lambda texts, *_: ScriptedDrafter(right_and_wrong(texts)),
    "every token": lambda *_: ScriptedDrafter(every_token),
    "trees ahead": lambda texts, *_: AheadDrafter(right_and_wrong(texts)),
    "an index of the process": lambda *_: FusedDrafter(
        [EmbeddedDrafter()], LIMITS, recycled=RecycledLogits(1 << 10)
    ),
    "fused": lambda texts, *_: FusedDrafter(scripted(texts), LIMITS, recycled=RecycledLogits()),
    "readers": lambda texts, *_: readers(texts, reads_paths=False),
    "readers of paths": lambda texts, *_: readers(texts, reads_paths=True),
    "a draft model": lambda *_: alone(llama(4, layers=1)),
    "a trimmed draft model": kept_of_a_draft_model,
    "draft models that read": lambda texts, *_: FusedDrafter(
        scripted(texts),
        LIMITS,
        readers=[ModelReader(DraftModel(llama(seed))) for seed in (1, 2)],
        costs=FREE,
    ),
    "drawn drafts": lambda texts, *_: DrawnFusion(
        scripted(texts)[:1],
        LIMITS,
        readers=[ModelReader(DraftModel(llama()))],
        draws=Draws(seed=2),
        recycled=RecycledLogits(1 << 8),
        costs=FREE,
    ),
}

HEADS = {
    "EAGLE-1": head("official_eagle"),
    "EAGLE-3": head("official_eagle3"),
    "EAGLE-3 of speculators": head("speculators_eagle3", states=(0, 2, 3), norm_output=True),
    "MLP": head("mlp_speculator"),
}

RULES: dict[str, Callable[[], AcceptRule | None]] = {
    "greedy": lambda: None,
    "drawn": lambda: accept_rule(SamplingSettings(1.0, seed=2**64 - 1)),
    "all settings": lambda: accept_rule(
        SamplingSettings(0.9, 20, 0.95, 0.01, 1.2, 0.3, 0.2, seed=8),
        [NoRepeatNGramLogitsProcessor(2)],
    ),
}
"""How tokens are chosen; see `accept_rule`."""


def mistral() -> PreTrainedModel:
    """Return a model whose every layer slides."""
    torch.manual_seed(4)
    config = MistralConfig(
        **SIZES,
        vocab_size=VOCABULARY,
        num_hidden_layers=2,
        sliding_window=WINDOW,
        eos_token_id=None,
    )
    return evaluated(MistralForCausalLM(config))


MODELS: dict[str, Callable[[torch.dtype], PreTrainedModel]] = {
    "llama": lambda dtype: tiny_llama(dtype=dtype, layers=3),
    "llama, eager": lambda dtype: tiny_llama("eager", dtype),
    "gemma": lambda dtype: tiny_gemma(dtype=dtype),
    "gemma, eager": lambda dtype: tiny_gemma("eager", dtype),
    "mistral": lambda _: mistral(),
    "convolution": lambda _: tiny_convolution(),
    "mamba": lambda _: tiny_mamba(),
}


class Uncaptured:
    """Captures nothing: passes have the fixed shapes of captured ones, on every device."""

    def __call__(self, function: Any) -> Any:
        return function


@cache
def model_of(name: str, rule: str) -> PreTrainedModel:
    """Return a model; what is drawn has to be the same to the last bit, see `rounding`."""
    return MODELS[name](torch.float32 if rule == "greedy" else torch.float64)


def decoder_of(model: PreTrainedModel, drafter: Drafter, rule: str, **options: Any) -> Decoder:
    accept: dict[str, Any] = {"accept": made} if (made := RULES[rule]()) else {}
    if isinstance(drafter, AheadDrafter):
        return decoder_ahead(model, drafter, **accept)
    target = Target(model, states=states_of(drafter), verdicts=None, **options)
    return Decoder(target, drafter, FixedBudget(16), **accept)


@cache
def expected(model: str, rule: str) -> list[list[int]]:
    """Return what follows each prompt."""
    made = model_of(model, rule)
    if rule == "greedy":
        return [plainly(made, prompt, NEW_TOKENS) for prompt in PROMPTS]
    requests = [Request(prompt, NEW_TOKENS) for prompt in PROMPTS]
    found: list[list[int]] = [[] for _ in PROMPTS]
    for generation, tokens in decoder_of(made, NoDrafter(), rule).generate_many(requests, 1):
        found[generation.number] += tokens
    return found


def check(model: str, row: str, rule: str, folder: Path, **options: Any) -> Decoder:
    """Compare sequences that are read one by one, and then together, from what was kept."""
    truths, made = expected(model, rule), model_of(model, rule)
    texts = list(zip(PROMPTS, truths, strict=True))
    drafter = (ROWS | HEADS)[row](texts, made, folder)
    decoder = decoder_of(made, drafter, rule, **options)
    num_drafted = num_passes = 0
    for parallel, count in MANNERS:
        if rule != "greedy":  # a decoder draws each of its sequences anew
            decoder = decoder_of(made, drafter, rule, **options)
        found: list[list[int]] = [[] for _ in range(count)]
        requests = [Request(prompt, NEW_TOKENS) for prompt in PROMPTS[:count]]
        for generation, tokens in decoder.generate_many(requests, parallel):
            assert generation.error is None
            found[generation.number] += tokens
            if generation.is_over:
                assert generation.statistics.num_failures == 0
                num_drafted += generation.statistics.num_drafted
                num_passes += generation.statistics.num_passes
        assert found == truths[:count], f"{parallel} at once"
    takes_drafts = row != "no drafts" and decoder.target.max_nodes > 0
    assert (num_drafted > 0) == takes_drafts
    if row in {"right and wrong trees", "trees ahead", "fused", "readers", "readers of paths"}:
        num_tokens = NEW_TOKENS * sum(count for _, count in MANNERS)
        assert num_passes < num_tokens * (0.8 if takes_drafts else 1.01)
    if isinstance(drafter, ScriptedDrafter):
        assert not drafter.open_sessions
        read = [each for _, count in MANNERS for each in texts[:count]]
        assert sorted(drafter.closed) == sorted(prompt + truth for prompt, truth in read)
    if isinstance(drafter, AheadDrafter):
        assert (drafter.num_outcomes > 0) == takes_drafts
    return decoder


@pytest.mark.parametrize("row", ROWS)
def test_greedy_output_is_that_of_generate(row: str, tmp_path: Path) -> None:
    check("llama", row, "greedy", tmp_path)


@pytest.mark.plugin("decoder.plugins.speculators")
@pytest.mark.parametrize("row", HEADS)
def test_greedy_output_with_heads_is_that_of_generate(row: str, tmp_path: Path) -> None:
    check("llama", row, "greedy", tmp_path)


@pytest.mark.parametrize(
    ("model", "row"),
    [
        *((each, "right and wrong trees") for each in MODELS if each != "llama"),
        *(
            (each, row)  # trees that eager attention reads are those above, whoever drafts them
            for each in ("gemma", "mistral", "convolution", "mamba")
            for row in ("trees ahead", "fused")
        ),
    ],
)
def test_other_models_write_what_they_do_alone(model: str, row: str, tmp_path: Path) -> None:
    check(model, row, "greedy", tmp_path)


@pytest.mark.parametrize(
    ("model", "rule"), [("llama", "drawn"), ("llama", "all settings"), ("gemma", "all settings")]
)
@pytest.mark.parametrize("row", ["right and wrong trees", "every token", "drawn drafts"])
def test_what_is_drawn_with_a_seed_does_not_depend_on_drafts(
    row: str, model: str, rule: str, tmp_path: Path
) -> None:
    assert expected(model, rule) != expected(model, "greedy")
    check(model, row, rule, tmp_path)


@pytest.mark.parametrize(
    ("model", "rule"),
    [(model, "greedy") for model in ("llama", "gemma", "mistral")]
    + [("llama", rule) for rule in RULES if rule != "greedy"],
)
def test_passes_of_fixed_shapes_change_nothing(model: str, rule: str, tmp_path: Path) -> None:
    decoder = check(model, "fused", rule, tmp_path, capture=Uncaptured)
    assert decoder.target.pads_passes


def test_a_sequence_alone_is_that_of_generate() -> None:
    for prompt, truth in zip(PROMPTS, expected("llama", "greedy"), strict=True):
        decoder = decoder_of(model_of("llama", "greedy"), NoDrafter(), "greedy")
        assert decoded(decoder, prompt, NEW_TOKENS) == truth


def test_outputs_are_no_repetitions_of_one_token() -> None:
    for model in MODELS:
        assert max(len(set(truth)) for truth in expected(model, "greedy")) > 5
