"""Imports run one way, and a client pays for nothing but the client."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("indexer", "retriever", "decoder")
MAY_IMPORT = {
    "indexer": {"indexer"},
    "retriever": {"indexer", "retriever"},
    "decoder": {"indexer", "retriever", "decoder"},
}
# Of the indexer, drafting needs to read indexes and tokenizers, never to build.
READER = {"indexer.reader", "indexer.tokenizer", "indexer.errors", "indexer.launch"}


def imported_modules(path: Path) -> set[str]:
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module)
    return modules


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_run_one_way(package: str) -> None:
    assert sources(package)
    for path in sources(package):
        ours = {m for m in imported_modules(path) if m.split(".")[0] in PACKAGES}
        assert {m.split(".")[0] for m in ours} <= MAY_IMPORT[package], path


@pytest.mark.parametrize("package", ["retriever", "decoder"])
def test_only_the_reader_of_the_indexer_is_used(package: str) -> None:
    for path in sources(package):
        used = {m for m in imported_modules(path) if m.split(".")[0] == "indexer"}
        assert used <= READER, path


def test_torch_is_imported_by_the_decoder_alone() -> None:
    for package in ("indexer", "retriever"):
        for path in sources(package):
            assert not {m for m in imported_modules(path) if m.split(".")[0] == "torch"}, path


def loaded_by(statement: str) -> set[str]:
    script = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return set(done.stdout.split())


def test_importing_the_client_loads_nothing_heavy() -> None:
    loaded = loaded_by("import retriever")
    assert "retriever.client" in loaded
    heavy = {"torch", "numba", "lmdb", "indexer", "transformers", "ahocorasick", "cryptography"}
    assert not loaded & heavy


def test_reading_an_index_loads_neither_compiler_nor_model_library() -> None:
    loaded = loaded_by("import indexer.reader")
    assert not loaded & {"torch", "numba", "transformers"}
