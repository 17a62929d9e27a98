"""The program `foredraft`: it knows every command, and starts the one that is named alone."""

import os
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest
import typer

from foredraft.installation import EXTRAS
from foredraft.program import commands

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "numba", "transformers", "numpy", "grpc"}


def run(*words: str, place: Path | None = None) -> "subprocess.CompletedProcess[str]":
    """Run the command, with modules of a place before all others."""
    path = os.pathsep.join(str(each) for each in (place, ROOT) if each)
    return subprocess.run(
        [sys.executable, "-m", "foredraft", *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "100"},
    )


def shown_and_loaded(*words: str) -> tuple[str, set[str]]:
    """What a command prints, and which modules it loads."""
    script = (
        "import atexit, sys\n"
        "atexit.register(lambda: print(*sys.modules, file=sys.stderr))\n"
        f"sys.argv = {['foredraft', *words]}\n"
        "from foredraft.program import main\nmain()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=ROOT
    )
    return done.stdout, set(done.stderr.split())


def test_every_command_of_the_packages_is_known() -> None:
    for module in {command.module for command in commands().values()}:
        app = typer.main.get_command(import_module(module).app)
        assert isinstance(app, typer.core.TyperGroup)
        known = {command.name for command in commands().values() if command.module == module}
        assert known == set(app.list_commands(typer.Context(app)))


def test_the_help_lists_the_commands_in_groups_and_loads_none() -> None:
    done = run("--help")
    assert (done.returncode, done.stderr) == (0, "")
    for group in ("index", "serve", "decode", "look"):
        names = [each.name for each in commands().values() if each.group == group]
        shown = done.stdout.split(f"\n{group}\n")[1].split("\n\n")[0].splitlines()
        assert [line.split()[0] for line in shown] == names
    assert max(map(len, done.stdout.splitlines())) <= 90
    _, loaded = shown_and_loaded("--help")
    assert "foredraft.program" in loaded
    assert not loaded & {"typer", "rich", "retriever.commands", "decoder.commands", *HEAVY}


def test_help_that_nobody_reads_to_its_end_is_no_error() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "foredraft", "--help"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    with process.stderr:
        assert process.stderr.read() == ""
    process.wait(timeout=30)


def test_without_a_word_the_help_goes_to_standard_error() -> None:
    done = run()
    assert (done.returncode, done.stdout, done.stderr) == (2, "", run("--help").stdout)


def test_the_version_is_told_at_once() -> None:
    assert run("--version").stdout == f"foredraft {version('foredraft')}\n"
    assert not shown_and_loaded("--version")[1] & {"typer", *HEAVY}


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("serv", "did you mean `foredraft serve`? "),
        ("Build", "did you mean `foredraft build`? "),
        ("bogus", ""),
        ("--verson", "did you mean `foredraft --version`? "),
        ("-x", ""),
    ],
)
def test_a_word_that_is_no_command_is_answered_with_the_nearest(word: str, meant: str) -> None:
    done = run(word, "--index", "my.index")
    kind = "option" if word.startswith("-") else "command"
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"error: there is no {kind} `{word}`: {meant}`foredraft --help` lists all commands\n"
    )


@pytest.mark.parametrize(
    ("name", "not_loaded"),
    [
        ("build", HEAVY - {"numpy"} | {"retriever", "decoder"}),
        ("serve", {"torch", "transformers", "decoder"}),
    ],
)
def test_a_command_has_its_own_name_and_starts_what_it_needs(
    name: str, not_loaded: set[str]
) -> None:
    command = commands()[name]
    shown, loaded = shown_and_loaded(name, "--help")
    assert f"Usage: foredraft {name} [OPTIONS]" in shown
    assert "python -m" not in shown
    assert command.module in loaded
    assert not loaded & not_loaded


def test_a_wrong_option_is_answered_in_the_name_of_the_command() -> None:
    done = run("build", "--bogus")
    assert done.returncode == 2
    assert "Try 'foredraft build --help' for help." in done.stderr


@pytest.mark.parametrize(("package", "extra"), EXTRAS.items())
def test_a_missing_library_is_answered_with_what_to_install(
    package: str, extra: str, tmp_path: Path
) -> None:
    (tmp_path / "typer.py").write_text("raise ModuleNotFoundError(name='typer')")
    name = next(each.name for each in commands().values() if each.package == package)
    done = run(name, place=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"error: typer is missing: run `pip install 'foredraft[{extra}]'`\n"
