import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from indexer.build import BuildOptions, build_from_texts, build_from_tokens, build_index
from indexer.change.verifying import verify_index
from indexer.errors import IndexerError, SourceError, TokenizerError
from indexer.reader import Index, Vocabulary
from indexer.tokenizer import load_tokenizer, vocabulary_of
from tests.indexer.index_files import contents_of
from tests.retriever.warm_interpreter import run
from tests.suite_parts import cases

TextsOf = Callable[[Path], dict[str, str]]
DocumentsOf = Callable[[Index], list[tuple[str, list[int]]]]


@given(
    documents=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=12), min_size=1),
    segment_tokens=st.integers(1, 40),
    vocabulary_size=st.sampled_from([10, 65535, 65536]),
)
@settings(max_examples=cases(10, of=40), deadline=None)
def test_every_document_is_kept_whole_and_in_order(
    documents: list[list[int]],
    segment_tokens: int,
    vocabulary_size: int,
    tmp_path_factory: pytest.TempPathFactory,
    documents_of: DocumentsOf,
) -> None:
    path = tmp_path_factory.mktemp("kept") / "index"
    named = [(f"document {i}", ids) for i, ids in enumerate(documents)]
    options = BuildOptions(segment_tokens=segment_tokens, keep_duplicates=True)
    report = build_from_tokens(named, path, Vocabulary(vocabulary_size, "aa"), options)
    with Index.open(path) as index:
        assert documents_of(index) == named
        assert index.num_documents == report.num_documents == len(documents)
        assert index.num_tokens == report.num_tokens == sum(map(len, documents))
        for segment in index.segments:
            lone = int((segment.tokens == segment.tokens.max()).sum()) == 1
            assert len(segment.tokens) <= segment_tokens or lone
    assert verify_index(path).findings == ()


def test_texts_come_back_as_they_went_in(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, texts_of: TextsOf
) -> None:
    texts = {f"name {i}": f"text \u00e9\u4f60 {i}\r\n\t" * (i + 1) for i in range(50)}
    report = build_from_texts(texts.items(), tmp_path / "index", tokenizer)
    assert texts_of(tmp_path / "index") == texts
    assert report.tally.num_bytes == sum(len(text.encode()) for text in texts.values())
    assert report.tally.skipped == {}


def test_a_tokenizer_that_cuts_and_pads_loses_nothing(
    tmp_path: Path, tokenizer_folder: Path, texts_of: TextsOf
) -> None:
    loaded = load_tokenizer(str(tokenizer_folder))
    loaded.backend_tokenizer.enable_truncation(3)
    loaded.backend_tokenizer.enable_padding(length=20)
    build_from_texts([("a", "longer than three"), ("b", "x")], tmp_path / "index", loaded)
    assert texts_of(tmp_path / "index") == {"a": "longer than three", "b": "x"}


@pytest.mark.programs
def test_the_default_tokenizer_builds_what_it_can_decode(
    tmp_path: Path, default_tokenizer: PreTrainedTokenizerBase, documents_of: DocumentsOf
) -> None:
    source = tmp_path / "a.py"
    source.write_text("def main() -> None:\n    print('h\u00e9llo')\n")
    report = build_index([source], tmp_path / "index")
    with Index.open(tmp_path / "index", vocabulary=vocabulary_of(default_tokenizer)) as index:
        ((name, ids),) = documents_of(index)
        assert name == str(source)
        assert default_tokenizer.decode(ids) == source.read_text()
        assert report.num_tokens == len(ids)


def test_a_document_of_ten_megabytes_is_one_document(
    tmp_path: Path,
) -> None:
    core = Tokenizer(models.WordLevel({"<unk>": 0, "work": 1, "play": 2}, "<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    words = PreTrainedTokenizerFast(tokenizer_object=core)  # type: ignore[no-untyped-call]
    num_words = 10 * 2**20 // len("work ")
    options = BuildOptions(segment_tokens=1000, keep_duplicates=True)
    documents = [("short", "play"), ("long", "work " * num_words), ("last", "play")]
    report = build_from_texts(documents, tmp_path / "index", words, options)
    assert (report.num_documents, report.num_tokens) == (3, num_words + 2)
    with Index.open(tmp_path / "index") as index:
        assert [len(each.tokens) for each in index.segments] == [2, num_words + 1, 2]


def test_the_same_documents_give_the_same_bytes(tmp_path: Path, tokenizer_folder: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for i in range(40):
        (source / f"{i}.txt").write_text(f"document {i} " * i)
    for name in ("one", "two"):
        build_index([source], tmp_path / name, str(tokenizer_folder))
    assert contents_of(tmp_path / "one") == contents_of(tmp_path / "two")


def test_progress_is_told_up_to_the_end(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    (tmp_path / "a.txt").write_text("abc")
    seen: list[tuple[int, int, int]] = []
    build_index(
        [tmp_path / "a.txt"],
        tmp_path / "index",
        tokenizer,
        on_progress=lambda t: seen.append((t.num_tokens, t.num_bytes_read, t.num_bytes_found)),
    )
    assert seen[-1] == (3, 3, 3)


@pytest.mark.parametrize("token_id", [-1, 1000, 65535, 2**40])
def test_a_token_outside_the_vocabulary_is_an_error_that_names_it(
    token_id: int, tmp_path: Path, vocabulary: Vocabulary
) -> None:
    with pytest.raises(TokenizerError, match=rf"'bad' has the token id {token_id}, .* of 1000"):
        build_from_tokens([("good", [1]), ("bad", [1, token_id])], tmp_path / "x", vocabulary)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ids", [[0.5], [[1, 2], [3, 4]], ["a"]])
def test_tokens_that_are_no_integers_are_an_error(
    ids: list[int], tmp_path: Path, vocabulary: Vocabulary
) -> None:
    with pytest.raises(TokenizerError, match="not a sequence of integers"):
        build_from_tokens([("bad", ids)], tmp_path / "x", vocabulary)


@pytest.mark.parametrize("segment_tokens", [2**32, 0, -1])
def test_segments_beyond_the_format_are_an_error(segment_tokens: int) -> None:
    with pytest.raises(IndexerError, match=r"from 1 to 4294967295"):
        BuildOptions(segment_tokens=segment_tokens)
    BuildOptions(segment_tokens=2**32 - 1)


def test_a_full_disk_is_one_clear_error(tmp_path: Path) -> None:
    code = (
        "import resource, sys; from indexer.build import *; from indexer.errors import *\n"
        "from indexer.tokenizer import Vocabulary\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))\n"
        "documents = [(str(i) * 900, [i]) for i in range(2000)]\n"
        "try: build_from_tokens(documents, sys.argv[1], Vocabulary(2000, 'aa'))\n"
        "except IndexerError as error: print(error)\n"
    )
    for limit in (2000, 9000, 100_000):  # bytes in one file
        done = run("-c", code, tmp_path / "x", limit)
        assert done.returncode == 0, done.stderr
        assert re.fullmatch(r"cannot write .*: (File too large|free space)[^\n]*\n", done.stdout)
    assert list(tmp_path.iterdir()) == []


def test_documents_without_tokens_are_skipped_and_counted(
    tmp_path: Path, vocabulary: Vocabulary
) -> None:
    report = build_from_tokens([("a", []), ("b", [1]), ("c", [])], tmp_path / "x", vocabulary)
    assert (report.num_documents, report.tally.skipped) == (1, {"empty": 2})
    with pytest.raises(SourceError, match="no document to index: skipped 1 empty"):
        build_from_tokens([("a", [])], tmp_path / "y", vocabulary)
    assert not (tmp_path / "y").exists()


def test_a_slow_tokenizer_is_refused(tmp_path: Path) -> None:
    class Slow:
        all_special_ids: tuple[int, ...] = ()

        def get_vocab(self) -> dict[str, int]:
            return {"a": 0}

        def encode(self, _: str, *, add_special_tokens: bool) -> list[int]:
            return [int(add_special_tokens)]

    with pytest.raises(TokenizerError, match=r"Slow is not backed by the tokenizers library"):
        build_from_texts([("a", "a")], tmp_path / "x", Slow())  # type: ignore[arg-type]
