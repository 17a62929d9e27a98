from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from decoder.assembly import assemble, connect_drafter
from decoder.budget.budget import MeasuredBudget
from decoder.drafters.following import NoDrafter
from decoder.drafters.options import DraftOptions
from decoder.model.pretrained import LanguageModel
from decoder.observation import Statistics
from decoder.sampling.rule import accept_rule
from decoder.sampling.sampling_settings import SamplingSettings
from decoder.sampling.verification import PassContext, accept_greedy
from indexer.build import build_from_tokens
from indexer.tokenizer import vocabulary_of
from retriever.tree import DraftTree
from tests.decoder.decoding import (
    MODELS,
    ScriptedDrafter,
    decoded,
    decoder_with,
    oracle,
    plainly,
    tiny_llama,
)

NEW_TOKENS = 60


@pytest.mark.parametrize("name", MODELS)
def test_right_drafts_save_passes(name: str, prompt: list[int]) -> None:
    model = MODELS[name]()
    truth = prompt + plainly(model, prompt, NEW_TOKENS)
    generation = decoder_with(model, ScriptedDrafter(oracle(truth))).generate(prompt, NEW_TOKENS)
    list(generation)
    assert generation.statistics.num_tokens == NEW_TOKENS
    assert generation.statistics.tokens_per_pass > 3


class Judge:
    """The greedy rule, which keeps what it was asked and answered."""

    def __init__(self) -> None:
        self.cases: list[tuple[DraftTree, int]] = []

    def __call__(
        self, tree: DraftTree, logits: torch.Tensor, context: PassContext
    ) -> tuple[NDArray[np.int64], int]:
        path, token = accept_greedy(tree, logits, context)
        self.cases.append((tree, len(path)))
        return path, token


def longest_match(model: PreTrainedModel, context: list[int], tree: DraftTree) -> int:
    """Recompute, without cache or tree mask, how long a path of the tree is right."""
    longest = 0
    for node in range(len(tree)):
        tokens = tree.token_ids[tree.path_to(node)].tolist()
        with torch.inference_mode():
            logits = model(torch.tensor([context + tokens])).logits[0]
        choices = logits[len(context) - 1 : -1].argmax(-1).tolist()
        if choices == tokens:
            longest = max(longest, len(tokens))
    return longest


@pytest.mark.parametrize("name", MODELS)
def test_accepted_path_is_the_longest_that_is_right(name: str, prompt: list[int]) -> None:
    model = MODELS[name]()
    truth = prompt + plainly(model, prompt, 25)
    judge = Judge()
    decoder = decoder_with(model, ScriptedDrafter(oracle(truth, 16)), accept=judge)
    context = list(prompt)
    for step, (tree, accepted) in zip(
        decoder.generate(prompt, 25), iter(judge.cases), strict=False
    ):
        assert longest_match(model, context, tree) == accepted
        context += step
    assert sum(accepted for _, accepted in judge.cases) > 10


def test_right_drafts_save_passes_under_sampling(prompt: list[int]) -> None:
    model = tiny_llama()
    rule = accept_rule(SamplingSettings(1.0, seed=3))
    truth = decoded(decoder_with(model, NoDrafter(), accept=rule), prompt, NEW_TOKENS)
    drafter = ScriptedDrafter(oracle(prompt + truth))
    generation = decoder_with(model, drafter, accept=rule).generate(prompt, NEW_TOKENS)
    list(generation)
    assert generation.statistics.tokens_per_pass > 3


def test_a_decoder_samples_each_sequence_anew(prompt: list[int]) -> None:
    model = tiny_llama()
    runs = []
    for _ in range(2):
        rule = accept_rule(SamplingSettings(1.0, seed=4))
        decoder = decoder_with(model, NoDrafter(), accept=rule)
        runs.append([decoded(decoder, prompt, NEW_TOKENS) for _ in range(2)])
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]


@pytest.mark.programs
def test_real_model_in_float32_is_lossless(real_model: LanguageModel) -> None:
    for text in ("List three colours.", "Repeat twice: the cat sat on the mat."):
        tokens = real_model.encode(text)
        expected = plainly(real_model.model, tokens, 24, real_model.stop_ids[0])
        drafter = ScriptedDrafter(oracle(tokens + expected, 12))
        decoder = decoder_with(real_model.model, drafter, stop_ids=real_model.stop_ids)
        generation = decoder.generate(tokens, 24)
        assert [token for step in generation for token in step] == expected
        assert generation.statistics.tokens_per_pass > 1.5


COPIED = """def clamp(value, low, high):
    \"\"\"Return the value, no less than low and no more than high.\"\"\"
    if value < low:
        return low
    if value > high:
        return high
    return value


def mean(values):
    \"\"\"Return the mean of the values, or zero where there are none.\"\"\"
    total = 0
    count = 0
    for value in values:
        total += value
        count += 1
    if count == 0:
        return 0
    return total / count


def median(values):
    \"\"\"Return the middle value of the values in order.\"\"\"
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2 == 0:
        return mean(ordered[middle - 1 : middle + 1])
    return ordered[middle]
"""
TEXTS = (
    "The capital of France is Paris. The capital of Italy is Rome.",
    "One, two, three, four, five, six, seven, eight, nine, ten.",
    "Water boils at 100 degrees Celsius and freezes at 0 degrees Celsius.",
)
PROMPTS = (
    f"Repeat this code exactly:\n{COPIED}",
    "What is the capital of France?",
    "Count from one to ten in words.",
    "At which temperature does water boil?",
    "Write a short poem about the sea.",
    "Explain in one sentence what a compiler does.",
)


@pytest.mark.programs
def test_default_path_with_a_real_model_is_lossless(
    real_model: LanguageModel, tmp_path: Path
) -> None:
    tokenizer = real_model.tokenizer
    documents = [(text, list(tokenizer.encode(text))) for text in TEXTS]
    build_from_tokens(documents, tmp_path / "texts", vocabulary_of(tokenizer))
    statistics = Statistics()
    with connect_drafter(DraftOptions(index=[tmp_path / "texts"]), real_model) as drafter:
        decoder = assemble(real_model, drafter)
        for number, text in enumerate(PROMPTS):
            tokens = real_model.encode(text)
            assert number > 0 or len(tokens) >= 200
            expected = plainly(real_model.model, tokens, 32, real_model.stop_ids[0])
            generation = decoder.generate(tokens, 32)
            assert [token for step in generation for token in step] == expected, text
            statistics.add(generation.statistics)
    assert isinstance(decoder.budget, MeasuredBudget)
    assert statistics.num_failures == 0
    assert statistics.accepted.total() > 0
