"""Records what the project does, and compares that with another commit.

    python -m tests.golden record --output before.jsonl
    python -m tests.golden compare HEAD~3
    python -m tests.golden compare before.jsonl

`compare` runs the older commit in a worktree of its own, on this machine and with this environment,
by its own `tests/golden` or, where it has none, by the one of this checkout. It shows the first
step of each section that differs, and ends with 1 if any does. Values are equal bit for bit; with
`--rounding`, for commits between which kernels compute otherwise, as far as rounding allows.
`record --small` writes what holds on every machine: tests/data/golden.jsonl, a part of `make test`.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Final

import typer

from tests.golden.record import Difference, Record, Step, added, differences
from tests.golden.sections import MODULES, Scope, recorded

ROOT: Final = Path(__file__).parents[2]
_LIBRARIES: Final = ("numpy", "numba", "torch", "transformers", "tokenizers", "grpcio", "protobuf")
_FAILED: Final = 2
"""The status where there is nothing to compare; 1 is that something differs."""
_MOST_SHOWN: Final = 300
"""Characters of a value."""
_SHOWN_BEFORE: Final = 60
"""Those of them that both values have in common."""

app = typer.Typer(add_completion=False, help=__doc__)

Traces = Annotated[
    Path | None, typer.Option(help="A folder of recordings, NAME.test.jsonl.gz, to replay as well.")
]
Only = Annotated[list[str] | None, typer.Option(help="A section to record alone. Repeatable.")]


@app.command()
def record(
    output: Annotated[Path, typer.Option(help="The file to write.")],
    traces: Traces = None,
    only: Only = None,
    small: Annotated[bool, typer.Option(help="Record what `make test` compares.")] = False,  # noqa: FBT002
    rounding: Annotated[bool, typer.Option(help="Leave floats out of bytes.")] = False,  # noqa: FBT002
) -> None:
    """Record this checkout."""
    steps: list[Step] = []
    for section in _sections(only):
        with TemporaryDirectory() as scratch:
            scope = Scope(Path(scratch), small, rounding, traces)
            found = list(recorded(section, scope))
        typer.echo(f"{ROOT.name}: {section}: {len(found)} steps", err=True)
        steps += found
    options = _options(traces, only, small=small, rounding=rounding)
    made = {} if small else circumstances()
    Record({"options": " ".join(options), **made}, steps).write(output)


@app.command()
def compare(
    against: Annotated[str, typer.Argument(help="A commit, or a file that `record` wrote.")],
    traces: Traces = None,
    only: Only = None,
    rounding: Annotated[bool, typer.Option(help="Allow for rounding.")] = False,  # noqa: FBT002
) -> None:
    """Compare this checkout with an older commit or record."""
    options = _options(traces, only, small=False, rounding=rounding)
    with TemporaryDirectory() as folder:
        now, before = Path(folder) / "now.jsonl", Path(folder) / "before.jsonl"
        if Path(against).is_file():
            before = Path(against)
            options = Record.read(before).circumstances["options"].split()
            _record_all({ROOT: now}, options)
        else:
            with _worktree(against, Path(folder) / "before") as checkout:
                _record_all({ROOT: now, checkout: before}, options)
        old, new = Record.read(before), Record.read(now)
    _tell_circumstances(old, new)
    if not _told(old.steps, new.steps, rounding=rounding or "--small" in options):
        raise typer.Exit(1)


def _options(
    traces: Path | None, only: list[str] | None, *, small: bool, rounding: bool
) -> list[str]:
    """Return the options with which `record` does the same again."""
    return [
        *([f"--traces={traces.resolve()}"] if traces is not None else []),
        *(f"--only={section}" for section in only or ()),
        *(["--small"] if small else []),
        *(["--rounding"] if rounding else []),
    ]


def _sections(only: list[str] | None) -> list[str]:
    unknown = sorted(set(only or ()) - set(MODULES))
    if unknown:
        raise typer.BadParameter(f"{', '.join(unknown)}: sections are {', '.join(MODULES)}")
    return only or list(MODULES)


def circumstances() -> dict[str, str]:
    """Return the commit, the machine and the versions with which a record is made."""
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run(
        [*git, "describe", "--always", "--dirty", "--abbrev=12"],
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "commit": commit.stdout.strip() or "unknown",
        "machine": _processor(),
        "python": platform.python_version(),
        **{name: version(name) for name in _LIBRARIES},
    }


def _processor() -> str:
    """Return the model of the processor, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


@contextmanager
def _worktree(commit: str, folder: Path) -> Iterator[Path]:
    """Check a commit out beside this checkout; it brings its own recorder, or is given this one."""
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "prune"], check=False)  # of one that was killed
    made = subprocess.run(
        [*git, "add", "--quiet", "--detach", str(folder), commit],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        raise typer.BadParameter(f"{commit} is neither a file nor a commit: {made.stderr.strip()}")
    try:
        if not (folder / "tests" / "golden").is_dir():
            shutil.copytree(ROOT / "tests" / "golden", folder / "tests" / "golden")
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=False)


def _record_all(outputs: Mapping[Path, Path], options: list[str]) -> None:
    """Record checkouts at once, each with its own packages before those that are installed."""
    inherited = filter(None, [os.environ.get("PYTHONPATH")])
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.golden", "record", f"--output={output}", *options],
            cwd=root,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *inherited])},
        )
        for root, output in outputs.items()
    ]
    try:
        if any(process.wait() for process in running):
            typer.echo("recording failed: see above", err=True)
            raise typer.Exit(_FAILED)
    finally:
        for process in running:
            process.kill()
            process.wait()


def _tell_circumstances(old: Record, new: Record) -> None:
    """Say what was compared, and which circumstances differ."""
    one, other = old.circumstances, new.circumstances
    commits = (each.get("commit", "what every machine does") for each in (one, other))
    typer.echo(" and ".join(commits))
    for name in sorted(one.keys() - {"commit", "options"}):
        if one[name] != other.get(name):
            typer.echo(f"  {name}: {one[name]}, and {other.get(name)} now")


def _told(old: list[Step], new: list[Step], *, rounding: bool) -> bool:
    """Say what differs, by section; return whether nothing does."""
    found: dict[str, list[Difference]] = defaultdict(list)
    for each in differences(old, new, rounding=rounding):
        found[each.name.partition("/")[0]].append(each)
    more = added(old, new)
    for section in dict.fromkeys(step.section for step in chain(old, new)):
        count = sum(step.section == section for step in old)
        wrong = found[section]
        typer.echo(f"{section}: {count} steps, {len(wrong)} differ, {more[section]} are new")
        for each in wrong[:1]:
            typer.echo(f"  first {each.name}: {each.reason}")
            for word, value in zip(("before", "now   "), _shown(each), strict=True):
                typer.echo(f"    {word}: {value}")
    return not any(found.values())


def _shown(difference: Difference) -> list[str]:
    """Return both values as text, from shortly before the first character that differs."""
    texts = [json.dumps(each, ensure_ascii=False) for each in (difference.before, difference.after)]
    start = max(0, _num_common(*texts) - _SHOWN_BEFORE)
    ends = [start + _MOST_SHOWN < len(text) for text in texts]
    return [
        f"{'…' if start else ''}{text[start : start + _MOST_SHOWN]}{'…' if is_cut else ''}"
        for text, is_cut in zip(texts, ends, strict=True)
    ]


def _num_common(one: str, other: str) -> int:
    """Return how many characters two texts begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


if __name__ == "__main__":
    app()
