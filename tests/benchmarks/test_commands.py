"""Every command says what it takes, and the service's is run once, with few steps."""

import json
from pathlib import Path

import pytest

from tests.benchmarks.conftest import Runner, run_apart

ROOT = Path(__file__).parents[2]


def is_command(path: Path) -> bool:
    text = path.read_text()
    return path.name == "__main__.py" or ("typer.run(" in text and 'if __name__ == "__' in text)


COMMANDS = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "benchmarks").rglob("*.py")
    if is_command(path)
)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_says_what_it_takes(command: str, run: Runner) -> None:
    try:
        ended = run(command, "--help")
    except ModuleNotFoundError as error:
        if error.name != "llama_cpp":
            raise
        pytest.skip("llama-cpp-python is not installed")
    assert ended.status == 0, ended.stderr
    assert "Usage" in ended.stdout
    assert "--help" in ended.stdout


def test_every_path_of_the_service_is_measured(tmp_path: Path) -> None:
    output = tmp_path / "service.json"
    few = ("--steps", 100, "--streams", 4, "--seconds", 3)
    ended = run_apart("benchmarks.serving.service", *few, "--json", "--output", output)
    assert ended.status == 0, ended.stderr
    figures = json.loads(output.read_text())
    assert json.loads(ended.stdout) == figures
    for part in ("one_sequence", "large_steps"):
        assert figures[part]["failed"] == 0
    for part in ("alone", "beside_wide", "streams"):
        assert figures[part]["errors"] == 0
        assert figures[part]["steps"] > 0
