import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.decoding.reader_gains import (
    Gained,
    Prompts,
    by_rule,
    summary,
    watch,
    watched,
    worth,
)
from decoder.model.pretrained import ModelOptions, Precision, load_model
from tests.decoder.decoding import plainly
from tests.decoder.drafters.scripted_readers import ScriptedReader


@pytest.mark.parametrize("knows", [True, False])
def test_what_a_reader_adds_is_kept_pass_by_pass(tiny_model: Path, *, knows: bool) -> None:
    torch.set_num_threads(1)
    language_model = load_model(ModelOptions(str(tiny_model), precision=Precision.FLOAT32))
    prompt = language_model.encode("a b a b")
    truth = [*prompt, *plainly(language_model.model, prompt, 12)]

    size = language_model.model.config.vocab_size

    def following(tokens: list[int]) -> dict[int, float]:
        next_token = truth[len(tokens)] if len(tokens) < len(truth) else 0
        return {(next_token + (not knows)) % size: 6.0}

    reader = ScriptedReader(following, columns=range(size), vocabulary=size)
    fused = watched(language_model, [], reader)
    gained = watch(language_model, fused, Prompts([], [prompt]), 4, 12)
    assert gained
    assert all(len(each.expected) == len(each.accepted) for each in gained)
    first = gained[0].accepted
    assert len(first) > 2
    if knows:
        assert first == sorted(first)
        assert first[-1] > max(first[0], 2)
    else:
        assert not any(first[1:])
    json.dumps(summary(gained, [0.05]))


def made(first: float, count: int = 4000) -> list[Gained]:
    """Drafts of which a first pass adds that many tokens where the tree is not sure."""
    random = np.random.default_rng(0)
    gained = []
    for _ in range(count):
        sureness = float(random.random())
        added = int(random.random() < first) if sureness < 0.5 else 0
        gained.append(Gained(sureness, [1.0, 1.0], [1, 1 + added]))
    return gained


def test_asking_is_worth_what_it_adds_over_what_it_takes() -> None:
    found = worth(made(0.4), 0.05)
    assert found["one_pass_always"] == pytest.approx(2.2 / 2 / 1.05, abs=0.01)
    assert found["all_passes_always"] == found["one_pass_always"]
    assert found["by_best_threshold"] == pytest.approx(2.2 / 2 / 1.025, abs=0.01)
    assert found["one_pass_always"] < found["by_rule"] <= found["by_best_threshold"]
    assert 0.4 < found["by_rule_asked"] < 0.75


def test_a_reader_that_costs_more_than_it_adds_is_left_alone() -> None:
    found = worth(made(0.05), 0.2)
    assert found["one_pass_always"] < 0.9
    assert found["by_rule"] > 0.985
    assert by_rule(made(0.05), 0.2)[-500:].mean() < 0.08
