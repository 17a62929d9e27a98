"""Reopening an index that has changed."""

import shutil
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from indexer.build import BuildOptions, build_from_texts, build_from_tokens
from indexer.change.changes import add_documents, remove_documents
from indexer.errors import IndexerError, IndexNotFoundError, TokenizerMismatchError
from indexer.reader import Index, Vocabulary

BUILD_ANEW = BuildOptions(overwrite=True)


@pytest.fixture
def path(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> Path:
    texts = [(f"{number}.txt", f"this is text number {number}") for number in range(20)]
    options = BuildOptions(segment_tokens=300)
    build_from_texts(texts, tmp_path / "x", tokenizer, options)
    return tmp_path / "x"


def test_what_has_not_changed_is_mapped_once(path: Path) -> None:
    (path.parent / "new.txt").write_text("new")
    with Index.open(path) as index:
        assert index.is_latest()
        add_documents(path, [path.parent / "new.txt"])
        assert not index.is_latest()
        with index.reopened() as reopened:
            assert (reopened.is_latest(), index.is_latest()) == (True, False)
            assert reopened.number == index.number + 1
            assert len(reopened.segments) == len(index.segments) + 1 > 2
            pairs = zip(index.segments, reopened.segments, strict=False)
            assert all(before is after for before, after in pairs)
            assert reopened.phrases is index.phrases
            remove_documents(path, ["0.txt"])
            with reopened.reopened() as again:
                assert again.segments[0] is not reopened.segments[0]
                assert again.segments[1] is reopened.segments[1]
                assert again.phrases is not reopened.phrases
                assert again.document_at(1, 0) == reopened.document_at(1, 0)


def test_another_index_at_the_path_is_opened_whole(
    path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Though its folder and its snapshot may have the numbers of those before."""
    with Index.open(path) as index:
        for _ in range(3):
            shutil.rmtree(path)
            assert not index.is_latest()
            build_from_texts([("other", "other text")], path, tokenizer)
            assert not index.is_latest()
            with index.reopened() as reopened:
                assert (reopened.number, reopened.num_documents) == (0, 1)
                assert reopened.segments[0] is not index.segments[0]


def test_what_cannot_be_opened_leaves_the_index_open(path: Path) -> None:
    with Index.open(path) as index:
        shutil.rmtree(path)
        assert not index.is_latest()
        with pytest.raises(IndexNotFoundError):
            index.reopened()
        documents = [("d", [1])]
        build_from_tokens(documents, path, Vocabulary(index.vocabulary.size, "ab" * 32))
        with pytest.raises(TokenizerMismatchError, match="another tokenizer"):
            index.reopened()
        larger = Vocabulary(index.vocabulary.size + 1, index.vocabulary.fingerprint)
        build_from_tokens(documents, path, larger, BUILD_ANEW)
        with pytest.raises(IndexerError, match=f"vocabulary {larger.size}"):
            index.reopened()
        assert index.document_at(0, 0).name == "0.txt"


def test_a_closed_index_is_not_the_latest(path: Path) -> None:
    index = Index.open(path)
    index.close()
    assert not index.is_latest()
