"""The measurement of start-up: commands in turn, and the median of each."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.start_up import Spent, commands_in, medians


def test_commands_run_in_turn_and_the_median_counts() -> None:
    order: list[str] = []
    times = iter([1.0, 10.0, 5.0, 10.0, 3.0, 40.0])

    def run(command: Sequence[str]) -> Spent:
        order.append(command[0])
        wall_s = next(times)
        return Spent(wall_s, wall_s / 2)

    found = medians({"a": ["a"], "b": ["b"]}, 3, run)
    assert order == ["a", "b"] * 3
    assert found == {"a": Spent(3.0, 1.5), "b": Spent(10.0, 5.0)}


def test_all_commands_are_there(tmp_path: Path) -> None:
    commands = commands_in(tmp_path)
    assert {"help", "build", "explain", "replay", "serve"} < commands.keys()
    assert (tmp_path / "recorded.jsonl").exists()
