import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from indexer.build import build_from_tokens
from indexer.errors import DamagedIndexError
from indexer.reader import Index
from indexer.tokenizer import vocabulary_of
from retriever.errors import ExportError
from retriever.plugins.exports.exllamav3 import export_exllamav3
from retriever.plugins.exports.export_cli import main
from retriever.plugins.exports.exported_documents import token_documents
from retriever.plugins.exports.sglang_corpus import export_sglang_corpus
from tests.retriever.plugins.exports.frozen_reader import Frozen

TEXTS = ["one two\nthree", "caf\u00e9 \u2028 \r\n end", "one two four", "x", "one two\nthree times"]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    """The 256 bytes, and `on` as one token."""
    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "on"]
    core = Tokenizer(models.BPE(vocab={s: n for n, s in enumerate(symbols)}, merges=[("o", "n")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core)  # type: ignore[no-untyped-call]


@pytest.fixture(scope="module")
def folder(tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def index(tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("index") / "texts.index"
    documents = [(str(at), encoded(tokenizer, text)) for at, text in enumerate(TEXTS)]
    apart = [n for letter in "on" for n in encoded(tokenizer, letter)]  # no text leads to these
    build_from_tokens([*documents, ("apart", apart)], path, vocabulary_of(tokenizer))
    return path


def encoded(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


@pytest.fixture
def opened(index: Path) -> Iterator[Index]:
    with Index.open(index) as opened:
        yield opened


Export = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(
    index: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Export:
    def run(*options: str) -> tuple[int, str, str]:
        command = ["retriever", "export", str(index), "--tokenizer", str(folder), *options]
        monkeypatch.setattr("sys.argv", command)
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    return run


def texts_in(path: Path) -> list[str]:
    """As SGLang reads a corpus: a line is a JSON string."""
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def test_a_corpus_holds_the_documents_texts(run: Export, tmp_path: Path) -> None:
    output = tmp_path / "corpus.jsonl"
    code, out, err = run("--to", "sglang-corpus", "--output", str(output), "--json")
    assert (code, err) == (0, "")
    assert texts_in(output) == [*TEXTS, "on"]
    report = json.loads(out)
    assert report["documents"] == 6
    assert report["retokenised_documents"] == 1  # which had "o" and "n"
    assert report["left_out_documents"] == 0
    assert report["bytes"] == output.stat().st_size


def test_its_tokens_are_those_that_sglang_counts(
    opened: Index, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    path = tmp_path / "corpus.jsonl"
    report = export_sglang_corpus(token_documents(opened), tokenizer, path)
    lengths = [len(encoded(tokenizer, text)) for text in texts_in(path)]
    assert report.tokens == sum(lengths) + len(lengths) - 1


def test_what_does_not_fit_is_left_out_and_told(run: Export, tmp_path: Path) -> None:
    output = tmp_path / "corpus.jsonl"
    options = ("--to", "sglang-corpus", "-o", str(output), "--max-tokens", "33")
    code, out, err = run(*options)
    assert code == 0
    assert texts_in(output) == TEXTS[:2]
    assert "2 documents" in out
    assert err.startswith("left out: 4 documents")


def test_a_file_that_is_there_stays_unless_told(run: Export, tmp_path: Path) -> None:
    output = tmp_path / "corpus.jsonl"
    output.write_text("precious")
    for form in ("sglang-corpus", "exllamav3"):
        code, _, err = run("--to", form, "-o", str(output))
        assert code == 1
        assert err == f"error: {output} exists already: pass --overwrite to replace it\n"
        assert output.read_text() == "precious"
    assert run("--to", "sglang-corpus", "-o", str(output), "--overwrite")[0] == 0
    assert len(texts_in(output)) == 6


def test_bad_input_ends_with_a_line_and_leaves_no_file(
    run: Export, index: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    for options, reason in [
        (("--to", "exllamav3", "--tokenizer", str(tmp_path)), "has no tokenizer.json"),
        (("--to", "sglang-corpus", "--tokenizer", str(tmp_path / "none")), "there is no folder"),
        (("--to", "exllamav3", "--max-tokens", "3"), "there is nothing to write"),
    ]:
        code, _, err = run(*options, "-o", str(output))
        assert (code, err.count("\n")) == (1, 1), err
        assert reason in err
    code, _, err = run("--to", "sglang-corpus", "-o", str(tmp_path / "no" / "folder"))
    assert code == 1
    assert "cannot write" in err
    assert list(tmp_path.iterdir()) == []
    assert run("--to", "sglang-corpus", "-o", str(index))[0] == 1


def test_exllamav3_needs_the_models_folder(
    index: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["retriever", "export", str(index), "--to", "exllamav3", "--output", "out"]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit):
        main()
    assert "name the folder of the model" in capsys.readouterr().err


def test_another_tokenizer_is_refused(
    index: Path, tmp_path: Path, run: Export, tokenizer: PreTrainedTokenizerBase
) -> None:
    core = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    core.add_tokens(["another"])
    other = tmp_path / "other"
    PreTrainedTokenizerFast(tokenizer_object=core).save_pretrained(other)  # type: ignore[no-untyped-call]
    output = tmp_path / "out"
    code, _, err = run("--to", "exllamav3", "--tokenizer", str(other), "-o", str(output))
    assert code == 1
    assert f"index {index} was built for another tokenizer" in err
    assert not output.exists()


def test_a_frozen_automaton_drafts_what_the_documents_go_on_with(
    run: Export, opened: Index, folder: Path, tmp_path: Path
) -> None:
    output = tmp_path / "corpus.sam"
    code, out, _ = run("--to", "exllamav3", "-o", str(output), "--json")
    assert code == 0
    frozen, documents = Frozen(output), [each.tolist() for each in token_documents(opened)]
    corpus = frozen.arrays["corpus"]
    assert corpus.tolist() == [token for each in documents for token in [*each, -1]]
    assert frozen.header["corpus_sha256"] == hashlib.sha256(corpus.tobytes()).hexdigest()
    assert corpus[frozen.arrays["document_ends"]].tolist() == [-1] * len(documents)
    assert frozen.header["tokenizer"]["files"] == {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
        for name in ("tokenizer.json", "tokenizer_config.json")
    }
    for each in documents[:2]:
        matched, follows = frozen.draft([1, 2, *each[:5]], 4)
        assert (matched, follows) == (5, each[5:9])
    report = json.loads(out)
    assert report["states"] == len(frozen.arrays["link"])
    assert report["edges"] == len(frozen.arrays["edge_to"])
    root = frozen.arrays["root"]
    assert root.tolist() == [frozen.next(0, token) for token in range(len(root))]


def test_matches_of_an_automaton_are_the_longest_there_are(tmp_path: Path) -> None:
    random = np.random.default_rng(2)
    documents = [random.integers(0, 4, 30).astype(np.int32) for _ in range(6)]
    path = tmp_path / "random.sam"
    export_exllamav3(documents, path, tokenizer_files={}, vocabulary_size=4)
    frozen, text = Frozen(path), [document.tolist() for document in documents]
    for _ in range(200):
        history = random.integers(0, 5, 25).tolist()
        longest = max(
            length for length in range(26) if length == 0 or occurs(history[-length:], text)
        )
        matched, follows = frozen.draft(history, 3)
        assert matched == longest
        if longest:
            assert occurs([*history[-longest:], *follows], text)


def occurs(tokens: list[int], documents: list[list[int]]) -> bool:
    size = len(tokens)
    return any(
        document[at : at + size] == tokens
        for document in documents
        for at in range(len(document) - size + 1)
    )


def test_documents_that_do_not_fit_an_automaton_are_left_out(tmp_path: Path) -> None:
    documents = [np.arange(size, dtype=np.int32) for size in (3, 4, 2)]
    path = tmp_path / "out"
    report = export_exllamav3(documents, path, tokenizer_files={}, vocabulary_size=9, max_tokens=6)
    assert (report.documents, report.tokens, report.left_out_documents) == (1, 4, 2)
    with pytest.raises(ExportError, match="nothing to write"):
        export_exllamav3([], tmp_path / "none", tokenizer_files={}, vocabulary_size=9)


def test_a_damaged_index_is_told(index: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.index"
    shutil.copytree(index, damaged)
    tokens = next(damaged.glob("segments/*/tokens"))
    tokens.write_bytes(b"\xff" * tokens.stat().st_size)
    with Index.open(damaged) as opened, pytest.raises(DamagedIndexError, match="invalid document"):
        list(token_documents(opened))
