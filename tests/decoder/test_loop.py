from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from decoder.budget.budget import FixedBudget
from decoder.drafters.following import NoDrafter
from decoder.errors import (
    DecoderBusyError,
    GenerationStartedError,
    InvalidPromptError,
    InvalidSettingsError,
)
from decoder.loop import Decoder, Request
from decoder.model.target import Target
from decoder.observation import Statistics
from decoder.sampling.sampling_settings import SamplingSettings
from retriever.drafter import SequenceOptions
from retriever.tree import DraftTree, Source
from tests.decoder.decoding import (
    VOCABULARY,
    ScriptedDrafter,
    decoded,
    decoder_with,
    nothing,
    oracle,
    plainly,
    prompt_of,
    tiny_llama,
    tree_of,
)

NEW_TOKENS = 30


def test_the_drafter_gets_every_token_once(prompt: list[int]) -> None:
    model = tiny_llama()
    drafter = ScriptedDrafter(oracle(prompt + plainly(model, prompt, NEW_TOKENS)))
    output = decoded(decoder_with(model, drafter), prompt, NEW_TOKENS)
    assert drafter.closed == [prompt + output]
    assert not drafter.open_sessions


def test_leaving_early_closes_the_session_and_frees_the_decoder(prompt: list[int]) -> None:
    drafter = ScriptedDrafter(nothing)
    decoder = decoder_with(tiny_llama(), drafter)
    steps: Any = iter(decoder.generate(prompt, NEW_TOKENS))
    first = [*next(steps), *next(steps)]
    with pytest.raises(DecoderBusyError):
        decoded(decoder, prompt, NEW_TOKENS)
    steps.close()
    assert drafter.closed == [prompt + first]
    assert decoded(decoder, prompt, 2) == first


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_no_more_tokens_than_asked_for(count: int, prompt: list[int]) -> None:
    model = tiny_llama()
    truth = plainly(model, prompt, 40)
    drafter = ScriptedDrafter(oracle(prompt + truth))
    assert decoded(decoder_with(model, drafter), prompt, count) == truth[:count]
    assert drafter.closed == [prompt + truth[:count]]


def test_a_stop_token_ends_the_sequence_even_within_a_path(prompt: list[int]) -> None:
    model = tiny_llama()
    truth = plainly(model, prompt, 40)
    for stop in sorted(set(truth))[::4]:
        drafter = ScriptedDrafter(oracle(prompt + truth))
        output = decoded(decoder_with(model, drafter, stop_ids=[stop]), prompt, 40)
        assert output == truth[: truth.index(stop) + 1]
        assert output == plainly(model, prompt, 40, stop)


def test_the_models_limit_ends_the_sequence(prompt: list[int]) -> None:
    model = tiny_llama()
    truth = plainly(model, prompt, 40)
    model.config.max_position_embeddings = len(prompt) + 20
    drafter = ScriptedDrafter(oracle(prompt + truth))
    assert decoded(decoder_with(model, drafter), prompt, 40) == truth[:20]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "empty"),
        ([1, VOCABULARY], "vocabulary"),
        ([-1], "vocabulary"),
        (prompt_of(256), "limit is 256"),
        ("hello", "the prompt is text: give its token ids"),
        ([[1, 2]], r"not one row of token ids, but of shape \(1, 2\)"),
        ([[1], [1, 2]], "not one row of token ids$"),
        ([1.5], "float64 and not whole token ids"),
    ],
)
def test_impossible_prompts_are_refused(tokens: Any, message: str) -> None:
    drafter = ScriptedDrafter(nothing)
    with pytest.raises(InvalidPromptError, match=message):
        decoder_with(tiny_llama(), drafter).generate(tokens)
    assert not drafter.closed


def test_a_negative_limit_is_refused(prompt: list[int]) -> None:
    decoder = decoder_with(tiny_llama(), ScriptedDrafter(nothing))
    with pytest.raises(InvalidSettingsError, match="max_new_tokens must be 0 or more, not -1"):
        decoder.generate(prompt, -1)
    assert decoded(decoder, prompt, 0) == []


@pytest.mark.parametrize("accept", ["greedy", SamplingSettings(0.7)])
def test_what_is_no_rule_is_refused_before_anything_is_decoded(
    accept: Any, prompt: list[int]
) -> None:
    decoder = decoder_with(tiny_llama(), ScriptedDrafter(nothing))
    with pytest.raises(InvalidSettingsError, match=r"accept must be a rule, .* makes one"):
        decoder.prepare(Request(prompt, 5, accept=accept))
    with pytest.raises(InvalidSettingsError, match="accept must be a rule"):
        Decoder(decoder.target, NoDrafter(), FixedBudget(1), accept)


def test_statistics_say_who_drafted_what(prompt: list[int]) -> None:
    model = tiny_llama()
    truth = plainly(model, prompt, NEW_TOKENS)

    def guess(tokens: list[int], _: int) -> DraftTree:
        rest = truth[len(tokens) - len(prompt) :][:3]
        return tree_of([(at - 1, token) for at, token in enumerate(rest)], Source.PHRASES)

    generation = decoder_with(model, ScriptedDrafter(guess)).generate(prompt, NEW_TOKENS)
    steps = list(generation)
    statistics = generation.statistics
    assert statistics.num_passes == len(steps)
    assert statistics.num_tokens == NEW_TOKENS
    assert statistics.accepted_by_source() == {"phrases": NEW_TOKENS - len(steps)}
    assert statistics.num_drafted == statistics.accepted[Source.PHRASES]
    assert 0 < statistics.target_s < statistics.total_s
    assert 0 < statistics.host_s < statistics.total_s
    assert "phrases 7" in statistics.summary()
    assert statistics.report()["num_failures"] == 0
    assert statistics.num_accepted == statistics.drafted[Source.PHRASES]
    per_position = statistics.accepted_per_position()
    assert sum(per_position) == statistics.num_accepted
    assert per_position[0] == statistics.num_drafts
    assert len(per_position) == 3


def test_statistics_speak_the_names_of_engines() -> None:
    statistics = Statistics()
    chain = tree_of([(-1, 5), (0, 6), (1, 7)], Source.CORPUS)
    nothing_drafted = DraftTree.empty()
    for tree, accepted in ((nothing_drafted, 0), (chain, 2), (chain, 0), (nothing_drafted, 0)):
        statistics.record(tree, np.arange(accepted), accepted + 1)
    total = Statistics()
    for _ in range(2):
        total.add(statistics)
    assert statistics.engine_metrics() == {
        "vllm:spec_decode_num_drafts_total": 2,
        "vllm:spec_decode_num_draft_tokens_total": 6,
        "vllm:spec_decode_num_accepted_tokens_total": 2,
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"}': 1,
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="1"}': 1,
        'foredraft_nodes_total{source="corpus"}': 6,
        'foredraft_accepted_tokens_total{source="corpus"}': 2,
        "sglang:spec_accept_length": 6 / 4,
        "sglang:spec_accept_rate": 2 / 6,
    }
    families = {each.name: each for each in text_string_to_metric_families(total.exposition())}
    assert families["vllm:spec_decode_num_drafts"].type == "counter"
    assert [each.value for each in families["vllm:spec_decode_num_drafts"].samples] == [4]
    per_position = families["vllm:spec_decode_num_accepted_tokens_per_pos"].samples
    assert [(each.labels["position"], each.value) for each in per_position] == [("0", 2), ("1", 2)]
    assert families["sglang:spec_accept_length"].type == "gauge"
    assert "right at 1, 2, …: 50%, 50%" in statistics.summary()


def test_defaults_generate_up_to_the_models_limit(prompt: list[int]) -> None:
    decoder = Decoder(Target(tiny_llama()), NoDrafter(), FixedBudget(0))
    tokens = [token for step in decoder.generate(prompt) for token in step]
    assert len(tokens) == 256 - len(prompt)


def test_what_is_not_to_be_remembered_is_opened_so(prompt: list[int]) -> None:
    drafter = ScriptedDrafter(nothing)
    decoder = decoder_with(tiny_llama(), drafter)
    for remember in (True, False):
        list(decoder.generate(prompt, 2, SequenceOptions(remember=remember)))
    assert list(drafter.remembers.values()) == [True, False]


def test_a_generation_is_decoded_once(prompt: list[int]) -> None:
    generation = decoder_with(tiny_llama(), ScriptedDrafter(nothing)).generate(prompt, 3)
    assert len(list(generation)) == 3
    with pytest.raises(GenerationStartedError, match="once"):
        iter(generation)
    assert generation.statistics.num_tokens == 3
