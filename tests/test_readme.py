"""The README's commands run as they are written, in order."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
READY = "serving on "


def blocks() -> list[tuple[str, str]]:
    """Language and text of each fenced block that is meant to be run."""
    text = (ROOT / "README.md").read_text()
    return re.findall(r"^```(sh|python)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def services() -> Iterator[list["subprocess.Popen[str]"]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.terminate()
        process.communicate(timeout=60)


def run(script: list[str], services: list["subprocess.Popen[str]"], given: str = "") -> None:
    """Run a command to its end, or until it says that it serves."""
    if "serve" not in script:
        done = subprocess.run(
            script, cwd=ROOT, capture_output=True, text=True, check=False, input=given
        )
        assert done.returncode == 0, (script, done.stdout, done.stderr)
        return
    process = subprocess.Popen(script, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    services.append(process)
    assert process.stdout is not None
    assert process.stdout.readline().startswith(READY)


@pytest.mark.programs
def test_readme_commands_run(tmp_path: Path, services: list["subprocess.Popen[str]"]) -> None:
    found = blocks()
    assert {language for language, _ in found} == {"sh", "python"}
    for language, block in found:
        text = block.replace("my.index", f"{tmp_path}/my.index")
        text = text.replace("drafts.sock", f"{tmp_path}/drafts.sock")
        text = text.replace("passes.jsonl", f"{tmp_path}/passes.jsonl")
        if language == "python":
            run([sys.executable, "-W", "error", "-c", text], services)
            continue
        for line in text.splitlines():
            source, _, command = line.rpartition(" | ")
            given = subprocess.check_output(source.split(), cwd=ROOT, text=True) if source else ""
            words = re.findall(r'"[^"]*"|\S+', command)
            assert words[0] == "foredraft"
            command_line = [sys.executable, "-m", *(word.strip('"') for word in words)]
            run(command_line, services, given)
