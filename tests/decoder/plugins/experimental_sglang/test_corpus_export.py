"""What `retriever export --to sglang-corpus` writes, read by the engine's own code."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retriever.plugins.exports.sglang_corpus import CorpusReport, export_sglang_corpus


class Letters:
    """A tokenizer of one token a letter."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) for letter in text]

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return "".join(map(chr, tokens))

    def __call__(self, texts: list[str], *, add_special_tokens: bool) -> dict[str, list[list[int]]]:
        return {"input_ids": [self.encode(t, add_special_tokens=add_special_tokens) for t in texts]}


TEXTS = ["the quick brown fox", "line one\nline two\r\n\u2028", "jumps over"]


def written(path: Path, max_tokens: int = 1000) -> CorpusReport:
    documents = [np.array([ord(letter) for letter in text], np.int32) for text in TEXTS]
    tokenizer: Any = Letters()
    return export_sglang_corpus(documents, tokenizer, path, max_tokens)


def chunks_of(path: Path, max_tokens: int) -> list[list[int]]:
    external = pytest.importorskip("sglang.srt.speculative.cpp_ngram.external_corpus")
    return list(external.iter_external_corpus_chunks(str(path), Letters(), max_tokens))


@pytest.mark.usefixtures("sglang_folder")
def test_the_engine_reads_the_documents_and_counts_the_same_tokens(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    report = written(path)
    chunks = chunks_of(path, report.tokens)  # with one less, it would refuse the file
    assert sum(map(len, chunks)) == report.tokens
    read = "".join(chr(token) if token >= 0 else "\0" for chunk in chunks for token in chunk)
    assert read.split("\0") == TEXTS
    with pytest.raises(ValueError, match="exceeds"):
        chunks_of(path, report.tokens - 1)


@pytest.mark.usefixtures("sglang_folder")
def test_what_is_cut_to_the_engines_limit_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    report = written(path, max_tokens=45)
    assert report.left_out_documents == 1
    assert len(chunks_of(path, 45)) == 2


@pytest.mark.usefixtures("sglang_folder")
def test_the_engines_own_corpus_drafts_from_it(tmp_path: Path) -> None:
    from sglang.srt.speculative.cpp_ngram.ngram_corpus import NgramCorpus  # noqa: PLC0415

    path = tmp_path / "corpus.jsonl"
    report = written(path)
    corpus = NgramCorpus(draft_token_num=8, capacity=1 << 12, external_sam_budget=7)
    loaded = corpus.load_external_corpus_named("ours", chunks_of(path, 1000))
    corpus.commit_external_corpus_load("ours", loaded)
    assert corpus.list_external_corpora() == {"ours": report.tokens}
    context = [ord(letter) for letter in "so the quick"]
    tokens, _ = corpus.batch_get(["a"], [context], [len(context)])
    assert "".join(map(chr, tokens)) == "k brown "
