"""All commands of the packages, by their whole names: `admin sessions`, `build`."""

from collections.abc import Iterator
from importlib import import_module
from typing import Any, Final

from typer.main import get_command

from foredraft.program import commands


def _below(group: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    for name in group.list_commands(None):
        command, whole = group.get_command(None, name), f"{path} {name}".strip()
        yield whole, command
        if hasattr(command, "list_commands"):
            yield from _below(command, whole)


_MODULES: Final = dict.fromkeys(command.module for command in commands().values())
_APPS: Final = [import_module(module).app for module in _MODULES]
ALL: Final = {name: command for app in _APPS for name, command in _below(get_command(app))}
"""Those of groups included, and the groups themselves."""
