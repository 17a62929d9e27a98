"""The layout can be seen: few rooms on few floors, imports that run down, names that occur once.

A room is a file, or a folder seen from outside; a floor stands above all that it imports.
"""

import ast
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.import_statements import file_of, import_statements

ROOT = Path(__file__).parent.parent
PACKAGES = ("foredraft", "indexer", "retriever", "decoder")
MOST_FILES = 16
MAY_RECUR = {"__init__.py", "__main__.py", "errors.py", "options.py", "py.typed", "conftest.py"}
# Rooms, floors and arrows that a package may have at most.
LIMITS = {"indexer": (14, 9, 60), "retriever": (20, 9, 80), "decoder": (14, 9, 50)}


def sources(folder: str) -> list[Path]:
    return sorted(
        path.relative_to(ROOT)
        for path in (ROOT / folder).rglob("*.py")
        if "__pycache__" not in path.parts and "node_modules" not in path.parts
    )


def module_of(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports_of(path: Path) -> frozenset[str]:
    """Modules of ours that a file imports; a name of a package is a module where there is one."""
    found: set[str] = set()
    for node in import_statements(ROOT / path):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif node.module and not node.level and node.module.split(".")[0] in PACKAGES:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if file_of(inner) else node.module)
    return frozenset(each for each in found if each.split(".")[0] in PACKAGES)


def floors_of(arrows: dict[str, set[str]]) -> dict[str, int]:
    """The floor of each node; a circle is an error that names one of its nodes."""
    floors: dict[str, int] = {}
    under_way: list[str] = []

    def floor(node: str) -> int:
        if node not in floors:
            assert node not in under_way, f"a circle: {' -> '.join([*under_way, node])}"
            under_way.append(node)
            floors[node] = 1 + max(
                (floor(each) for each in sorted(arrows.get(node, ()))), default=0
            )
            under_way.pop()
        return floors[node]

    for node in sorted(arrows):
        floor(node)
    return floors


def room_of(module: str) -> str:
    return ".".join(module.split(".")[:2])


def test_no_files_import_each_other_in_a_circle() -> None:
    files = [path for package in PACKAGES for path in sources(package)]
    arrows = {module_of(path): set(imports_of(path)) - {module_of(path)} for path in files}
    assert len(floors_of(arrows)) >= len(files)


@pytest.mark.parametrize("package", LIMITS)
def test_a_package_has_few_rooms_on_few_floors(package: str) -> None:
    faces = {package, f"{package}.__main__"}
    arrows: dict[str, set[str]] = {}
    for path in sources(package):
        room = room_of(module_of(path))
        if room in faces:
            continue
        within = {room_of(each) for each in imports_of(path) if each.startswith(f"{package}.")}
        seen = set() if room == f"{package}.plugins" else within - {room} - faces
        arrows.setdefault(room, set()).update(seen)  # plugins stand above, and may see all
    measured = len(arrows), max(floors_of(arrows).values()), sum(map(len, arrows.values()))
    for figure, limit, name in zip(
        measured, LIMITS[package], ("rooms", "floors", "arrows"), strict=True
    ):
        assert figure <= limit, f"{package} has {figure} {name}, at most {limit}: {arrows}"


def test_no_folder_holds_more_files_than_can_be_seen_at_once() -> None:
    folders = (*PACKAGES, "tests", "benchmarks", "examples", "docs")
    files = [path for top in folders for path in sources(top)]
    counts = Counter(path.parent for path in files)
    full = {str(folder): n for folder, n in counts.items() if n > MOST_FILES}
    assert not full, f"more than {MOST_FILES} files: they need rooms of their own"


def test_a_basename_occurs_once() -> None:
    files = [path for top in (*PACKAGES, "benchmarks", "tests") for path in sources(top)]
    counts = Counter(path.name for path in files if path.name not in MAY_RECUR)
    assert not {name: n for name, n in counts.items() if n > 1}
