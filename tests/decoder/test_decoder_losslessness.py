import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from decoder.models import ModelOptions, load_model
from decoder.verification import accept_greedy
from indexer.tokenizer import DEFAULT_MODEL
from retriever.tree import DraftTree
from tests.decoder.decoding import (
    MODELS,
    WINDOW,
    Guess,
    ScriptedDrafter,
    at_random,
    decoded,
    decoder_with,
    every_token,
    nothing,
    oracle,
    plainly,
    prompt_of,
)

NEW_TOKENS = 60


def guesses(truth: list[int]) -> dict[str, Guess]:
    return {
        "nothing": nothing,
        "oracle": oracle(truth),
        "random": at_random(),
        "every token": every_token,
    }


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("length", [1, WINDOW // 2, 3 * WINDOW])
def test_output_is_that_of_model_generate(name: str, attention: str, length: int) -> None:
    model = MODELS[name](attention)
    prompt = prompt_of(length)
    expected = plainly(model, prompt, NEW_TOKENS)
    for kind, guess in guesses(prompt + expected).items():
        drafter = ScriptedDrafter(guess)
        assert decoded(decoder_with(model, drafter), prompt, NEW_TOKENS) == expected, kind


def test_tiny_models_do_not_repeat_one_token() -> None:
    for make in MODELS.values():
        assert len(set(plainly(make(), prompt_of(12), NEW_TOKENS))) > 5


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

    def __call__(self, tree: DraftTree, logits: torch.Tensor) -> tuple[NDArray[np.int64], int]:
        path, token = accept_greedy(tree, logits)
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


def test_real_model_in_float32_is_lossless() -> None:
    language_model = load_model(ModelOptions(DEFAULT_MODEL))
    for text in ("List three colours.", "Repeat twice: the cat sat on the mat."):
        tokens = language_model.encode(text)
        expected = plainly(language_model.model, tokens, 24, language_model.stop_ids[0])
        drafter = ScriptedDrafter(oracle(tokens + expected, 12))
        decoder = decoder_with(language_model.model, drafter, stop_ids=language_model.stop_ids)
        generation = decoder.generate(tokens, 24)
        assert [token for step in generation for token in step] == expected
        assert generation.statistics.tokens_per_pass > 1.5
