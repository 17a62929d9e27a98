"""Embeddings padded beyond the tokenizer hold tokens that no drafter for it knows."""

from pathlib import Path
from typing import Any

from decoder.assembly import assemble, connect_drafter
from decoder.drafters.options import DraftOptions
from decoder.model.pretrained import ModelOptions, load_model
from retriever.errors import InvalidRequestError
from retriever.tree import DraftTree
from tests.decoder.decoding import (
    Guess,
    ScriptedDrafter,
    decoder_with,
    oracle,
    plainly,
    prompt_of,
    tiny_llama,
)
from tests.decoder.drafters.drafted_chains import refusing

NEW_TOKENS = 30


def strict(end: int, guess: Guess) -> Guess:
    """Draft by `guess`, and refuse tokens from `end` on, as a drafter of another size does."""

    def drafted(tokens: list[int], budget: int) -> DraftTree:
        if max(tokens) >= end:
            raise InvalidRequestError("outside the vocabulary")
        return guess(tokens, budget)

    return drafted


def test_an_output_token_that_the_drafter_lacks_ends_its_drafts() -> None:
    model = tiny_llama()
    prompt = [token % 20 for token in prompt_of(12)]
    truth = plainly(model, prompt, NEW_TOKENS)
    end = max(truth)
    known = truth[: truth.index(end)]
    assert len(known) > 2
    assert max(known) >= 20
    drafter = ScriptedDrafter(strict(end, oracle(prompt + truth, 8)))
    generation = decoder_with(model, drafter, drafter_vocabulary=end).generate(prompt, NEW_TOKENS)
    assert [token for step in generation for token in step] == truth
    assert generation.statistics.num_failures == 1
    assert drafter.num_drafts >= 1
    assert drafter.closed == [prompt + known]


def test_a_prompt_token_that_the_drafter_lacks_means_no_drafts(prompt: list[int]) -> None:
    model = tiny_llama()
    drafter = ScriptedDrafter(refusing)
    decoder = decoder_with(model, drafter, drafter_vocabulary=max(prompt))
    generation = decoder.generate(prompt, NEW_TOKENS)
    truth = plainly(model, prompt, NEW_TOKENS)
    assert [token for step in generation for token in step] == truth
    assert generation.statistics.num_failures == 1
    assert (drafter.num_drafts, drafter.closed) == (0, [])


def test_padded_embeddings_cost_drafts_only_by_default(model_directory: Path) -> None:
    language_model = load_model(ModelOptions(str(model_directory)))
    model: Any = language_model.model
    size = len(language_model.tokenizer)
    model.resize_token_embeddings(size + 8, mean_resizing=False)
    prompt = [5, size + 3, 6]
    with connect_drafter(DraftOptions(), language_model) as drafter:
        generation = assemble(language_model, drafter).generate(prompt, NEW_TOKENS)
        output = [token for step in generation for token in step]
    assert output == plainly(model, prompt, NEW_TOKENS, language_model.stop_ids[0])
    assert generation.statistics.num_failures == 1
