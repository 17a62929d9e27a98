"""The suite's parts are run by name, and what a busy machine breaks is tried again."""

import subprocess
from pathlib import Path

import pytest

from tests.patience import ROUNDS, can_be_kept, free_port, must_hold
from tests.suite_parts import PARTS, SEEDS, cases, draws_all_cases

ROOT = Path(__file__).parent.parent


def recipe(target: str) -> str:
    """Return what make would run for a target whose environment is there."""
    command = ["make", "--dry-run", "--always-make", "PYTHON=python3", target]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    ).stdout


def test_a_release_runs_every_part_by_its_name() -> None:
    everything = recipe("test-all")
    for part in (*PARTS, SEEDS):
        (line,) = [each for each in recipe(f"test-{part}").splitlines() if "pytest " in each]
        assert f"--part {part}" in line
        assert line in everything
    assert "tests/decoder/plugins/vllm" in everything
    assert "test_ray.py" in everything


def test_few_cases_are_drawn_unless_all_are_asked_for() -> None:
    assert cases(3, of=300) == (300 if draws_all_cases() else 3)


def test_what_a_busy_machine_breaks_is_tried_again(tmp_path: Path) -> None:
    folders = []

    @can_be_kept
    def late_but_once(tmp_path: Path, rounds: int) -> None:
        folders.append(tmp_path)
        assert len(folders) == rounds, "late"

    late_but_once(tmp_path=tmp_path, rounds=ROUNDS)
    assert len(set(folders)) == ROUNDS
    with pytest.raises(AssertionError, match="late"):
        late_but_once(tmp_path=tmp_path / "1", rounds=1)


def test_what_must_hold_is_tried_once() -> None:
    tries = []

    @can_be_kept
    def wrong() -> None:
        tries.append(1)
        must_hold(holds=False, what="the output is another one")

    with pytest.raises(pytest.fail.Exception, match="another"):
        wrong()
    assert len(tries) == 1


def test_ports_are_free_and_none_that_others_are_given() -> None:
    ports = [free_port() for _ in range(50)]
    assert len(set(ports)) == 50
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert 1024 < min(ports) < max(ports) < lowest
