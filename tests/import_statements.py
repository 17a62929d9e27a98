"""What the sources of the packages import, wherever in a file that stands."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

_ROOT: Final = Path(__file__).parent.parent


@cache
def import_statements(path: Path) -> tuple[ast.Import | ast.ImportFrom, ...]:
    """Return all import statements of a file."""
    return tuple(_imports_in(ast.parse(path.read_bytes())))


@cache
def file_of(module: str) -> Path | None:
    """Return the file of a module or package of this checkout; `None` if there is none."""
    path = _ROOT.joinpath(*module.split("."))
    files = (path.with_suffix(".py"), path / "__init__.py")
    return next((each for each in files if each.is_file()), None)


def _imports_in(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the import statements in a node: it looks into statements, never into expressions."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        yield node
        return
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        inner = getattr(node, name, None)
        if isinstance(inner, list):  # a conditional expression has single ones
            for each in inner:
                yield from _imports_in(each)
