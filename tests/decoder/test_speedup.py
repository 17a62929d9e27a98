"""What drafts were worth: an estimate from measured passes, or a comparison by the clock."""

from dataclasses import replace

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
from retriever.tree import DraftTree
from tests.decoder.decoding import ScriptedDrafter, at_random, decoder_with, nothing

PROMPT = "abcabc"


def seen(num_tokens: int, target_s: float) -> ObservedPass:
    tree = DraftTree.empty()
    return ObservedPass(
        tree, tree, tree.parents.astype("int64"), [1] * num_tokens, Times(0.25, target_s, 0.25)
    )


def test_plain_decoding_would_take_a_plain_pass_for_each_token() -> None:
    costs = CostSurface((0, 100), (1, 8), ((1.0, 1.0), (2.0, 2.0)))
    speedup = Speedup()
    observe = speedup.observer(MeasuredBudget(costs), 100)
    observe(seen(1, 7.0))  # the prompt's own pass, which takes the same without drafts
    assert speedup.times_plain is None
    assert speedup.summary() == UNKNOWN
    observe(seen(5, 2.0))
    # Behind 101 tokens a plain pass takes 2.01 s.
    assert speedup.plain_s == pytest.approx(7 + 5 * 2.01)
    assert speedup.own_s == pytest.approx(7.5 + 2.5)
    assert (
        speedup.summary() == "1.7x plain decoding on this machine, estimated from measured passes"
    )
    for _ in range(9):
        observe(seen(1, 9.0))
    assert speedup.summary().endswith("measured passes: too few passes to say whether drafts pay")
    for _ in range(60):
        observe(seen(1, 9.0))
    assert speedup.summary().endswith("measured passes: drafts do not pay here")


def test_beside_others_a_token_would_take_its_share_of_a_plain_pass() -> None:
    speedup = Speedup()
    observe = speedup.observer(MeasuredBudget(CostSurface.flat((1, 4), (1.0, 2.0))), 100)
    observe(seen(1, 7.0))
    observe(replace(seen(3, 1.0), num_sequences=4))
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
