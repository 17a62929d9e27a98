"""What costs time is asked for while it pays, and tried now and then once it does not."""

from itertools import groupby

import numpy as np
import pytest

from decoder.budget.payoff import FadingLine, FadingRatio, Payoff, RecentMedian

LONGEST = 16


def pauses(payoff: Payoff, gain: float, steps: int, longest: int = LONGEST) -> list[int]:
    """Return how long the pauses are while each answer gains so many units, worth a second."""
    asked = []
    for _ in range(steps):
        asked.append(payoff.is_due(1.0, 1.0, longest))
        if asked[-1]:
            payoff.learn(gain)
    return [len(list(run)) for is_asked, run in groupby(asked) if not is_asked]


def test_a_ratio_is_that_of_all_values_at_first_and_of_late_later() -> None:
    ratio = FadingRatio(0.9)
    assert ratio.value(default=7.0) == 7.0
    ratio.add(3.0)
    assert ratio.value() == 3.0
    ratio.add(1.0)
    assert ratio.value() == pytest.approx((0.9 * 3 + 1) / 1.9)
    for _ in range(200):
        ratio.add(6.0, 3.0)
    assert ratio.value() == pytest.approx(2.0)


def test_a_median_ignores_pauses_and_follows_what_lasts() -> None:
    median = RecentMedian(5)
    assert median.value() is None
    for value in (1.0, 1.0, 90.0, 1.0, 80.0):
        median.add(value)
    assert median.value() == 1.0
    for _ in range(3):
        median.add(3.0)
    assert median.value() == 3.0


def test_what_pays_is_asked_at_every_step() -> None:
    assert pauses(Payoff(0.9), 1.0, 100) == []


def test_pauses_double_while_nothing_is_gained() -> None:
    assert pauses(Payoff(0.9), 0.0, 80)[:7] == [1, 2, 4, 8, 16, 16, 16]


def test_what_takes_no_time_to_speak_of_is_asked_at_every_step() -> None:
    assert pauses(Payoff(0.9), 0.0, 80, longest=0) == []


def test_it_is_not_judged_before_it_was_tried() -> None:
    payoff = Payoff(0.9)
    assert payoff.is_due(1.0, 1.0, LONGEST)
    payoff.learn(0.0)
    assert not payoff.is_due(1.0, 1.0, LONGEST)


def test_one_answer_that_pays_may_end_the_pauses() -> None:
    for latest_counts in (False, True):
        payoff = Payoff(0.9, latest_counts=latest_counts)
        pauses(payoff, 0.0, 80)
        payoff.learn(2.0)
        assert payoff.is_due(1.0, 1.0, LONGEST) == latest_counts


def test_pauses_begin_again_at_one_after_it_paid() -> None:
    payoff = Payoff(0.5)
    pauses(payoff, 0.0, 80)
    assert pauses(payoff, 9.0, 40)[1:] == []
    assert pauses(payoff, 0.0, 40)[:3] == [1, 2, 4]


def test_a_change_of_pace_is_heeded_during_a_pause() -> None:
    payoff = Payoff(0.9)
    for _ in range(20):
        if payoff.is_due(1.0, 1.0, LONGEST):
            payoff.learn(0.5)
    assert not payoff.is_due(1.0, 1.0, LONGEST)
    assert payoff.is_due(2.0, 1.0, LONGEST)


def test_encouraged_it_is_asked_in_the_next_step_and_then_paused_again() -> None:
    payoff = Payoff(0.9)
    payoff.learn(0.0)
    payoff.encourage()
    assert payoff.is_due(1.0, 1.0, LONGEST)
    payoff.learn(0.0)
    assert pauses(payoff, 0.0, 20)[0] == 2


def test_a_line_is_fitted_to_the_latest_points() -> None:
    line = FadingLine(0.99, 4.0, at_0=1.0, at_1=0.0)
    assert [line.at(x) for x in (0.0, 0.5, 1.0)] == pytest.approx([0.8, 0.5, 0.2], abs=0.2)
    random = np.random.default_rng(0)
    for slope in (2.0, -1.0):
        points = []
        for _ in range(1000):
            line.fade()
            points.append((float(random.random()), float(random.normal())))
            points[-1] = (points[-1][0], 0.3 + slope * points[-1][0] + 0.1 * points[-1][1])
            line.add(*points[-1])
        weights = 0.99 ** np.arange(999, -1, -1.0)
        x, y = np.array(points).T
        expected = np.polyfit(x, y, 1, w=np.sqrt(weights))
        assert line.at(0.25) == pytest.approx(np.polyval(expected, 0.25), abs=0.02)
        assert line.at(1.0) - line.at(0.0) == pytest.approx(slope, abs=0.2)


def test_few_points_show_little_of_a_slope() -> None:
    line = FadingLine(1.0, 1e-9, at_0=0.0, at_1=0.0)
    for x, y in ((0.4, 0.0), (0.6, 1.0)):
        line.add(x, y)
    assert line.at(0.5) == pytest.approx(0.5)
    assert 0 < line.at(1.0) - line.at(0.0) < 1
