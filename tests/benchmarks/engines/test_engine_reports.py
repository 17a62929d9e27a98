"""The part that the benchmarks of all engines share."""

import pytest

from benchmarks.engines.engine_report import OVERALL, Run, Way, Whose, report
from decoder.commands.prompts import Prompt

PROMPTS = [Prompt("sums", "one"), Prompt("sums", "two"), Prompt("poems", "three")]


def way(name: str, whose: Whose, steps: list[int], last_token: int = 5) -> Way:
    outputs = [[1, 2, 3, 4], [1, 2], [1, 2, 3, 4, 5, last_token]]
    return Way(
        name,
        whose,
        [Run(ids, num, num / 10) for ids, num in zip(outputs, steps, strict=True)],
    )


def test_ours_is_set_against_the_best_of_the_engine() -> None:
    ways = [
        way("alone", Whose.PLAIN, [4, 2, 6]),
        way("worse", Whose.ENGINE, [4, 2, 5]),
        way("better", Whose.ENGINE, [4, 1, 5]),
        way("drafted", Whose.OURS, [2, 1, 3], last_token=6),
    ]
    found = report(PROMPTS, ways)
    assert found["ways"]["better"][OVERALL]["tokens_per_step"] == 1.2
    assert found["ways"]["drafted"]["sums"]["num_tokens"] == 6
    same = [found["ways"][each.name][OVERALL]["num_identical"] for each in ways]
    assert same == [3, 3, 3, 2]
    comparison = found["comparison"]
    assert comparison["engine_most_tokens_per_step"] == comparison["engine_quickest"] == "better"
    ours = comparison["ours"]["drafted"]
    assert ours["tokens_per_step_over_engine"][OVERALL] == pytest.approx(10 / 6)
    assert ours["tokens_per_step_over_engine"]["poems"] == pytest.approx(5 / 3)
    assert ours["speed_over_plain"] == pytest.approx(2.0)
