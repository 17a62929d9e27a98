"""What is installed is what is here."""

import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from foredraft.installation import EXTRAS, MARKER, OURS
from retriever.predict.weights import prior_weights, values_of

ROOT = Path(__file__).parent.parent
PACKAGES = ("foredraft", "indexer", "retriever", "decoder")


def test_every_folder_with_code_is_a_package_that_is_found() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["packages"]["find"]["include"]
    folders = {path.parent for top in PACKAGES for path in (ROOT / top).rglob("*.py")}
    for folder in folders:
        assert (folder / "__init__.py").is_file(), folder
        name = ".".join(folder.relative_to(ROOT).parts)
        assert any(fnmatch(name, pattern) for pattern in patterns), name


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
    assert Path("retriever/predict/prior.npy") in data
    for path in data:
        package = ".".join(path.parent.parts)
        patterns = [p for key in ("*", package) for p in setuptools["package-data"].get(key, [])]
        assert any(fnmatch(path.name, pattern) for pattern in patterns), path


def test_every_package_says_that_it_is_typed_and_ours() -> None:
    for package in PACKAGES:
        assert (ROOT / package / "py.typed").is_file()
        if package != "foredraft":
            assert getattr(import_module(package), MARKER) == OURS


def test_what_the_project_names_is_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(EXTRAS.values()) <= set(project["optional-dependencies"])
    named = [*project["scripts"].values()]
    for entries in project["entry-points"].values():
        named += entries.values()
    assert len(named) == 2
    for reference in named:
        module, _, name = reference.partition(":")
        assert callable(getattr(import_module(module), name))


# What an extra of its own installs, and commands that do not use it go without.
OPTIONAL = {
    "indexer": {"datasets", "kingfisher", "pyarrow", "ray"},
    "retriever": {"cryptography", "grpc_reflection", "opentelemetry", "prometheus_client", "redis"},
    "decoder": {"cryptography", "llguidance", "prometheus_client", "redis"},
}


@pytest.mark.parametrize("package", OPTIONAL)
def test_commands_start_with_what_their_extra_installs(package: str) -> None:
    missing = dict.fromkeys(OPTIONAL[package])  # which makes importing it an error
    script = f"import sys; sys.modules.update({missing}); import {package}.commands"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT, timeout=300)


def test_weights_to_begin_with_are_numbers_for_this_layout() -> None:
    weights = np.load(ROOT / "retriever" / "predict" / "prior.npy")
    assert weights.dtype == np.float32
    assert np.all(np.isfinite(weights))
    begun = values_of(prior_weights())  # with a row for each source that came after the fit
    assert begun[: weights.size].tobytes() == weights.tobytes()
