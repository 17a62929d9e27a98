"""What drafts were worth: an estimate from measured passes, or a comparison by the clock."""

import re
from dataclasses import replace

import numpy as np
import pytest

from decoder.budget.budget import MeasuredBudget
from decoder.budget.costs import CostSurface
from decoder.commands.generate import Answer, AnswerOptions, Interruption, Task, answer
from decoder.commands.plain_comparison import PlainAnswers, first_difference
from decoder.loop import Decoder
from decoder.model.pretrained import LanguageModel
from decoder.observation import ObservedPass, Times
from decoder.sampling.rule import accept_rule
from decoder.sampling.sampling_settings import SamplingSettings
from decoder.sampling.verification import AcceptRule, accept_greedy
from decoder.speedup import UNKNOWN, Speedup
from retriever.kernels import compiling
from retriever.tree import DraftTree
from tests.decoder.decoding import ScriptedDrafter, at_random, decoder_with, nothing

PROMPT = "abcabc"


COSTS = CostSurface.flat((1, 8), (2.0, 3.2))


def seen(num_tokens: int, target_s: float, num_nodes: int = 0) -> ObservedPass:
    nodes = np.arange(num_nodes, dtype=np.int32)
    chances, sources = np.zeros(num_nodes, np.float32), np.zeros(num_nodes, np.uint8)
    tree = DraftTree(nodes, nodes - 1, chances, sources)
    return ObservedPass(
        tree,
        tree,
        np.empty(0, np.int64),
        [1] * num_tokens,
        Times(0.25, target_s, 0.25),
        width=1 + num_nodes,
    )


def observed(*passes: ObservedPass) -> Speedup:
    """What is found in an answer to a prompt of 100 tokens that took seven seconds to read."""
    speedup = Speedup()
    observe = speedup.observer(MeasuredBudget(COSTS), 100)
    observe(seen(0, 7.0))
    for each in passes:
        observe(each)
    return speedup


def test_plain_decoding_would_take_a_plain_pass_for_each_token() -> None:
    assert observed().times_plain is None
    assert observed().summary() == UNKNOWN
    speedup = observed(seen(5, 3.0, num_nodes=7))
    # A plain pass takes 1/1.6 of one of eight tokens.
    assert speedup.plain_s == pytest.approx(7 + 5 * 3.0 / 1.6)
    assert speedup.own_s == pytest.approx(7.25 + 3.5)
    assert speedup.range is None
    assert (
        speedup.summary() == "1.5x plain decoding on this machine, by a rough estimate from 1 pass"
    )


def test_an_estimate_says_how_sure_it_is() -> None:
    gains = [seen(5, 3.2, 7), seen(1, 2.0)]
    few, many = observed(*gains * 8), observed(*gains * 80)
    assert few.range is not None
    assert many.range is not None
    assert few.times_plain is not None
    assert few.range[0] < few.times_plain < few.range[1]
    spread, narrower = (high - low for low, high in (few.range, many.range))
    assert narrower < spread / 2.5
    assert re.fullmatch(
        r"(.*)x plain decoding on this machine \(.* to .*\), estimated from 160 passes",
        many.summary(),
    )
    assert few.report()["range"] == few.range
    nothing = observed(*[seen(1, 2.0)] * 40)
    assert "x plain decoding on this machine: nothing was drafted, because" in nothing.summary()
    useless = observed(*[seen(1, 3.2, 7)] * 40)
    assert useless.summary().endswith("estimated from 40 passes: drafts do not pay off here")


@pytest.mark.parametrize("load", [1 / 2.9, 2.9])
def test_what_slows_all_passes_alike_changes_no_estimate(load: float) -> None:
    free = Times(0.0, 3.2 * load, 0.0)
    speedup = observed(*[replace(seen(3, 1.0, 7), times=free)] * 20)
    speedup.own_s -= 7.25
    speedup.plain_s -= 7.0
    assert speedup.times_plain == pytest.approx(3 / 1.6, rel=0.02)


def test_a_pass_in_which_kernels_were_compiled_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gains = [seen(5, 3.2, 7), seen(1, 2.0)] * 8
    slow = replace(seen(1, 2.0), times=Times(40.0, 2.0, 0.1))
    assert observed(*gains, slow) != observed(*gains)  # a draft may be late for other reasons
    compiled = Speedup()
    observe = compiled.observer(MeasuredBudget(COSTS), 100)
    for each in (seen(0, 7.0), *gains):
        observe(each)
    monkeypatch.setattr(compiling, "_num_compiled", compiling.num_compiled() + 3)
    observe(slow)
    assert compiled == observed(*gains)


@pytest.mark.parametrize("times", [1 / 20, 1 / 4, 4.0, 20.0])
def test_an_estimate_is_withheld_where_costs_no_longer_hold(times: float) -> None:
    """Costs of another load once said 24.9 times, of 1.28 tokens a pass, and 0.2 times."""
    speedup = observed(*[seen(1, 2.0 * times), seen(2, 3.2 * times, 7)] * 20)
    assert speedup.times_plain is None
    assert speedup.range is None
    assert speedup.report()["times_plain"] is None
    assert speedup.summary().startswith("the speedup from drafts is not known now: passes take")


@pytest.mark.parametrize("target_s", [0.3, 1.0, 3.0, 9.0])
def test_no_more_is_gained_than_a_pass_brings(target_s: float) -> None:
    speedup = observed(*[seen(1, target_s, 7), seen(1, target_s), seen(2, target_s, 3)] * 4)
    assert (speedup.plain_s - 7) / (speedup.own_s - 7.25) <= 4 / 3


def test_beside_others_a_token_would_take_its_share_of_a_plain_pass() -> None:
    speedup = Speedup()
    observe = speedup.observer(MeasuredBudget(CostSurface.flat((1, 4), (1.0, 2.0))), 100)
    observe(seen(1, 7.0))
    observe(replace(seen(3, 0.5), num_sequences=4, width=4))  # its share of two seconds
    assert speedup.plain_s == pytest.approx(7 + 3 * 2.0 / 4)


def answered(decoder: Decoder, language_model: LanguageModel, text: str, most: int) -> Answer:
    task = Task(language_model.encode(text))
    return answer(decoder, language_model, task, AnswerOptions(most), Interruption())


def sampled() -> AcceptRule:
    return accept_rule(SamplingSettings(temperature=1.0))


@pytest.mark.parametrize("rule", ["greedy", "sampled"])
def test_a_comparison_decodes_the_same_without_drafts(
    language_model: LanguageModel, rule: str
) -> None:
    accept = accept_greedy if rule == "greedy" else sampled()
    drafted = decoder_with(language_model.model, ScriptedDrafter(at_random()), accept=accept)
    comparison = PlainAnswers(drafted, language_model, AnswerOptions(20))
    interrupted = answered(drafted, language_model, "cab", 20)  # its random numbers are used up
    assert interrupted.token_ids
    comparison.skip()
    total = Speedup()
    for _ in range(2):
        result = answered(drafted, language_model, PROMPT, 20)
        speedup = comparison.speedup(language_model.encode(PROMPT), result, Interruption())
        assert speedup is not None
        assert (speedup.num_compared, speedup.num_different) == (1, 0)
        assert speedup.own_s == result.statistics.total_s
        assert speedup.summary().endswith("without drafts; the output is identical")
        total.add(speedup)
    assert total.summary().endswith("all 2 are identical")


def test_a_comparison_says_where_outputs_differ(language_model: LanguageModel) -> None:
    decoder = decoder_with(language_model.model, ScriptedDrafter(nothing))
    result = answered(decoder, language_model, PROMPT, 20)
    result.token_ids[7] += 1
    speedup = PlainAnswers(decoder, language_model, AnswerOptions(20)).speedup(
        language_model.encode(PROMPT), result, Interruption()
    )
    assert speedup is not None
    assert speedup.summary().endswith("; the output differs from token 8 on")
    assert speedup.report()["is_identical"] is False
    assert first_difference([1, 2], [1, 2, 3]) == 3
    assert first_difference([1, 2], [1, 2]) is None


def test_a_comparison_tells_no_drafter(language_model: LanguageModel) -> None:
    drafter = ScriptedDrafter(nothing)
    decoder = decoder_with(language_model.model, drafter)
    result = answered(decoder, language_model, PROMPT, 5)
    before = list(drafter.closed)
    PlainAnswers(decoder, language_model, AnswerOptions(5)).speedup(
        language_model.encode(PROMPT), result, Interruption()
    )
    assert drafter.closed == before
