"""The help of every command, on a terminal of 80 columns: whole names, real defaults, groups."""

import re
from collections.abc import Iterator
from contextlib import suppress
from enum import Enum
from importlib import import_module
from typing import Any

import pytest
import typer

from foredraft.installation import EXTRAS
from indexer.flags import flag_of
from retriever.operations.settings import Settings

MANY_OPTIONS = 8


def commands() -> Iterator[tuple[str, Any]]:
    """All commands with their whole names, those of groups included."""
    for package in EXTRAS:
        yield from below(typer.main.get_command(import_module(f"{package}.commands").app), "")


def below(group: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name in group.list_commands(None):
        command, whole = group.get_command(None, name), f"{path} {name}".strip()
        yield whole, command
        if hasattr(command, "list_commands"):
            yield from below(command, whole)


ALL = dict(commands())


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
