"""Imports run one way, and a client pays for nothing but the client."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.import_statements import import_statements

ROOT = Path(__file__).parent.parent
PACKAGES = ("indexer", "retriever", "decoder")
# What is above all of them, and imported by none.
FACE = "foredraft"
MAY_IMPORT = {
    "indexer": {"indexer"},
    "retriever": {"indexer", "retriever"},
    "decoder": {"indexer", "retriever", "decoder"},
}
# Of the indexer, drafting needs to read indexes, tokenizers and recorded conversations and to state
# flags, never to build; rules of others sort the suffixes of outputs as builds do.
READER = {
    "indexer.errors",
    "indexer.flags",
    "indexer.launch",
    "indexer.reader",
    "indexer.sources.blocks",
    "indexer.sources.chats.conversations",
    "indexer.sources.record_samples",
    "indexer.sources.recordings",
    "indexer.sources.chats.shapes",
    "indexer.sources.source_options",
    "indexer.stages.segments",
    "indexer.tokenizer",
}
# Plugins that are adapters of engines, and the libraries that are theirs alone.
ADAPTERS = {
    "experimental_sglang": {"sglang"},
    "llama_cpp": {"llama_cpp"},
    "mlx_lm": {"mlx", "mlx_lm"},
    "onnxruntime_genai": {"onnxruntime_genai"},
    "vllm": {"vllm"},
}
PLUGINS = ROOT / "decoder" / "plugins"
ENGINES = ROOT / "decoder" / "engines"


@cache
def imported_modules(path: Path) -> frozenset[str]:
    modules: set[str] = set()
    for node in import_statements(path):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif node.module:
            modules.add(node.module)
    return frozenset(modules)


@cache
def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_run_one_way(package: str) -> None:
    assert sources(package)
    for path in sources(package):
        ours = {m for m in imported_modules(path) if m.split(".")[0] in (*PACKAGES, FACE)}
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


def adapter_of(path: Path) -> str | None:
    """Return the engine whose adapter a module is of, `None` for other modules."""
    name = path.relative_to(PLUGINS).parts[0] if PLUGINS in path.parents else ""
    return name if name in ADAPTERS else None


def test_an_adapter_is_imported_by_nothing_else() -> None:
    for path in (each for package in (*PACKAGES, FACE) for each in sources(package)):
        modules = [m.split(".") for m in imported_modules(path) if m.startswith("decoder.plugins.")]
        others = {parts[2] for parts in modules} & ADAPTERS.keys() - {adapter_of(path)}
        assert not others, path


def test_engines_are_imported_by_their_adapters_alone() -> None:
    libraries = set().union(*ADAPTERS.values())
    for path in (each for package in PACKAGES for each in sources(package)):
        used = {m.split(".")[0] for m in imported_modules(path)} & libraries
        assert used <= ADAPTERS.get(adapter_of(path) or "", set()), path


def test_what_adapters_share_and_fused_drafts_load_no_engine_and_no_torch() -> None:
    """Engines of other libraries have no torch; neither do environments of theirs."""
    shared = [path.stem for path in ENGINES.glob("*.py")]
    assert {"engine_options", "engine_sequences"} <= set(shared)
    names = [f"engines.{name}" for name in shared if name != "__init__"]
    names += ["budget.budget", "budget.costs", "drafters.fusion", "drafters.recycling"]
    loaded = loaded_by("; ".join(f"import decoder.{name}" for name in names))
    assert {"decoder.engines.engine_options", "decoder.drafters.readers"} <= loaded
    assert not loaded & {"torch", "transformers"}.union(*ADAPTERS.values())


def loaded_by(statement: str) -> set[str]:
    script = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return set(done.stdout.split())


def test_importing_the_client_loads_nothing_heavy() -> None:
    loaded = loaded_by("from foredraft import AsyncResilientDrafter, RemoteDrafter, connect")
    assert {"retriever.client.strict", "retriever.client.resilient"} <= loaded
    heavy = {"torch", "numba", "lmdb", "indexer", "transformers", "ahocorasick", "cryptography"}
    assert not loaded & heavy


def test_reading_an_index_loads_neither_compiler_nor_model_library() -> None:
    loaded = loaded_by("import indexer.reader")
    assert not loaded & {"torch", "numba", "transformers"}
