"""What is installed is what is here."""

import os
import subprocess
import sys
import time
import tomllib
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from foredraft.installation import EXTRAS, MARKER, OURS
from indexer.launch import Command
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


@pytest.mark.plugin
def test_what_the_project_names_is_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(EXTRAS.values()) <= set(project["optional-dependencies"])
    named = [*project["scripts"].values()]
    for entries in project["entry-points"].values():
        named += entries.values()
    assert len(named) == 9
    for reference in named:
        module, _, name = reference.partition(":")
        found = getattr(import_module(module), name)
        assert callable(found) or isinstance(found, Command)


# What an extra of its own installs, and commands that do not use it go without.
OPTIONAL = {
    "indexer": {"datasets", "gguf", "kingfisher", "ray", "transformers"},
    "retriever": {"opentelemetry", "redis"},
    "decoder": {"llguidance", "redis"},
}


@pytest.mark.parametrize("package", OPTIONAL)
def test_commands_start_with_what_their_extra_installs(package: str) -> None:
    missing = dict.fromkeys(OPTIONAL[package])  # which makes importing it an error
    script = f"import sys; sys.modules.update({missing}); import {package}.commands"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT, timeout=300)


def test_an_index_is_built_without_transformers_and_what_takes_it_says_so(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
sys.modules.update(dict.fromkeys(("torch", "transformers")))
from indexer.commands import app, main
folder = Path(sys.argv[1])
(folder / "a.txt").write_text("to be or not to be")
(folder / "model").mkdir()
(folder / "model" / "tokenizer_config.json").write_text("{}")
build = ["build", str(folder / "a.txt"), "--output"]
app([*build, str(folder / "built")], standalone_mode=False)
main([*build, str(folder / "other"), "--tokenizer", str(folder / "model")])
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert (done.returncode, (tmp_path / "built").is_dir()) == (1, True), done.stderr
    assert done.stderr.splitlines()[-1] == (
        f"error: the tokenizer '{tmp_path / 'model'}' needs transformers: "
        "run `pip install 'foredraft[server]'`"
    )


def made(place: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Runs make in a folder."""
    return subprocess.run(["make", *words], capture_output=True, text=True, check=False, cwd=place)


def test_installing_depends_on_metadata_and_not_on_comments(tmp_path: Path) -> None:
    project, kept = tmp_path / "pyproject.toml", tmp_path / ".cache" / "metadata.json"
    stated = (ROOT / "pyproject.toml").read_text()
    (tmp_path / "Makefile").write_bytes((ROOT / "Makefile").read_bytes())
    begun = int(time.time())
    found = []
    for minute, text in enumerate(
        (stated, f"{stated}\n# a comment\n", stated.replace('"grpcio>=', '"grpcio>1.0,>='))
    ):
        project.write_text(text)
        os.utime(project, (begun + 60 * minute, begun + 60 * minute))
        done = made(tmp_path, ".cache/metadata.json", f"PYTHON={sys.executable}")
        assert not done.returncode, done.stderr
        found.append((kept.read_bytes(), kept.stat().st_mtime_ns))
    assert found[0] == found[1]
    assert found[1][0] != found[2][0]


def test_an_old_python_is_refused_before_anything_is_installed(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    old = "import sys; sys.version_info = (3, 9, 2); exec(sys.argv[2])"
    done = made(tmp_path, "install", f"PYTHON={sys.executable} -c '{old}'")
    assert done.returncode
    assert "is Python 3.9, and 3.11 or newer is needed: install one" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"Makefile", "pyproject.toml"}


def test_weights_to_begin_with_are_numbers_for_this_layout() -> None:
    weights = np.load(ROOT / "retriever" / "predict" / "prior.npy")
    assert weights.dtype == np.float32
    assert np.all(np.isfinite(weights))
    begun = values_of(prior_weights())  # with a row for each source that came after the fit
    assert begun[: weights.size].tobytes() == weights.tobytes()
