from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from decoder.drafters.asking import AskedDraft, AskingRule, GainEstimate, Pace, StepCosts
from retriever.tree import DraftTree

TOKEN_S = 0.02


def num_asked(
    estimate: GainEstimate, gain: Callable[[], float], steps: int, sureness: float, cost: float
) -> int:
    """Return how often a reader is asked whose cost is given in tokens."""
    asked = 0
    for _ in range(steps):
        if estimate.pays(sureness, TOKEN_S):
            asked += 1
            estimate.learn(sureness, gain(), cost * TOKEN_S)
    return asked


def test_a_reader_is_asked_where_it_pays_and_not_where_it_does_not() -> None:
    estimate = GainEstimate()
    asked = {0.1: 0, 0.9: 0}
    for _ in range(400):
        for sureness, gain in ((0.1, 1.5), (0.9, 0.05)):
            asked[sureness] += num_asked(estimate, partial(float, gain), 1, sureness, 0.5)
    assert asked[0.1] == 400
    assert asked[0.9] < 40


@pytest.mark.parametrize(("mean", "least", "most"), [(0.2, 0.75, 1.0), (0.05, 0.0, 0.25)])
def test_tokens_that_vary_by_three_times_their_mean_do_not_mislead_it(
    mean: float, least: float, most: float
) -> None:
    random = np.random.default_rng(0)
    asked = [
        num_asked(
            GainEstimate(), lambda: 3 * float(random.random() < mean / 3), 2000, 0.2, cost=0.1
        )
        for _ in range(10)
    ]
    assert least * 2000 <= np.mean(asked) <= most * 2000


def test_a_reader_that_begins_to_pay_is_found_out() -> None:
    estimate = GainEstimate()
    num_asked(estimate, lambda: 0.0, 3000, 0.9, cost=0.5)
    assert num_asked(estimate, lambda: 0.0, 3000, 0.9, cost=0.5) < 100
    assert num_asked(estimate, lambda: 2.0, 2000, 0.9, cost=0.5) > 1400


def test_few_drafts_of_one_sureness_say_little_of_others() -> None:
    estimate = GainEstimate()
    before = estimate.gain(0.0)
    for gain in (0.0, 2.0):
        estimate.learn(0.5, gain, 0.001)
    assert estimate.gain(0.0) == pytest.approx(before, abs=0.5)
    for _ in range(2000):
        estimate.pays(0.25, 0.0)
        estimate.learn(0.25, 0.75, 0.001)
        estimate.learn(0.75, 0.25, 0.001)
    assert estimate.gain(0.5) == pytest.approx(0.5, abs=0.02)
    assert estimate.gain(0.25) == pytest.approx(0.75, abs=0.02)


def after(rule: AskingRule, before: int, first: int | None, gained: int, passes: int) -> None:
    asked = AskedDraft(0, DraftTree.empty(), 1)
    asked.note_first()
    for _ in range(passes - 1):
        rule.record_pass(asked.note_further(0.5))
    rule.learn(asked, before, first, gained)


@pytest.mark.parametrize(("brought", "least", "most"), [(0, 0, 25), (1, 290, 300)])
def test_further_passes_are_judged_by_what_they_bring_themselves(
    brought: int, least: int, most: int
) -> None:
    rule = AskingRule(Pace(), StepCosts(1.0, 0.1))
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
    pace = Pace()
    pace.note(0.04, 2)
    rule = AskingRule(pace)

    def answered(num_behind: int, seconds: float) -> None:
        nonlocal now
        asked = AskedDraft(0, DraftTree.empty(), num_behind)
        now += seconds
        asked.note_first()
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
    estimate = GainEstimate()
    for _ in range(6):
        estimate.learn(0.1, 1.0, 0.5)
    assert not estimate.pays(0.1, TOKEN_S)
    for _ in range(7):
        estimate.learn(0.1, 1.0, 0.004, is_typical=False)
    assert estimate.pays(0.1, TOKEN_S)


def test_passes_that_are_not_told_apart_count_as_one() -> None:
    rule = AskingRule(Pace(), StepCosts(1.0, 0.1))
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
    pace = Pace()
    assert pace.token_s() == 0
    for number in range(40):
        pace.note(1.0 if number % 8 == 3 else 0.04, 3 if number % 2 else 1)
    assert pace.token_s() == pytest.approx(0.02, rel=0.01)


def test_a_reader_is_asked_while_the_pace_is_not_known() -> None:
    estimate = GainEstimate()
    for _ in range(50):
        assert estimate.pays(0.9, 0.0)
        estimate.learn(0.9, 0.0, 0.01)
