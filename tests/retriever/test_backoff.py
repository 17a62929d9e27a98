"""Pauses grow, differ, end, and are as long as a failure deserves."""

import pytest

from retriever.backoff import Backoff, drafter_backoff


def test_pauses_double_up_to_the_last_and_begin_anew_after_a_success() -> None:
    backoff = Backoff(0.1, 0.5, draw=lambda: 1.0)
    assert [backoff.fail() for _ in range(5)] == pytest.approx([0.1, 0.2, 0.4, 0.5, 0.5])
    assert backoff.num_failures == 5
    backoff.succeed()
    assert backoff.num_failures == 0
    assert backoff.fail() == pytest.approx(0.1)


def test_half_of_a_pause_is_drawn() -> None:
    assert Backoff(1.0, draw=lambda: 0.0).fail() == pytest.approx(0.5)
    assert 0.5 <= Backoff(1.0).fail() <= 1.0


def test_failures_take_at_most_their_share_of_the_time() -> None:
    now = [0.0]
    backoff = Backoff(0.0, 0.0, share=0.05, clock=lambda: now[0])
    assert backoff.is_over()
    assert backoff.fail(took_s=1.0) == pytest.approx(19.0)
    now[0] = 18.9
    assert not backoff.is_over()
    now[0] = 19.1
    assert backoff.is_over()


def test_a_drafter_that_fails_at_once_is_asked_again_soon() -> None:
    backoff = drafter_backoff()
    assert backoff.fail(took_s=0.001) == pytest.approx(0.019)
    backoff.succeed()
    assert backoff.is_over()
