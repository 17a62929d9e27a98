"""The part that the benchmarks of all engines share."""

import json
from pathlib import Path

import pytest

from benchmarks.engines.engine_prompts import sample_prompts
from benchmarks.engines.engine_report import (
    OVERALL,
    Run,
    Way,
    Whose,
    as_markdown,
    circumstances,
    report,
    write,
)
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


def test_reports_are_written_with_their_circumstances(tmp_path: Path) -> None:
    ways = [way(each.value, each, [4, 2, 6]) for each in Whose]
    contents = {**circumstances("numpy", model="tiny"), **report(PROMPTS, ways)}
    write(tmp_path / "report.json", contents)
    assert json.loads((tmp_path / "report.json").read_text()) == contents
    assert contents["engine"].startswith("numpy ")
    assert as_markdown(contents).count("| 1.000 | 1.2 | 3 of 3 |") == 3


def test_no_prompt_is_measured_that_was_answered_before(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    texts = [("sums", str(number)) for number in range(4)] + [("poems", "0"), ("poems", "ode")]
    lines = [json.dumps({"category": name, "turns": [text]}) for name, text in texts]
    path.write_text("\n".join(lines))
    sample = sample_prompts(path, 1, 2)
    assert [(each.category, each.text) for each in sample.measured] == [
        ("sums", "0"),
        ("poems", "ode"),
    ]
    assert [(each.category, each.text) for each in sample.warm] == [("sums", "1"), ("sums", "2")]
