"""Building an index for another tokenizer, from the texts that it keeps."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from indexer.build import BuildOptions, build_from_index, build_from_texts, build_index
from indexer.change.changes import add_documents, remove_documents
from indexer.change.verifying import verify_index
from indexer.errors import DamagedIndexError, IndexExistsError, SourceError
from indexer.reader import Index
from indexer.sources import SourceOptions
from indexer.stages.gathering import gather_part
from indexer.stages.parts import TokenisedDocument
from tests.indexer.index_files import contents_of

KEEPING = BuildOptions(keep_texts=True, segment_tokens=60)


@pytest.fixture
def words() -> PreTrainedTokenizerBase:
    vocabulary = {"<unk>": 0, "one": 1, "two": 2, "three": 3}
    core = Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core)  # type: ignore[no-untyped-call]


def test_another_tokenizers_index_is_the_one_that_its_sources_give(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, words: PreTrainedTokenizerBase
) -> None:
    texts = {f"{i}": f"one {'two ' * i}three\u2028 \u00e9\U0001f469 \\n\r\n" for i in range(30)}
    build_from_texts(texts.items(), tmp_path / "bytes", tokenizer, KEEPING)
    seen: list[tuple[int, int]] = []
    report = build_from_index(
        tmp_path / "bytes",
        tmp_path / "words",
        words,
        KEEPING,
        lambda tally: seen.append((tally.num_bytes_read, tally.num_bytes_found)),
    )
    build_from_texts(texts.items(), tmp_path / "expected", words, KEEPING)
    assert contents_of(tmp_path / "words") == contents_of(tmp_path / "expected")
    assert report.num_documents == 30
    assert report.tally.num_bytes == sum(len(text.encode()) for text in texts.values())
    assert seen[-1][0] == seen[-1][1] > 0


def test_what_was_added_is_in_it_and_what_was_removed_is_not(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, words: PreTrainedTokenizerBase
) -> None:
    for name in ("one", "two", "three"):
        (tmp_path / name).write_text(f"{name} " * 9)
    path = tmp_path / "index"
    build_index([tmp_path / "one", tmp_path / "two"], path, tokenizer, KEEPING)
    add_documents(path, [tmp_path / "three"])
    remove_documents(path, [str(tmp_path / "two")])
    build_from_index(path, path, words, BuildOptions(overwrite=True))
    with Index.open(path) as index:
        assert [(document.name, n) for document, n in index.documents()] == [
            (str(tmp_path / "one"), 9),
            (str(tmp_path / "three"), 9),
        ]
        assert not index.keeps_texts
    assert verify_index(path).findings == ()


def test_long_and_repeated_documents_are_carried_over(
    tmp_path: Path, words: PreTrainedTokenizerBase
) -> None:
    options = BuildOptions(
        keep_texts=True, keep_duplicates=True, sources=SourceOptions(max_document_bytes=1 << 30)
    )
    texts = [("a", "one two"), ("b", "one two"), ("c", "three " + "x" * (11 << 20))]
    build_from_texts(texts, tmp_path / "index", words, options)
    build_from_index(tmp_path / "index", tmp_path / "again", words)
    with Index.open(tmp_path / "index") as before, Index.open(tmp_path / "again") as after:
        assert list(after.documents()) == list(before.documents())
        assert after.num_documents == 3


def test_texts_come_back_with_names_and_licences(tmp_path: Path) -> None:
    documents = [
        ("x", "MIT", "of x\n"),
        ("\udc80y", "", "\u2028 \r\n"),
        *((f"{i}", "\u00e9", "\0" * i) for i in range(50)),
    ]
    part = gather_part(
        (
            TokenisedDocument(name, licence, np.array([7], np.uint16), text)
            for name, licence, text in documents
        ),
        tmp_path / "part",
        1000,
        keep_texts=True,
    )
    assert list(part.texts()) == documents
    table = part.documents()
    assert [table.document(i).licence for i in range(3)] == ["MIT", "", "\u00e9"]
    with pytest.raises(DamagedIndexError, match="does not hold the texts"):
        list(replace(part, num_documents=53).texts())


def test_an_index_without_texts_is_one_clear_error(
    tiny_index: Path, tmp_path: Path, words: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(SourceError, match="does not keep its texts: build it with --keep-texts"):
        build_from_index(tiny_index, tmp_path / "x", words)
    with pytest.raises(IndexExistsError):
        build_from_index(tiny_index, tiny_index, words)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damaged_texts_are_not_built_from(
    damage: str, tmp_path: Path, tokenizer: PreTrainedTokenizerBase, words: PreTrainedTokenizerBase
) -> None:
    build_from_texts([("a", "one two three")], tmp_path / "bytes", tokenizer, KEEPING)
    file = tmp_path / "bytes/segments/00000000/texts"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content[:-1] if damage == "cut" else content)
    if damage == "remove":
        file.unlink()
    with pytest.raises(DamagedIndexError, match="texts"):
        build_from_index(tmp_path / "bytes", tmp_path / "words", words)
    assert not (tmp_path / "words").exists()
