"""The help of every command, kept as text: libraries take seconds to import, help should not.

`python -m foredraft.help_texts` writes the texts anew; a test compares them with the commands.
"""

import shutil
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

COLUMNS: Final = 80
"""Of the texts. Wider terminals get the same ones, narrower ones are written for by the command."""

_MARGIN: Final = 2
"""Columns that the library for command lines leaves free at the right."""

_FOLDER: Final = Path(__file__).parent / "help"


def kept_help(arguments: Sequence[str]) -> str | None:
    """Return what a command line prints that asks for help alone; `None` where it does not.

    Args:
        arguments: behind the program's name.
    """
    *words, last = arguments or [""]
    is_name = all(word.isidentifier() for word in words)
    if last != "--help" or not is_name or shutil.get_terminal_size().columns < COLUMNS:
        return None
    path = _path_of(words)
    return path.read_text(encoding="utf-8") if path.is_file() else None


def all_commands(packages: Sequence[str]) -> dict[str, Any]:
    """Return all commands by their whole names, those of groups included."""
    from typer.main import get_command  # noqa: PLC0415  (what is kept needs no library)

    apps = (get_command(import_module(f"{package}.commands").app) for package in packages)
    return {name: command for app in apps for name, command in _below(app, "")}


def help_of(name: str, command: Any) -> str:
    """Return the help of a command, as it prints it."""
    with command.make_context(
        f"foredraft {name}", [], resilient_parsing=True, terminal_width=COLUMNS - _MARGIN
    ) as context:
        return f"{command.get_help(context)}\n"


def _below(group: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name in group.list_commands(None):
        command, whole = group.get_command(None, name), f"{path} {name}".strip()
        yield whole, command
        if hasattr(command, "list_commands"):
            yield from _below(command, whole)


def _path_of(words: Sequence[str]) -> Path:
    return _FOLDER / f"{'-'.join(words)}.txt"


def _write(packages: Sequence[str]) -> None:
    """Write the texts, and remove those of commands that are gone."""
    texts = {_path_of(n.split()): help_of(n, c) for n, c in all_commands(packages).items()}
    _FOLDER.mkdir(exist_ok=True)
    for path in set(_FOLDER.iterdir()) - texts.keys():
        path.unlink()
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    from foredraft.installation import EXTRAS

    _write(tuple(EXTRAS))
