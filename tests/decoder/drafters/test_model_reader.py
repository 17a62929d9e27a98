"""A draft model as a reader: what it says of a tree is what it says of each path alone."""

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from decoder.drafters.asking import StepCosts
from decoder.drafters.draft_model import DraftModel, ModelReader
from decoder.drafters.fusion import FusedDrafter
from retriever.errors import DrafterUnavailableError
from retriever.sequences import TokenSequence
from retriever.tree import ROOT, DraftTree
from tests.decoder.decoding import (
    MODELS,
    VOCABULARY,
    ScriptedDrafter,
    decoder_with,
    plainly,
    prompt_of,
    random_tree,
)
from tests.decoder.drafters.draft_models import distribution, llama, most_probable_prefixes
from tests.decoder.drafters.drafted_chains import LIMITS, paths_of
from tests.decoder.rounding import Rounding

FREE = StepCosts(target_s=1.0, pass_s=0.0)


def said(logits: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits.double(), -1)


def of_model(model: PreTrainedModel, tokens: list[int]) -> np.ndarray:
    return np.log(distribution(model, tokens))


@pytest.mark.parametrize("seed", range(8))
def test_a_tree_read_at_once_says_of_each_path_what_the_model_does(seed: int) -> None:
    rng = np.random.default_rng(seed)
    model = llama()
    rounding = Rounding.of(model, keys=100)
    tokens = prompt_of(9, seed)
    sequence = TokenSequence(np.array(tokens, np.int32))
    reading = ModelReader(DraftModel(model)).follow(sequence)
    for _ in range(3):
        begun = reading.begin()
        assert begun is not None
        rounding.check(said(begun)[0], of_model(model, tokens))
        tree = random_tree(rng, 20)
        first = int(rng.integers(1, 19))
        parts = [slice(0, first), slice(first, 20)]
        rows = [reading.read(tree.token_ids[p].tolist(), tree.parents[p].tolist()) for p in parts]
        for node, row in enumerate(said(torch.cat(rows))):
            path = tree.token_ids[tree.path_to(node)].tolist()
            rounding.check(row, of_model(model, [*tokens, *path]))
        taken = tree.token_ids[tree.path_to(int(rng.integers(0, 20)))].tolist()
        new = [*taken, int(rng.integers(4, VOCABULARY))]
        sequence.extend(new)
        tokens += new
    reading.close()


def test_alone_it_grows_the_most_probable_tree() -> None:
    model, tokens = llama(), prompt_of(9)
    reader = ModelReader(DraftModel(model))
    drafter = FusedDrafter([], LIMITS, readers=[reader], costs=FREE)
    sequence = drafter.follow(TokenSequence(np.array(tokens, np.int32)))
    paths = set(paths_of(sequence.draft(12)))
    best = set(most_probable_prefixes(model, tokens, 6))
    assert len(paths & best) >= 5
    sequence.close()


def test_sequences_beyond_its_limits_are_refused_with_a_reason() -> None:
    reader = ModelReader(DraftModel(llama(), vocabulary_size=30))
    with pytest.raises(DrafterUnavailableError, match="token 31"):
        reader.follow(TokenSequence(np.array([3, 31], np.int32))).begin()
    with pytest.raises(DrafterUnavailableError, match="at most 256 tokens"):
        reader.follow(TokenSequence(np.full(257, 3, np.int32))).begin()
    reading = reader.follow(TokenSequence(np.full(255, 3, np.int32)))
    assert reading.begin() is not None
    assert len(reading.read([1], [ROOT])) == 1
    with pytest.raises(DrafterUnavailableError, match="at most 256 tokens"):
        reading.read([2], [0])


def test_the_least_recently_used_cache_gives_way_and_is_read_again() -> None:
    model = llama()
    rounding = Rounding.of(model)
    reader = ModelReader(DraftModel(model), max_caches=2)
    prompts = [prompt_of(7, seed) for seed in range(3)]
    readings = [reader.follow(TokenSequence(np.array(prompt, np.int32))) for prompt in prompts]
    for _ in range(2):
        for reading, prompt in zip(readings, prompts, strict=True):
            begun = reading.begin()
            assert begun is not None
            row = said(reading.read([5, 6], [ROOT, 0]))[1]
            rounding.check(row, of_model(model, [*prompt, 5, 6]))


def test_a_sequence_that_outgrows_it_goes_on_without_it() -> None:
    model, prompt = MODELS["llama"](), prompt_of(200)
    short = llama(3)
    short.config.max_position_embeddings = 220
    retrieval = ScriptedDrafter(lambda _tokens, _budget: DraftTree.empty())
    drafter = FusedDrafter(
        [retrieval], LIMITS, readers=[ModelReader(DraftModel(short))], costs=FREE
    )
    generation = decoder_with(model, drafter).generate(prompt, 50)
    assert [token for step in generation for token in step] == plainly(model, prompt, 50)
    assert generation.statistics.num_failures == 1
