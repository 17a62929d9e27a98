import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    GenerationConfig,
    GenerationMixin,
    NoRepeatNGramLogitsProcessor,
    TopKLogitsWarper,
)

from decoder.errors import ContradictoryOptionsError, InvalidSettingsError
from decoder.sampling.processors import PathScores, Processing
from decoder.sampling.sampling_settings import SamplingSettings
from decoder.sampling.verification import PassContext
from retriever.tree import DraftTree
from tests.decoder.decoding import prompt_of, random_tree, tiny_llama

SETTINGS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "top-k": {"temperature": 1.0, "top_k": 7},
    "top-k of one": {"temperature": 1.0, "top_k": 1},
    "top-k beyond the vocabulary": {"temperature": 1.0, "top_k": 10**6},
    "top-p": {"temperature": 1.0, "top_p": 0.8},
    "top-p of almost nothing": {"temperature": 1.0, "top_p": 1e-6},
    "min-p": {"temperature": 0.9, "min_p": 0.1},
    "top-p and min-p": {"temperature": 1.2, "top_p": 0.9, "min_p": 0.05},
    "top-k and min-p": {"temperature": 1.2, "top_k": 9, "min_p": 0.05},
    "repetition penalty": {"temperature": 1.0, "repetition_penalty": 1.3},
    "penalised greedy": {"repetition_penalty": 0.7},
    "all": {
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
    },
}


def logits_of(rows: int, vocabulary: int) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(3)) * 3


def library_rows(settings: dict[str, Any], tokens: torch.Tensor, logits: Any) -> torch.Tensor:
    """Return what transformers' own list makes of logits, row by row."""
    model: Any = tiny_llama()
    stated = {"do_sample": "temperature" in settings, **settings}
    config: Any = GenerationConfig(**stated)  # type: ignore[no-untyped-call]
    processors: Any = GenerationMixin._get_logits_processor(
        model, config, input_ids_seq_length=tokens.shape[1]
    )
    return torch.cat([processors(tokens, row[None]) for row in logits])


def own_rows(settings: dict[str, Any], tokens: torch.Tensor, logits: torch.Tensor) -> PathScores:
    processing = Processing(SamplingSettings(**settings), (), None)
    context = PassContext(0, tokens[0].to(torch.int32).numpy(), 3)
    return PathScores(processing, DraftTree.empty(), logits, context)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("vocabulary", [40, 5000])
def test_rows_are_those_of_the_librarys_processors(name: str, vocabulary: int) -> None:
    logits = logits_of(20, vocabulary)
    tokens = torch.tensor([prompt_of(12, vocabulary=vocabulary)])
    wanted = library_rows(SETTINGS[name], tokens, logits)
    for row in range(len(logits)):
        scores = own_rows(SETTINGS[name], tokens, logits[row : row + 1])
        assert torch.equal(scores.of(slice(0, 1)), wanted[row : row + 1])
    assert torch.equal(logits, logits_of(20, vocabulary)), "the target's own logits were changed"


@pytest.mark.parametrize("name", ["temperature", "top-k", "top-p", "min-p", "top-p and min-p"])
def test_rows_that_depend_on_themselves_alone_are_the_same_together(name: str) -> None:
    logits = logits_of(26, 5000)
    processing = Processing(SamplingSettings(**SETTINGS[name]), [TopKLogitsWarper(900)], None)
    assert processing.is_blind
    tree = random_tree(np.random.default_rng(4), 25)
    scores = PathScores(processing, tree, logits, PassContext(0, np.arange(3, dtype=np.int32), 3))
    alone = torch.cat([scores.of(slice(row, row + 1)) for row in range(26)])
    assert torch.equal(scores.of(slice(0, 26)), alone)


def test_what_may_look_at_tokens_is_taken_to() -> None:
    class Derived(TopKLogitsWarper):
        pass

    for looking in (Derived(3), NoRepeatNGramLogitsProcessor(2)):
        assert not Processing(SamplingSettings(1.0), [TopKLogitsWarper(3), looking], None).is_blind
    assert not Processing(SamplingSettings(repetition_penalty=1.1), [], None).is_blind
    assert not Processing(SamplingSettings(frequency_penalty=0.1), [], None).is_blind


def test_each_row_is_processed_with_the_path_that_led_to_it() -> None:
    settings: dict[str, Any] = {"temperature": 0.8, "repetition_penalty": 1.4, "top_p": 0.95}
    tokens = prompt_of(9)
    tree = random_tree(np.random.default_rng(4), 25)
    logits = logits_of(26, 48)
    context = PassContext(0, torch.tensor(tokens, dtype=torch.int32).numpy(), 9)
    scores = PathScores(Processing(SamplingSettings(**settings), (), None), tree, logits, context)
    for row in range(26):
        path = [] if row == 0 else tree.token_ids[tree.path_to(row - 1)].tolist()
        wanted = library_rows(settings, torch.tensor([tokens + path]), logits[row : row + 1])
        assert torch.equal(scores.of(slice(row, row + 1)), wanted)


def test_presence_and_frequency_penalties_count_the_output_only() -> None:
    tokens = torch.tensor([[5, 6, 7, 8, 8, 9, 8]])
    logits = logits_of(1, 12)
    settings: dict[str, Any] = {"presence_penalty": 0.5, "frequency_penalty": 0.25}
    change = own_rows(settings, tokens, logits).of(slice(0, 1))[0] - logits[0]
    wanted = torch.zeros(12)
    wanted[8], wanted[9] = -0.5 - 3 * 0.25, -0.75
    assert torch.allclose(change, wanted, atol=1e-6)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -1.0}, r"temperature must be 0 \(greedy\) or at least 1e-05, not -1.0"),
        ({"temperature": 1e-9}, "temperature must be 0"),
        ({"temperature": math.nan}, "temperature must be 0"),
        ({"temperature": math.inf}, "temperature must be 0"),
        ({"temperature": 1.0, "top_k": -1}, "top_k must be a whole number, 0"),
        ({"temperature": 1.0, "top_k": 2.5}, "top_k must be a whole number"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p must be above 0 and at most 1"),
        ({"temperature": 1.0, "top_p": 1.1}, "top_p must be above 0"),
        ({"temperature": 1.0, "min_p": -0.1}, "min_p must be between 0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be above 0"),
        ({"presence_penalty": 3.0}, "presence_penalty must be between -2 and 2"),
        ({"frequency_penalty": "1"}, "frequency_penalty must be between"),
        ({"temperature": 1.0, "seed": 2**64}, r"seed must be a whole number from 0 to 2\*\*64 - 1"),
    ],
)
def test_impossible_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSettingsError, match=message):
        SamplingSettings(**values)


@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p"])
def test_contradictory_settings_are_refused(name: str) -> None:
    neutral: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    assert SamplingSettings(**neutral).is_greedy
    with pytest.raises(ContradictoryOptionsError, match=f"{name} has no effect at temperature 0"):
        SamplingSettings(**{**neutral, name: 1 if name == "top_k" else 0.5})


def test_settings_are_made_from_a_generation_config() -> None:
    values: Any = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1}
    sampling: Any = GenerationConfig(do_sample=True, **values)  # type: ignore[no-untyped-call]
    assert SamplingSettings.of(sampling) == SamplingSettings(**values)
    sampling.do_sample = False
    assert SamplingSettings.of(sampling) == SamplingSettings(repetition_penalty=1.1)
    assert SamplingSettings(2.0, top_k=5, seed=3).completed(sampling) == SamplingSettings(
        2.0, 5, 0.9, None, 1.1, seed=3
    )
    empty: Any = GenerationConfig()  # type: ignore[no-untyped-call]
    assert SamplingSettings.of(empty) == SamplingSettings()
    sampling.top_p = 7.0
    with pytest.raises(InvalidSettingsError, match="top_p must be above 0"):
        SamplingSettings(1.0).completed(sampling)
