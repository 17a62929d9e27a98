"""Loads a module's public names at first use. The module's stub lists the names.

A stub, such as `vllm.pyi` next to `vllm.py`, tells type checkers where each name is defined. This
module reads the same stub, so programs and type checkers cannot disagree.
"""

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pkgutil import get_data
from typing import Any, NamedTuple

from foredraft.installation import EXTRAS, needing


class Face(NamedTuple):
    """The attributes that a module with a stub must define.

    Attributes:
        names: value of `__all__`.
        load: value of `__getattr__`.
        list_names: value of `__dir__`.
    """

    names: list[str]
    load: Callable[[str], Any]
    list_names: Callable[[], list[str]]


def face_of(module: str, stub: str, extra: str | None = None) -> Face:
    """Return the `Face` of a module, with the names that its stub imports.

    Args:
        module: name of the module.
        stub: name of the stub file, in this folder.
        extra: extra that installs the libraries that the names need. By default, the extra of the
            package that defines each name.
    """
    homes = _homes(stub)

    def load(name: str) -> Any:
        """Load a name from the module that defines it. This runs only once per name.

        Raises:
            ModuleNotFoundError: a library is missing; the message says what to install.
            MissingPluginError: the plugin that defines the name is not installed.
        """
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home = homes[name]
        package = home.partition(".")[0]
        if package == module:  # a submodule of this package
            return import_module(f"{home}.{name}")
        with needing(extra or EXTRAS[package]):
            found = (
                _plugin(home, f"{module}.{name}") if ".plugins." in home else import_module(home)
            )
        value = getattr(found, name)
        setattr(sys.modules[module], name, value)
        return value

    return Face(sorted(homes), load, lambda: sorted({*vars(sys.modules[module]), *homes}))


def _plugin(home: str, asked: str) -> Any:
    from indexer.launch import plugged  # noqa: PLC0415  (clients do not load the indexer)

    return plugged(home, asked)


def _homes(stub: str) -> dict[str, str]:
    """Return, for each name in a stub, the module that defines it."""
    source = get_data(__package__, stub)
    return {
        alias.name: str(node.module)
        for node in ast.parse(source or b"").body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
