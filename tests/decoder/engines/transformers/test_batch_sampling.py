"""Sampling in batches: each sequence is drawn from the target, with random numbers of its own."""

from collections import Counter
from collections.abc import Hashable, Mapping
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from decoder import loop as loop_module
from decoder.drafters.drawing import Draws
from decoder.engines.transformers.custom_generate import Foredraft
from decoder.sampling.verification import PassContext
from retriever.drafter import Drafter
from tests.decoder.decoding import (
    ScriptedDrafter,
    at_random,
    every_token,
    nothing,
    oracle,
    prompt_of,
    tiny_llama,
)
from tests.decoder.engines.transformers.batched import PROMPTS, foredraft, generated
from tests.decoder.sampling.drawn_outputs import TOP_K, drawn_from, shares_of_outputs
from tests.suite_parts import cases

ROWS = 8
NUM_CALLS = cases(12, of=75)
CRITICAL = 54.1
"""Of chi-square with 26 degrees of freedom, at 0.001: three tokens of three each."""
CRITICAL_PAIRS = 26.1
"""Of chi-square with 8 degrees of freedom, at 0.001: two tokens of three each."""


def chi_square(counts: Mapping[Any, int], shares: Mapping[Any, float]) -> float:
    """Return the statistic; what is expected fewer than five times is counted together."""
    assert set(counts) <= set(shares)
    total = sum(counts.values())
    rare = [key for key in shares if shares[key] * total < 5]
    cells: list[list[Hashable]] = [[key] for key in shares if key not in rare]
    cells += [rare] if rare else []
    pairs = [
        (sum(counts[key] for key in cell), total * sum(shares[key] for key in cell))
        for cell in cells
    ]
    return sum((came - mean) ** 2 / mean for came, mean in pairs)


def drawn(
    model: PreTrainedModel, plugin: Foredraft, prompt: list[int], max_new_tokens: int
) -> list[list[list[int]]]:
    """Return the new tokens of each row, of many calls."""
    torch.manual_seed(1)
    generate: Any = model.generate
    outputs = [
        generate(
            torch.tensor([prompt]),
            num_return_sequences=ROWS,
            do_sample=True,
            top_k=TOP_K,
            max_new_tokens=max_new_tokens,
            pad_token_id=0,
            custom_generate=plugin,
        )
        for _ in range(NUM_CALLS)
    ]
    return [output[:, len(prompt) :].tolist() for output in outputs]


def of_outputs(outputs: list[list[list[int]]], shares: Mapping[tuple[int, ...], float]) -> float:
    """Return chi-square of the outputs."""
    return chi_square(Counter(tuple(row[:3]) for rows in outputs for row in rows), shares)


def of_pairs(outputs: list[list[list[int]]], shares: Mapping[tuple[int, ...], float]) -> float:
    """Return chi-square of the first tokens of neighbouring rows."""
    first: dict[int, float] = {}
    for path, share in shares.items():
        first[path[0]] = first.get(path[0], 0.0) + share
    both = {(one, other): first[one] * first[other] for one in first for other in first}
    pairs = Counter((rows[at][0], rows[at + 1][0]) for rows in outputs for at in range(0, ROWS, 2))
    return chi_square(pairs, both)


def drafters(truth: list[int]) -> dict[str, tuple[Drafter, bool]]:
    return {
        "certain": (ScriptedDrafter(oracle(truth, num_nodes=6)), False),
        "drawn": (
            drawn_from(tiny_llama(layers=3), truth, Draws(1.7, 5, seed=3), recycles=False),
            True,
        ),
    }


@pytest.mark.seeds
@pytest.mark.parametrize("kind", ["drawn", "certain"][: cases(1, of=2)])
def test_returned_sequences_are_drawn_from_the_target_each_by_itself(kind: str) -> None:
    model, prompt = tiny_llama(dtype=torch.float64, layers=3), prompt_of(6)
    shares = shares_of_outputs(model, prompt)
    truth = [*prompt, *max(shares, key=shares.__getitem__), 7]
    drafter, draws = drafters(truth)[kind]
    plugin = foredraft(model, drafter, draft_sampling=draws)
    outputs = drawn(model, plugin, prompt, 4)  # a draft is no deeper than what is left
    assert of_outputs(outputs, shares) < CRITICAL
    assert of_pairs(outputs, shares) < CRITICAL_PAIRS
    assert plugin.statistics.accepted.total() > NUM_CALLS
    assert plugin.statistics.num_failures == 0


@pytest.mark.seeds
def test_rows_with_the_same_random_numbers_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "PassContext", lambda _, *rest: PassContext(0, *rest))
    model, prompt = tiny_llama(dtype=torch.float64, layers=3), prompt_of(6)
    plugin = foredraft(model, ScriptedDrafter(nothing))
    outputs = drawn(model, plugin, prompt, 1)
    assert of_pairs(outputs, shares_of_outputs(model, prompt)) > CRITICAL_PAIRS


def test_a_seed_gives_one_output_whatever_the_drafts_and_the_places() -> None:
    model = tiny_llama(dtype=torch.float64, layers=3)
    options: dict[str, Any] = {"do_sample": True, "temperature": 1.2, "num_return_sequences": 2}

    def outputs(guess: Any, parallel: int, seed: int = 7) -> list[list[int]]:
        torch.manual_seed(seed)
        plugin = foredraft(model, ScriptedDrafter(guess), parallel=parallel)
        rows: list[list[int]] = generated(
            model, PROMPTS, max_new_tokens=9, custom_generate=plugin, **options
        ).tolist()
        return rows

    expected = outputs(nothing, 1)
    assert len(expected) == 2 * len(PROMPTS)
    assert len({tuple(row) for row in expected}) == len(expected)
    assert expected != outputs(nothing, 1, seed=8)
    for guess, parallel in ((nothing, 5), (at_random(), 8), (every_token, 3)):
        assert outputs(guess, parallel) == expected


def test_the_first_row_draws_as_it_does_alone() -> None:
    model = tiny_llama(layers=3)
    rows = []
    for prompts in ([PROMPTS[1]], PROMPTS[1:]):
        torch.manual_seed(3)
        plugin = foredraft(model, ScriptedDrafter(at_random()))
        rows.append(generated(model, prompts, do_sample=True, custom_generate=plugin)[0].tolist())
    assert rows[0] == rows[1]
