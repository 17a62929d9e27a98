"""The measurement of start-up: commands in turn, and the median of each."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.start_up import Spent, commands_in, medians, timed


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


def test_a_service_counts_until_it_is_ready(tmp_path: Path) -> None:
    script = tmp_path / "service.py"
    script.write_text(
        "import sys, time\nprint('loading', flush=True)\ntime.sleep(0.2)\n"
        "if 'broken' not in sys.argv: print('serving on 1', flush=True); time.sleep(60)\n"
    )
    assert 0.2 <= timed([sys.executable, str(script), "serve"]).wall_s < 30
    with pytest.raises(subprocess.CalledProcessError):
        timed([sys.executable, str(script), "serve", "broken"])


def test_all_commands_are_there(tmp_path: Path) -> None:
    commands = commands_in(tmp_path)
    assert {"help", "build", "explain", "replay", "serve"} < commands.keys()
    assert (tmp_path / "recorded.jsonl").exists()
