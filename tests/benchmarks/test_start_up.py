"""The measurement of start-up: commands in turn, and the median of each."""

import sys
from collections.abc import Sequence

from benchmarks.start_up import Spent, medians, timed


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


def test_time_of_processors_is_that_of_the_command() -> None:
    idle = timed([sys.executable, "-c", "import time; time.sleep(0.3)"])
    assert idle.wall_s >= 0.3
    assert idle.cpu_s < idle.wall_s
