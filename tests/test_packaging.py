"""What is installed is what is here."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_package_is_listed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = set(project["tool"]["setuptools"]["packages"])
    present = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for top in ("indexer", "retriever", "decoder")
        for path in (ROOT / top).rglob("__init__.py")
    }
    assert listed == present
