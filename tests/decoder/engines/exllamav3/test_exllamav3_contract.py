"""What `retriever export --to exllamav3` writes, read by the engine's own loader.

The package's extension is built for a GPU when it is imported, so its loader is loaded alone.
"""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from retriever.plugins.exports.exllamav3 import export_exllamav3, tokenizer_digests

VOCABULARY_SIZE = 300


@pytest.fixture
def loader() -> Iterator[Any]:
    package = importlib.util.find_spec("exllamav3")  # which does not import it
    if package is None or package.origin is None:
        pytest.skip("exllamav3 is not installed")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("exllamav3", "exllamav3.generator"):
            parent = ModuleType(name)
            parent.__path__ = []
            patch.setitem(sys.modules, name, parent)
        extension: Any = ModuleType("exllamav3.ext")
        extension.exllamav3_ext = SimpleNamespace(FrozenSAMCursor=lambda sections: sections)
        patch.setitem(sys.modules, "exllamav3.ext", extension)
        name = "exllamav3.generator.ngram"
        source = Path(package.origin).parent / "generator" / "ngram.py"
        spec = importlib.util.spec_from_file_location(name, source)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    (folder / "added_tokens.json").write_text("[]")
    return folder


def tokenizer_of(folder: Path) -> Any:
    config = SimpleNamespace(directory=str(folder))
    return SimpleNamespace(config=config, actual_vocab_size=VOCABULARY_SIZE)


def written(path: Path, model: Path, seed: int) -> Path:
    random = np.random.default_rng(seed)
    documents = [
        random.integers(0, int(random.integers(1, VOCABULARY_SIZE)), 200).astype(np.int32)
        for _ in range(20)
    ]
    export_exllamav3(
        documents,
        path,
        tokenizer_files=tokenizer_digests(model),
        vocabulary_size=VOCABULARY_SIZE,
        overwrite=True,
    )
    return path


def test_the_loader_finds_the_graph_valid(loader: Any, model: Path, tmp_path: Path) -> None:
    for seed in range(20):
        path = written(tmp_path / "corpus.sam", model, seed)
        corpus = loader.NgramCorpus(path, tokenizer_of(model))
        assert corpus.metadata["document_count"] == 20
        assert len(corpus.cursor()) == 9


def test_the_loader_refuses_another_tokenizer(loader: Any, model: Path, tmp_path: Path) -> None:
    path = written(tmp_path / "corpus.sam", model, 0)
    (model / "tokenizer.json").write_text("{ }")
    with pytest.raises(ValueError, match="tokenizer mismatch"):
        loader.NgramCorpus(path, tokenizer_of(model))
