"""Probabilities of any drafter converge to the share of nodes that come true."""

import numpy as np
import pytest

from decoder.budget.calibration import Calibration, DraftCalibration
from retriever.tree import ROOT, DraftTree, Source

STATED = np.array([0.6, 0.3])
EDGES = (0.25, 0.5)


def calibration(most_from_draft: float = np.inf) -> Calibration:
    return Calibration(EDGES, decay=0.99, prior_nodes=4.0, most_from_draft=most_from_draft)


def sources(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.array(numbers, np.uint8)


def test_probabilities_stay_until_something_is_learned() -> None:
    assert calibration().corrected(STATED) == pytest.approx(STATED)
    assert len(calibration().corrected(np.empty(0))) == 0


def test_calibration_turns_to_what_comes_true() -> None:
    rng = np.random.default_rng(0)
    calibrating = calibration()
    for _ in range(600):
        is_first = rng.random() < 0.9
        calibrating.learn(STATED, np.array([is_first, False]))
    sure, unsure = calibrating.corrected(STATED)
    assert sure == pytest.approx(0.9, abs=0.08)
    assert unsure < 0.05
    assert np.all(np.diff(calibrating.corrected(np.linspace(1, 0, 300))) <= 0)


def test_sources_are_told_apart_and_lean_on_each_other() -> None:
    calibrating = calibration()
    for _ in range(200):
        calibrating.learn(STATED, np.array([True, False]), sources(1, 1))
        calibrating.learn(STATED, np.array([False, False]), sources(2, 2))
    right = calibrating.corrected(STATED[:1], sources(1))[0]
    wrong = calibrating.corrected(STATED[:1], sources(2))[0]
    unseen = calibrating.corrected(STATED[:1], sources(3))[0]
    assert wrong < 0.1
    assert right > 0.9
    assert wrong < unseen < right


def test_a_source_may_come_later_whatever_its_number() -> None:
    calibrating = calibration()
    for _ in range(50):
        calibrating.learn(STATED, np.array([False, False]), sources(1, 1))
    before = calibrating.corrected(STATED[:1], sources(1))[0]
    assert calibrating.corrected(STATED[:1], sources(200))[0] < STATED[0]
    assert calibrating.corrected(STATED[:1], sources(1))[0] == before
    for _ in range(200):
        calibrating.learn(STATED, np.array([True, False]), sources(200, 200))
    assert calibrating.corrected(STATED[:1], sources(200))[0] > 0.9


def test_one_draft_says_no_more_than_it_may() -> None:
    wrong, many = np.zeros(9, np.bool_), np.full(9, 0.9)
    bounded, free = calibration(most_from_draft=1.0), calibration()
    for each in (bounded, free):
        each.learn(many, wrong)
    assert bounded.corrected(many)[0] == pytest.approx(0.9 * 4 / (4 + 1))
    assert free.corrected(many)[0] == pytest.approx(0.9 * 4 / (4 + 8.1))


def test_what_is_forgotten_counts_for_less() -> None:
    calibrating = calibration()
    for _ in range(50):
        calibrating.learn(STATED, np.array([False, False]))
    before = calibrating.corrected(STATED)
    calibrating.forget(0.1)
    assert np.all(calibrating.corrected(STATED) > before)
    calibrating.forget(0.0)
    assert calibrating.corrected(STATED) == pytest.approx(STATED)


def test_a_drafter_that_is_right_again_is_believed_within_ten_drafts() -> None:
    tree = DraftTree.checked([4, 5], [ROOT, 0], [0.9, 0.8], [Source.CONTEXT] * 2)
    calibrating = DraftCalibration()
    nothing = np.empty(0, np.int64)
    for _ in range(200):
        assert not calibrating.learn(calibrating.corrected(tree), 2, nothing, 9)
    assert calibrating.corrected(tree).probabilities[0] < 0.1
    for _ in range(10):
        assert calibrating.learn(calibrating.corrected(tree), 0, nothing, 4)
    assert calibrating.corrected(tree).probabilities[0] > 0.5


def test_what_was_not_verified_is_judged_as_far_as_it_is_known() -> None:
    """The second node comes true beyond the cut; whether the third does is not known yet."""
    tree = DraftTree.checked([4, 5, 6], [ROOT, 0, 1], [0.9, 0.7, 0.5], [Source.CONTEXT] * 3)
    calibrating = DraftCalibration()
    stated = calibrating.corrected(tree)
    assert calibrating.learn(stated, 1, np.array([0]), 5)
    again = calibrating.corrected(tree)
    sure, second, third = again.probabilities
    assert sure > stated.probabilities[0]
    assert second > stated.probabilities[1]
    assert third == pytest.approx(stated.probabilities[2])
    assert not calibrating.learn(again, 0, np.empty(0, np.int64), 9)  # as this draft begins
    empty = calibrating.corrected(DraftTree.empty())
    assert not calibrating.learn(empty, 0, np.empty(0, np.int64), 4)
