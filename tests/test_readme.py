"""The commands of the README and of the docs run as they are written, in order."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperGroup
from typer.main import get_command

from docs.site.pictures import TERMINAL_WIDTH, WIDTH
from foredraft.program import commands

ROOT = Path(__file__).parent.parent
READY = "serving on "
# Each page with those whose commands come before its own.
PAGES = {
    "README.md": ["README.md"],
    "tutorial": ["docs/tutorial.md"],
    "how-to": [f"docs/how-to/{name}.md" for name in ("indexing", "generating", "serving")],
}
GENERATING = "docs/how-to/generating.md"  # its Python: tests/decoder/test_examples.py
MOST_WORDS = 665
# On a busy machine, where wide passes are expensive, less is drafted than the README shows, and an
# answer that repeats itself counts for the context: 9% came from the index there, 15% elsewhere.
LEAST_FROM_INDEX = 0.06
OWN_ANSWERS = re.compile(r"(?:answers|trie)\.index")
MOST_COLUMNS = 100
# Files that commands of pages write: in a test into a folder of its own.
NAMES = ("my.index", "answers.index", "trie.index", "drafts.sock", "passes.html", "page.html")


def blocks(page: str) -> list[tuple[str, str]]:
    """Language and text of each fenced block that is meant to be run."""
    languages = "sh" if page == GENERATING else "sh|python"  # those programs want a model's folder
    text = (ROOT / page).read_text()
    return re.findall(rf"^```({languages})\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def services() -> Iterator[list["subprocess.Popen[str]"]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.terminate()
        process.communicate(timeout=60)


def run(script: list[str], services: list["subprocess.Popen[str]"], given: str = "") -> str:
    """Run a command to its end, or until it says that it serves; return what it printed."""
    if "serve" not in script:
        done = subprocess.run(
            script, cwd=ROOT, capture_output=True, text=True, check=False, input=given
        )
        assert done.returncode == 0, (script, done.stdout, done.stderr)
        return done.stdout
    process = subprocess.Popen(script, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    services.append(process)
    assert process.stdout is not None
    first = process.stdout.readline()
    assert first.startswith(READY)
    return first


def run_block(language: str, text: str, services: list["subprocess.Popen[str]"]) -> Iterator[str]:
    if language == "python":
        yield run([sys.executable, "-W", "error", "-c", text], services)
        return
    for line in text.splitlines():
        given = ""
        for command in line.split(" | "):
            words = shlex.split(command)
            if line.startswith("foredraft generate --index") and OWN_ANSWERS.search(line):
                words.append("--json")
            program = [sys.executable, "-m"] if words[0] == "foredraft" else []
            given = run([*program, *words], services, given)
        yield given


@pytest.mark.programs
@pytest.mark.parametrize("pages", PAGES.values(), ids=PAGES)
def test_commands_run(
    pages: list[str], tmp_path: Path, services: list["subprocess.Popen[str]"]
) -> None:
    found = [block for page in pages for block in blocks(page)]
    assert {language for language, _ in found} == {"sh", "python"}
    for language, block in found:
        text = block
        for name in NAMES:
            text = text.replace(name, f"{tmp_path}/{name}")
        text = re.sub(r"(?<![\w/])passes\.jsonl", f"{tmp_path}/passes.jsonl", text)
        for printed in run_block(language, text, services):
            if printed.startswith("{"):
                share_of_index = drawn_from_index(json.loads(printed))
                assert share_of_index > LEAST_FROM_INDEX, printed
            if language == "python" and pages == ["README.md"]:
                assert in_shape(printed.splitlines(), shown_output()), printed


def drawn_from_index(report: dict[str, Any]) -> float:
    """The share of an answer's tokens that came from an index."""
    accepted = report["accepted"]
    found: int = accepted.get("corpus", 0) + accepted.get("phrases", 0)
    return found / int(report["num_tokens"])


def shown_output() -> list[str]:
    """The lines that the README shows as the output of its program."""
    [output] = re.findall(
        r"^```text\n(.*?)\n```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    return str(output).splitlines()


# Where the machine got other work since costs were measured, it isn't known.
WORTH = re.compile(r"[\d.]+x plain decoding|the speedup from drafts is not known now")


def in_shape(lines: list[str], shown: list[str]) -> bool:
    """Whether a program says as much, and of as much gain, as what is shown."""
    tokens = [
        re.search(r"^(\d+) tokens, .* ([\d.]+) tokens per pass", each[0]) for each in (lines, shown)
    ]
    worth = [WORTH.match(each[1]) for each in (lines, shown)]
    assert all(tokens), (lines, shown)
    assert all(worth), (lines, shown)
    printed, expected = (each.groups() for each in tokens if each)
    return printed[0] == expected[0] and float(printed[1]) > 1.0


def test_the_readme_is_short_and_wrapped() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(re.findall(r"[^\s|]+", text)) <= MOST_WORDS
    prose = (line for line in text.splitlines() if not line.startswith(("|", "64 tokens")))
    assert max(map(len, prose)) <= MOST_COLUMNS


def test_the_readme_shows_both_pictures_at_their_width() -> None:
    text = (ROOT / "README.md").read_text()
    shown = re.findall(r'<img src="docs/pictures/(\w+)\.svg" width="(\d+)" alt="[^"]{40,}"', text)
    assert shown == [("speed", str(WIDTH)), ("demo", str(TERMINAL_WIDTH))]


def test_every_command_that_pages_show_is_one() -> None:
    known = set(commands())
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        fenced = re.findall(r"^```(?:sh)?\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
        for line in "\n".join(fenced).splitlines():
            for name in re.findall(r"(?:^|\| )foredraft (\w+)", line):
                assert name in known, f"{page.relative_to(ROOT)}: {line}"


def test_options_that_pages_show_are_those_of_their_commands() -> None:
    num_options = 0
    for page, line in shown_commands():
        words = line.split()
        command, rest = command_of(words)
        known = {option for each in command.params for option in (*each.opts, *each.secondary_opts)}
        shown = {word.partition("=")[0] for word in rest if re.match(r"--\w", word)} - {"--help"}
        assert shown <= known, f"{page}: `{line}`: {sorted(shown - known)}"
        num_options += len(shown)
    assert num_options > 60


def shown_commands() -> Iterator[tuple[str, str]]:
    """Page and command line of each call of `foredraft` in a block or in code within a text."""
    pages = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        if page.parent.name == "decisions":  # these tell of the day when they were written
            continue
        text = page.read_text().replace("\\\n", " ")
        fenced = re.compile(r"^```[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
        lines = [line for block in fenced.findall(text) for line in block.splitlines()]
        lines += re.findall(r"`([^`\n]+)`", fenced.sub("", text))
        for line in lines:
            called = re.search(r"(?:^|[|;&/] ?|\$ )foredraft ([a-z]+(?: [^|;&#]*)?)", line)
            if called and called[1].split()[0] in commands():
                yield str(page.relative_to(ROOT)), called[1]


def command_of(words: list[str]) -> tuple[Any, list[str]]:
    """Return the command, or the one within a group, that a line calls, and what follows it."""
    command: Any = get_command(import_module(commands()[words[0]].module).app)
    while words and isinstance(command, TyperGroup):
        inner = command.get_command(typer.Context(command), words[0])
        assert inner, words
        command, words = inner, words[1:]
    return command, words


def test_make_targets_that_pages_show_are_there() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    for parts in re.findall(r"^(?:ALONE|TOGETHER) := (.*)$", makefile, re.MULTILINE):
        targets |= {f"test-{part}" for part in parts.split()}
    for page in (
        ROOT / "README.md",
        ROOT / "docs" / "CONTRIBUTING.md",
        ROOT / "docs" / "tutorial.md",
    ):
        named = re.findall(r"(?:^|`)make ([\w-]+)", page.read_text(), re.MULTILINE)
        assert named
        for name in named:
            assert name in targets or name == "test-all", f"{page.name}: make {name}"


def test_the_lines_for_vllm_name_the_proposer_and_settings_that_there_are() -> None:
    """With vLLM itself they are run by the example that `make test-engine-vllm` tests."""
    page = "docs/how-to/engines.md"
    [block] = re.findall(
        r"^```python\n(LLM\(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL
    )
    compile(block, page, "exec")
    module, name = re.findall(r'"foredraft\.(\w+)\.(\w+)"', block)[0]
    assert f" {name} as {name}" in (ROOT / "foredraft" / f"{module}.pyi").read_text()
    example = (ROOT / "examples" / "vllm_generate.py").read_text()
    for word in re.findall(r'(\w+)=|"(\w+)":', block):
        assert any(each and each in example for each in word), word
