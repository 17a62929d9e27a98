"""What is installed is what is here."""

import tomllib
from fnmatch import fnmatch
from pathlib import Path

import numpy as np

from retriever.kernels.layout import WEIGHTS
from retriever.mixer import prior_weights

ROOT = Path(__file__).parent.parent
PACKAGES = ("indexer", "retriever", "decoder")


def test_every_package_is_listed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = set(project["tool"]["setuptools"]["packages"])
    present = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for top in PACKAGES
        for path in (ROOT / top).rglob("__init__.py")
    }
    assert listed == present


def test_every_file_that_is_not_code_is_packaged() -> None:
    """Wheels hold what a pattern names, and nothing that is made on the spot."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    setuptools = project["tool"]["setuptools"]
    data = [
        path.relative_to(ROOT)
        for top in PACKAGES
        for path in (ROOT / top).rglob("*.*")
        if path.suffix != ".py" and "__pycache__" not in path.parts
    ]
    assert Path("retriever/prior.npy") in data
    for path in data:
        package = ".".join(path.parent.parts)
        patterns = [p for key in ("*", package) for p in setuptools["package-data"].get(key, [])]
        assert any(fnmatch(path.name, pattern) for pattern in patterns), path


def test_weights_to_begin_with_are_numbers_for_this_layout() -> None:
    weights = np.load(ROOT / "retriever" / "prior.npy")
    assert weights.dtype == np.float32
    assert weights.nbytes == WEIGHTS.itemsize
    assert np.all(np.isfinite(weights))
    assert prior_weights().tobytes() == weights.tobytes()
