"""Which plugins are not there, and which tests can't run without them."""

import ast
from functools import cache
from pathlib import Path
from typing import Final

from tests.import_statements import file_of

ROOT: Final = Path(__file__).parents[2]
_OURS: Final = ("indexer", "retriever", "decoder", "foredraft", "tests", "benchmarks", "docs")


ALONE: Final = """
import sys

sys.meta_path = [each for each in sys.meta_path if "__editable__" not in str(each)]
"""
"""A `sitecustomize.py`: an editable installation does not stand in for what a copy lacks."""


@cache
def plugins() -> tuple[str, ...]:
    """Return the packages of all plugins that have tests here, whether they are there or not."""
    folders = sorted((ROOT / "tests").glob("*/plugins/*/"))
    return tuple(".".join(each.relative_to(ROOT / "tests").parts) for each in folders)


@cache
def absent() -> frozenset[str]:
    """Return those that are not there."""
    return frozenset(each for each in plugins() if not file_of(each))


def needed_by(test: Path) -> str | None:
    """Return a plugin that is not there and that a file of tests needs, `None` if there is none."""
    if not absent() or not test.is_file():
        return None
    own = ".".join(test.relative_to(ROOT / "tests").parts[:3])  # a plugin's tests stand in its name
    return own if own in absent() else _absent_in(test)


@cache
def _absent_in(path: Path) -> str | None:
    """Return an absent plugin that a file needs, or what it imports of ours."""
    waiting, seen = [path], {path}
    while waiting:
        for name in _modules(waiting.pop()):
            plugin = ".".join(name.split(".")[:3])
            if plugin in absent():
                return plugin
            found = file_of(name)
            if found is not None and found not in seen:
                seen.add(found)
                waiting.append(found)
    return None


def _modules(path: Path) -> list[str]:
    """Return what a file imports of ours when it is loaded, not when a function of it runs."""
    names: list[str] = []
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            # Of a package, what is imported may be a module.
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return [name for name in names if name.split(".")[0] in _OURS]
