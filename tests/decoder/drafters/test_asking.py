from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from decoder.drafters.asking import AskedDraft, AskingRule, DecodingPace, StepCosts
from retriever.tree import ROOT, DraftTree

TOKEN_S = 0.02


def sure(sureness: float) -> DraftTree:
    return DraftTree.checked([7], [ROOT], [sureness], [1])


def paced() -> AskingRule:
    """Return a rule that measures costs, at a known pace."""
    pace = DecodingPace()
    pace.note(TOKEN_S, 1)
    return AskingRule(pace)


def answer(
    rule: AskingRule, sureness: float, gain: int, seconds: float, num_behind: int = 1
) -> None:
    asked = AskedDraft(0, sure(sureness), num_behind)
    asked.num_passes, asked.first_s = 1, seconds
    rule.learn(asked, 0, gain, gain)


def num_asked(
    rule: AskingRule, gain: Callable[[], int], steps: int, sureness: float, cost: float
) -> int:
    """Return how often a reader is asked whose cost is given in tokens."""
    asked = 0
    for _ in range(steps):
        if rule.asks(sure(sureness)):
            asked += 1
            answer(rule, sureness, gain(), cost * TOKEN_S)
    return asked


def test_a_reader_is_asked_where_it_pays_and_not_where_it_does_not() -> None:
    rule = paced()
    asked = {0.1: 0, 0.9: 0}
    for _ in range(400):
        for sureness, gain in ((0.1, 30), (0.9, 1)):
            asked[sureness] += num_asked(rule, partial(int, gain), 1, sureness, 10.0)
    assert asked[0.1] == 400
    assert asked[0.9] < 40


@pytest.mark.parametrize(("mean", "least", "most"), [(0.2, 0.75, 1.0), (0.05, 0.0, 0.25)])
def test_tokens_that_vary_by_three_times_their_mean_do_not_mislead_it(
    mean: float, least: float, most: float
) -> None:
    random = np.random.default_rng(0)
    asked = [
        num_asked(paced(), lambda: 3 * int(random.random() < mean / 3), 2000, 0.2, cost=0.1)
        for _ in range(6)
    ]
    assert least * 2000 <= np.mean(asked) <= most * 2000


def test_a_reader_that_begins_to_pay_is_found_out() -> None:
    rule = paced()
    num_asked(rule, lambda: 0, 3000, 0.9, cost=0.5)
    assert num_asked(rule, lambda: 0, 3000, 0.9, cost=0.5) < 100
    assert num_asked(rule, lambda: 2, 2000, 0.9, cost=0.5) > 1400


def after(rule: AskingRule, before: int, first: int | None, gained: int, passes: int) -> None:
    asked = AskedDraft(0, DraftTree.empty(), 1)
    asked.note_pass()
    for _ in range(passes - 1):
        rule.record_pass(asked.note_pass(0.5))
    rule.learn(asked, before, first, gained)


@pytest.mark.parametrize(("brought", "least", "most"), [(0, 0, 25), (1, 290, 300)])
def test_further_passes_are_judged_by_what_they_bring_themselves(
    brought: int, least: int, most: int
) -> None:
    rule = AskingRule(DecodingPace(), StepCosts(1.0, 0.1))
    further = 0
    for _ in range(300):
        assert rule.asks(DraftTree.empty())
        goes_on = rule.is_worthwhile(0.5)
        further += goes_on
        after(rule, 0, 1, 1 + brought * goes_on, 1 + goes_on)
    assert least <= further <= most


def test_a_reading_of_a_prompt_says_nothing_of_what_drafts_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    pace = DecodingPace()
    pace.note(0.04, 2)
    rule = AskingRule(pace)

    def answered(num_behind: int, seconds: float) -> None:
        nonlocal now
        asked = AskedDraft(0, DraftTree.empty(), num_behind)
        now += seconds
        asked.note_pass()
        rule.learn(asked, 0, 1, 1)

    for _ in range(20):
        assert rule.asks(DraftTree.empty())
        answered(200, 1.0)
    for seconds in (0.5, 0.5, 0.001, 0.001, 0.001, 0.001):
        assert rule.asks(DraftTree.empty())
        answered(2, seconds)
    answered(200, 1.0)
    assert all(rule.asks(DraftTree.empty()) for _ in range(40))


def test_a_long_reading_that_took_less_corrects_the_time() -> None:
    rule = paced()
    for _ in range(6):
        answer(rule, 0.1, 1, 0.5)
    assert not rule.asks(sure(0.1))
    for _ in range(7):
        answer(rule, 0.1, 1, 0.004, num_behind=200)
    assert rule.asks(sure(0.1))


def test_passes_that_are_not_told_apart_count_as_one() -> None:
    rule = AskingRule(DecodingPace(), StepCosts(1.0, 0.1))
    asked = []
    for before in (0, 1):
        for _ in range(600):
            asked.append(rule.asks(DraftTree.empty()))
            after(rule, before, None, 1, 3)
        asked.append(rule.is_worthwhile(0.5))
    assert all(asked[:601])
    assert not all(asked[-33:-1])
    assert not asked[-1]


def test_the_pace_is_that_of_steps_and_of_their_mean_tokens() -> None:
    pace = DecodingPace()
    assert pace.token_s() == 0
    for number in range(40):
        pace.note(1.0 if number % 8 == 3 else 0.04, 3 if number % 2 else 1)
    assert pace.token_s() == pytest.approx(0.02, rel=0.01)


def test_a_reader_is_asked_while_the_pace_is_not_known() -> None:
    rule = AskingRule(DecodingPace())
    for _ in range(50):
        assert rule.asks(sure(0.9))
        answer(rule, 0.9, 0, 0.01)
