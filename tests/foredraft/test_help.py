"""The help of every command, on a terminal of 80 columns: whole names, real defaults, groups."""

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from enum import Enum
from pathlib import Path

import pytest

from foredraft import help_texts, program
from foredraft.help_texts import all_commands, kept_help
from foredraft.installation import EXTRAS
from indexer.flags import flag_of
from retriever.operations.settings import Settings

MANY_OPTIONS = 8


ALL = all_commands(tuple(EXTRAS))
HEAVY = {"torch", "transformers", "numba", "numpy", "typer", "pydantic", "rich", "indexer.flags"}


@pytest.fixture(params=ALL, ids=lambda name: name.replace(" ", "-"))
def shown(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> tuple[str, str]:
    """A command's name and its help."""
    monkeypatch.setenv("COLUMNS", "80")
    with suppress(SystemExit):
        ALL[request.param].main(["--help"], prog_name=f"foredraft {request.param}")
    return request.param, capsys.readouterr().out


def test_what_is_kept_is_what_the_command_prints(shown: tuple[str, str]) -> None:
    name, text = shown
    assert kept_help([*name.split(), "--help"]) == text, "run `make help-texts`"


def test_no_help_is_kept_of_commands_that_are_gone() -> None:
    names = {path.stem for path in Path(help_texts.__file__).with_name("help").iterdir()}
    assert names == {name.replace(" ", "-") for name in ALL}


def test_help_is_kept_for_help_alone_and_for_terminals_that_are_wide_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for columns, is_kept in (("79", False), ("80", True), ("200", True)):
        monkeypatch.setenv("COLUMNS", columns)
        assert (kept_help(["build", "--help"]) is not None) == is_kept
    for words in ([], ["build"], ["--help"], ["build", "x", "--help"], ["../build", "--help"]):
        assert kept_help(words) is None


@pytest.mark.parametrize("name", ALL)
def test_help_loads_no_library(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", ["foredraft", *name.split(), "--help"])
    monkeypatch.setattr(program, "launch", None)
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGPIPE)]
    program.main()
    assert f"Usage: foredraft {name} " in capsys.readouterr().out
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGPIPE)] == before


def test_a_reader_that_leaves_ends_help_in_silence() -> None:
    script = "from foredraft.program import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", script, "generate", "--help"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "COLUMNS": "80"},
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert not process.stderr.read()
    assert process.returncode == 1


def test_the_program_loads_no_library_for_help() -> None:
    script = "import sys, foredraft.program as p; p.main(); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script, "generate", "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "80"},
    )
    assert "--temperature " in done.stdout
    assert not HEAVY & set(done.stdout.splitlines()[-1].split())


def told_default(flag: str, value: object) -> str:
    """A default as people read it; of a pair of flags the one that holds."""
    if isinstance(value, bool):
        return flag if value else f"no-{flag}"
    if isinstance(value, list | tuple):
        return ", ".join(told_default(flag, each) for each in value)
    return str(value.value if isinstance(value, Enum) else value)


def test_no_name_is_cut_and_every_default_is_real(shown: tuple[str, str]) -> None:
    name, text = shown
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    words = set(re.findall(r"--?[a-z0-9-]+", text))
    flat = " ".join(text.split())
    for option in ALL[name].params:
        if option.param_type_name != "option":
            assert option.metavar in text
            continue
        assert {*option.opts, *option.secondary_opts} <= words
        begin = re.search(rf"^ +(-\w, )?{re.escape(option.opts[0])}\b", text, re.MULTILINE)
        assert begin, option.opts
        assert option.help or option.name == "help"
        default = option.default
        if default in (None, False, (), []) or option.name == "help" or callable(default):
            continue
        assert f"[default: {told_default(option.opts[0][2:], default)}" in flat, option.opts


def test_defaults_of_settings_are_told_where_a_file_may_set_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with suppress(SystemExit):
        ALL["serve"].main(["--help"], prog_name="foredraft serve")
    parts = re.split(r"^  (?=-)", capsys.readouterr().out, flags=re.MULTILINE)
    told = {part.split()[0]: " ".join(part.split()).replace("- ", "-") for part in parts}
    for name, field in Settings.model_fields.items():
        if field.default in (None, [], ()) or field.is_required():
            continue
        assert (
            f"[default: {told_default(flag_of(name)[2:], field.default)}]" in told[flag_of(name)]
        ), name


def test_many_options_are_shown_in_groups() -> None:
    for name, command in ALL.items():
        options = [o for o in command.params if o.param_type_name == "option" and o.name != "help"]
        ungrouped = [option.name for option in options if not option.rich_help_panel]
        assert len(options) <= MANY_OPTIONS or not ungrouped, name


def test_options_stand_below_the_title_of_their_group(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with suppress(SystemExit):
        ALL["generate"].main(["--help"], prog_name="foredraft generate")
    parts = re.split(r"^(\w+):\n", capsys.readouterr().out, flags=re.MULTILINE)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert "--model " in sections["Model"]
    assert "--temperature " in sections["Sampling"]
    assert "--json " in sections["Output"]
