"""The help of every command, on a terminal of 80 columns: whole names, real defaults, groups."""

import os
import re
import subprocess
import sys
from contextlib import suppress
from enum import Enum

import pytest

from decoder.plugins.contenders.drafting_rules import PROMPT_LOOKUP
from decoder.plugins.contenders.registry import DEFAULT, TABLES
from decoder.plugins.estimate.options import EstimatedDrafts
from indexer.flags import flag_of
from retriever.commands.factories import OWN
from retriever.operations.settings import Settings
from tests.foredraft.all_commands import ALL

MANY_OPTIONS = 8


HEAVY = {"torch", "transformers", "numba"}


def help_of(name: str) -> str:
    """The flag that lists every option of a command."""
    has_all = any(option.name == "help_all" for option in ALL[name].params)
    return "--help-all" if has_all else "--help"


@pytest.fixture(params=ALL, ids=lambda name: name.replace(" ", "-"))
def shown(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> tuple[str, str]:
    """A command's name and its help."""
    monkeypatch.setenv("COLUMNS", "80")
    with suppress(SystemExit):
        ALL[request.param].main([help_of(request.param)], prog_name=f"foredraft {request.param}")
    return request.param, capsys.readouterr().out


def test_help_of_every_command_comes_without_libraries_that_compute() -> None:
    script = (
        "import sys\n"
        "from contextlib import suppress\n"
        "from foredraft.program import main\n"
        "for line in sys.stdin.read().splitlines():\n"
        "    sys.argv = ['foredraft', *line.split(), '--help']\n"
        "    with suppress(SystemExit):\n"
        "        main()\n"
        "    print('loaded', line, *sys.modules, sep='\\t')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        input="\n".join(ALL),
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "80"},
    )
    lines = done.stdout.splitlines()
    loaded = [line.split("\t")[1:] for line in lines if line.startswith("loaded\t")]
    assert {name: HEAVY & set(modules) for name, *modules in loaded} == {
        name: set() for name in ALL
    }
    assert [line for line in lines if line.startswith("Usage: ")] == [
        line for line in lines if line.startswith("Usage: foredraft ")
    ]


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
        assert option.help or option.name in {"help", "help_all"}
        default = option.default
        if (
            default in (None, False, (), [])
            or option.name in {"help", "help_all"}
            or callable(default)
        ):
            continue
        assert f"[default: {told_default(option.opts[0][2:], default)}" in flat, option.opts


def test_defaults_of_settings_are_told_where_a_file_may_set_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with suppress(SystemExit):
        ALL["serve"].main([help_of("serve")], prog_name="foredraft serve")
    parts = re.split(r"^  (?=-)", capsys.readouterr().out, flags=re.MULTILINE)
    told = {part.split()[0]: " ".join(part.split()).replace("- ", "-") for part in parts}
    for name, field in Settings.model_fields.items():
        if field.default in (None, [], ()) or field.is_required():
            continue
        assert (
            f"[default: {told_default(flag_of(name)[2:], field.default)}]" in told[flag_of(name)]
        ), name


def test_the_help_of_a_service_lists_what_most_need(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with suppress(SystemExit):
        ALL["serve"].main(["--help"], prog_name="foredraft serve")
    listed = re.findall(r"^  (--[a-z-]+)", capsys.readouterr().out, re.MULTILINE)
    assert 15 < len(listed) <= 25
    assert {"--index", "--access", "--admin-address", "--help-all"} <= set(listed)


def test_many_options_are_shown_in_groups() -> None:
    for name, command in ALL.items():
        options = [
            o
            for o in command.params
            if o.param_type_name == "option" and o.name not in {"help", "help_all"}
        ]
        ungrouped = [option.name for option in options if not option.rich_help_panel]
        assert len(options) <= MANY_OPTIONS or not ungrouped, name


def test_options_stand_below_the_title_of_their_group(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with suppress(SystemExit):
        ALL["generate"].main(["--help-all"], prog_name="foredraft generate")
    parts = re.split(r"^(\w+):\n", capsys.readouterr().out, flags=re.MULTILINE)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert "--model " in sections["Model"]
    assert "--temperature " in sections["Sampling"]
    assert "--json " in sections["Output"]


@pytest.mark.plugin("decoder.plugins.bench", "retriever.plugins.replay")
def test_help_names_what_is_measured_where_nothing_is_named() -> None:
    bench = {option.name: option.help for option in ALL["bench"].params}
    assert f"Default: {', '.join(DEFAULT)}." in bench["contender"]
    assert f"also {TABLES}." in bench["parallel"]
    estimate = {option.name: option.help for option in ALL["estimate"].params}
    assert f"Default: {PROMPT_LOOKUP}." in estimate["drafter"]
    assert EstimatedDrafts().drafter == [PROMPT_LOOKUP]
    replay = {option.name: option.default for option in ALL["replay"].params}
    assert replay["drafter"] == OWN
