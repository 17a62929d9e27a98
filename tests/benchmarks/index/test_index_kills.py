"""A writer may be killed at any instant; `benchmarks/index/index_kills.py` does so."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.faults
def test_killed_writers_leave_one_whole_index_and_a_free_lock() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "benchmarks/index/index_kills.py",
            "--rounds",
            "20",
            "--seed",
            "5",
            "--json",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    figures = json.loads(done.stdout)
    assert sum(figures["killed"].values()) + figures["finished"] == figures["rounds"]
    assert sum(figures["killed"].values()) >= 3  # the others were quicker
    assert figures["leftovers"] > 0  # kills came before the end
