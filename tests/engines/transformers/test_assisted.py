"""Chains of drafts in transformers' own assisted generation."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, StoppingCriteriaList

from decoder.engines.transformers.assisted import DrafterCandidates, assisted_generate
from decoder.errors import UnsupportedGenerationError
from retriever.follower import DraftLimits
from tests.decoder.decoding import (
    MODELS,
    VOCABULARY,
    ScriptedDrafter,
    at_random,
    nothing,
    oracle,
    plainly,
    prompt_of,
    tiny_llama,
    tiny_mamba,
    tree_of,
)
from tests.decoder.rounding import Rounding
from tests.engines.transformers.generating import (
    NEW_TOKENS,
    EndsAfter,
    cache_in,
    generated,
    late_stop,
    perfect,
)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", [{}, {"max_length": 30}, {"eos_token_id": late_stop}])
def test_chains_give_the_output_of_generate(name: str, options: dict[str, Any]) -> None:
    model, prompt = MODELS[name](), prompt_of(12)
    options = {
        name: value(model, prompt) if callable(value) else value for name, value in options.items()
    }
    expected = generated(model, prompt, do_sample=False, **options)
    truth = expected[0].tolist()
    passes: list[int] = []
    model.register_forward_pre_hook(lambda *_: passes.append(1))
    num_passes = []
    for guess in (perfect(truth), oracle(truth), at_random(), nothing):
        passes.clear()
        drafter = ScriptedDrafter(guess)
        output = generated(
            model, prompt, custom_generate=assisted_generate, drafter=drafter, **options
        )
        assert output.tolist() == drafter.closed == [truth]
        assert "_get_candidate_generator" not in vars(model)
        num_new = len(truth) - len(prompt)
        assert len(passes) <= num_new
        num_passes.append(len(passes))
    assert num_passes[0] < num_passes[-1] / 2


def test_candidates_of_another_sequence_begin_another_session() -> None:
    drafter = ScriptedDrafter(at_random(4))
    candidates = DrafterCandidates(drafter, DraftLimits(VOCABULARY), max_candidates=3)
    first, _ = candidates.get_candidates(torch.tensor([[4, 5, 6]]))
    assert first[0, :3].tolist() == [4, 5, 6]
    assert 3 < first.shape[1] <= 6
    candidates.update_candidate_strategy(torch.tensor([[4, 5, 6, 7]]), torch.empty(0), 0)
    candidates.get_candidates(torch.tensor([[8, 9]]))
    assert drafter.closed == [[4, 5, 6, 7]]
    candidates.close()
    assert drafter.closed == [[4, 5, 6, 7], [8, 9]]


def chained(model: PreTrainedModel, drafter: ScriptedDrafter, **options: Any) -> Any:
    return generated(
        model, prompt_of(12), custom_generate=assisted_generate, drafter=drafter, **options
    )


def test_a_criterion_that_is_met_within_a_chain_ends_it_there() -> None:
    model, prompt = tiny_llama(), prompt_of(12)
    truth = plainly(model, prompt, NEW_TOKENS)
    outputs = {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "output_hidden_states": True,
    }
    for token in sorted(set(truth))[:6]:
        drafter = ScriptedDrafter(perfect(prompt + truth))
        criteria = StoppingCriteriaList([EndsAfter(token)])
        plain = generated(model, prompt, stopping_criteria=criteria, **outputs)
        output = chained(model, drafter, stopping_criteria=criteria, **outputs)
        num_new = truth.index(token) + 1
        assert output.sequences.tolist() == plain.sequences.tolist() == drafter.closed
        for name in ("scores", "logits", "hidden_states"):
            assert len(output[name]) == len(plain[name]) == num_new, name
        for name in ("scores", "logits"):
            Rounding.of(model).check(torch.cat(output[name]), torch.cat(plain[name]))
        length = cache_in(output).get_seq_length()
        assert length == cache_in(plain).get_seq_length() == len(prompt) + num_new - 1


def test_sampled_chains_follow_the_warpers() -> None:
    model, prompt = tiny_llama(), prompt_of(12)
    truth = plainly(model, prompt, NEW_TOKENS)
    drafter = ScriptedDrafter(oracle(prompt + truth))
    output = chained(model, drafter, do_sample=True, temperature=2.0, top_k=1)
    assert output.tolist() == [prompt + truth]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"guidance_scale": 1.5}, "must see each token once"),
        ({"num_beams": 2}, "beam_search"),
        ({"do_sample": True, "num_return_sequences": 2}, "one sequence at a time, not 2"),
        ({"drafter": None}, "needs a drafter"),
    ],
)
def test_what_chains_do_not_serve_is_refused(options: dict[str, Any], message: str) -> None:
    model, drafter = tiny_llama(), ScriptedDrafter(nothing)
    with pytest.raises(UnsupportedGenerationError, match=message):
        chained(model, **{"drafter": drafter, **options})
    assert "_get_candidate_generator" not in vars(model)
    assert not drafter.closed


def test_batches_and_models_that_cannot_give_up_tokens_are_refused() -> None:
    with pytest.raises(UnsupportedGenerationError, match="cache that can give up tokens"):
        chained(tiny_mamba(), ScriptedDrafter(nothing))
    candidates = DrafterCandidates(ScriptedDrafter(nothing), DraftLimits(VOCABULARY))
    with pytest.raises(UnsupportedGenerationError, match="one sequence at a time, not 2"):
        candidates.get_candidates(torch.tensor([[4, 5], [6, 7]]))


def test_candidates_end_before_what_is_improbable() -> None:
    chain = [(at - 1, 7 + at) for at in range(5)]  # 0.9, 0.7, 0.5, 0.3, 0.1
    for least, num_candidates in ((0.0, 5), (0.4, 3), (0.95, 0)):
        drafter = ScriptedDrafter(lambda *_: tree_of(chain))
        limits = DraftLimits(VOCABULARY)
        candidates = DrafterCandidates(drafter, limits, min_probability=least)
        ids, _ = candidates.get_candidates(torch.tensor([[4, 5]]))
        assert ids.tolist() == [[4, 5, *range(7, 7 + num_candidates)]]
