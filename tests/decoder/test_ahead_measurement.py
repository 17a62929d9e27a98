"""The measurement of drafts ahead decodes its texts, and tells steps that were guessed apart."""

import pytest

from benchmarks.decoding.draft_ahead import Measured, _drafter, _measure, _settings, workloads


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("parallel", [1, 2])
def test_outputs_are_the_texts_and_drafts_are_answered_ahead(
    parallel: int,
    is_fused: bool,  # noqa: FBT001
) -> None:
    of_kinds, earlier = workloads(80)
    settings = [
        Measured("edited", "process", 0.0, num_ahead, parallel, is_fused) for num_ahead in (0, 16)
    ]
    with _drafter("process", earlier[:1]) as drafter:
        for setting in settings:
            _measure(setting, drafter, of_kinds["edited"], 0.01, 8)
    asked, ahead = settings
    assert asked.is_identical
    assert ahead.is_identical
    assert asked.share_ahead == asked.outcomes == 0.0
    assert ahead.share_ahead > 0.0
    assert ahead.outcomes > 1.0
    assert ahead.tokens_per_pass > 1.0


def test_figures_are_medians_over_rounds() -> None:
    rounds = [
        Measured("new", "process", 1.0, 5, 1, is_fused=False, outcomes=number, is_identical=True)
        for number in (4.0, 9.0, 5.0)
    ]
    for setting, quartiles in zip(rounds, ([1.0, 2.0, 3.0], [], [2.0, 6.0, 9.0]), strict=True):
        setting.beyond_pass_ms = quartiles
    together = Measured.over(rounds)
    assert (together.outcomes, together.num_rounds, together.is_identical) == (5.0, 3, True)
    assert together.beyond_pass_ms == [1.5, 4.0, 6.0]
    rounds[1].is_identical = False
    assert not Measured.over(rounds).is_identical


def test_each_setting_stands_beside_the_one_that_asks_afterwards() -> None:
    settings = _settings(["process"], ["new"], [1.0, 3.0], [5])
    assert [(each.away_ms, each.num_ahead) for each in settings[:4]] == [
        (1.0, 0),
        (1.0, 5),
        (3.0, 0),
        (3.0, 5),
    ]
    assert {(each.parallel, each.is_fused) for each in settings} == {
        (1, False),
        (1, True),
        (2, False),
    }
