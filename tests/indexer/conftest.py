import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from indexer.build import BuildOptions, build_from_tokens
from indexer.commands import main
from indexer.reader import Index, Vocabulary
from indexer.tokenizer import DEFAULT_MODEL, load_tokenizer

Cli = Callable[..., tuple[int, str, str]]
DocumentsOf = Callable[[Index], list[tuple[str, list[int]]]]
TextsOf = Callable[[Path], dict[str, str]]


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    """Return a tokenizer that knows the 256 bytes: what it made can be decoded by hand."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: number for number, symbol in enumerate(alphabet)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)  # type: ignore[no-untyped-call]
    tokenizer.add_special_tokens({"eos_token": "<eos>"})
    return tokenizer


@pytest.fixture(scope="session")
def default_tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def tokenizer_folder(
    tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def vocabulary() -> Vocabulary:
    return Vocabulary(1000, "0f" * 32)


@pytest.fixture(scope="session")
def tiny_original(vocabulary: Vocabulary, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an index of two segments, with files and records of all kinds, none of them empty."""
    documents = [("a", [1, 2, 3, 1, 2]), ("b", [999]), ("c", [2, 3, 2, 3]), ("d", [0] * 5)]
    path = tmp_path_factory.mktemp("tiny") / "tiny.index"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("indexer.stages.segments.MIN_KEYED_SUFFIXES", 1)
        build_from_tokens(documents, path, vocabulary, BuildOptions(segment_tokens=11))
    return path


@pytest.fixture
def tiny_index(tiny_original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of that index; what is added to it has files of all kinds as well."""
    monkeypatch.setattr("indexer.stages.segments.MIN_KEYED_SUFFIXES", 1)
    return shutil.copytree(tiny_original, tmp_path / "tiny.index")


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Give a function that runs the command line and returns status, stdout and stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        if isinstance(ended.value.code, str):  # what the interpreter does on the way out
            return 1, out, err + ended.value.code + "\n"
        return int(ended.value.code or 0), out, err

    return run


@pytest.fixture(scope="session")
def documents_of() -> DocumentsOf:
    """Give a function that reads an index back into names and token ids, by its separators."""

    def read(index: Index) -> list[tuple[str, list[int]]]:
        documents = []
        for number, segment in enumerate(index.segments):
            separator = np.iinfo(segment.tokens.dtype).max
            ids: list[int] = []
            for position, token in enumerate(segment.tokens.tolist()):
                if token == separator:
                    documents.append((index.document_at(number, position).name, ids))
                    ids = []
                else:
                    ids.append(token)
        return documents

    return read


@pytest.fixture
def texts_of(tokenizer: PreTrainedTokenizerBase, documents_of: DocumentsOf) -> TextsOf:
    """Give a function that reads an index back into names and texts."""

    def read(path: Path) -> dict[str, str]:
        with Index.open(path) as index:
            return {name: str(tokenizer.decode(ids)) for name, ids in documents_of(index)}

    return read
