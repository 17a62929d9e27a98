import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from indexer.build import BuildOptions, build_from_tokens, build_index
from indexer.change.changes import add_documents, compact, remove_documents
from indexer.change.choosing import chosen_documents, list_documents
from indexer.change.verifying import verify_index
from indexer.errors import DamagedIndexError, IndexerError, SourceError
from indexer.reader import Index, Vocabulary
from tests.indexer.stages.phrase_reading import count_of
from tests.suite_parts import cases

LARGE = BuildOptions()
SMALL = BuildOptions(segment_tokens=60)


@dataclass
class Twin:
    """What an index must hold: paths and texts in order, no text twice."""

    folder: Path
    texts: dict[str, str] = field(default_factory=dict)
    num_files: int = 0

    def write(self, *texts: str) -> list[Path]:
        """Write each text to a new file."""
        paths = []
        for text in texts:
            paths.append(self.folder / f"{self.num_files % 3}" / f"{self.num_files:04d}.txt")
            paths[-1].parent.mkdir(parents=True, exist_ok=True)
            paths[-1].write_text(text)
            self.num_files += 1
        return paths

    def add(self, paths: list[Path]) -> int:
        before = len(self.texts)
        for path in paths:
            if path.read_text() not in self.texts.values():
                self.texts[str(path)] = path.read_text()
        return len(self.texts) - before

    def remove(self, pattern: str) -> int:
        before = len(self.texts)
        self.texts = {k: v for k, v in self.texts.items() if not fnmatchcase(k, pattern)}
        return before - len(self.texts)


@pytest.fixture
def twin(tmp_path: Path) -> Twin:
    return Twin(tmp_path / "sources")


def built(
    twin: Twin, tokenizer: PreTrainedTokenizerBase, options: BuildOptions, *texts: str
) -> Path:
    path = twin.folder.parent / "index"
    paths = twin.write(*texts)
    build_index(paths, path, tokenizer, options)
    twin.add(paths)
    return path


def documents_in(path: Path, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return names and texts, read by position."""
    texts = {}
    with Index.open(path) as index:
        for number, segment in enumerate(index.segments):
            position = 0
            for document, num_tokens in list(index.documents()):
                if index.document_at(number, min(position, len(segment.tokens) - 1)) == document:
                    ids = segment.tokens[position : position + num_tokens].tolist()
                    assert segment.tokens[position + num_tokens] == 65535
                    texts[document.name] = str(tokenizer.decode(ids))
                    position += num_tokens + 1
            assert position == len(segment.tokens)
    return texts


def bytes_of_segments(path: Path) -> list[dict[str, bytes]]:
    folders = sorted((path / "segments").iterdir())
    return [{file.name: file.read_bytes() for file in folder.iterdir()} for folder in folders]


def bytes_of_phrases(path: Path) -> dict[str, bytes]:
    (folder,) = (path / "phrases").iterdir()
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def text(random_: random.Random) -> str:
    words = random_.choices(["the", "cat", "sat", "on", "a", "mat", "\u00e9t\u00e9"], k=12)
    return " ".join(words[: random_.randint(1, 12)])


def steps(seed: int) -> Iterator[tuple[str, random.Random]]:
    random_ = random.Random(seed)
    for _ in range(7):
        yield random_.choice(["add", "add", "remove", "remove all of a folder", "compact"]), random_


@pytest.mark.seeds
@pytest.mark.parametrize("seed", range(cases(4, of=8)))
def test_after_any_changes_an_index_holds_what_a_fresh_build_of_the_rest_holds(
    seed: int, twin: Twin, tokenizer: PreTrainedTokenizerBase
) -> None:
    options = BuildOptions(segment_tokens=60, keep_texts=seed % 2 == 1)
    path = built(twin, tokenizer, options, *(text(random.Random(i)) for i in range(seed, 9)))
    for verb, random_ in steps(seed):
        if verb == "add":
            paths = twin.write(*(text(random_) for _ in range(random_.randint(1, 5))))
            assert add_documents(path, paths, options).num_documents == twin.add(paths)
        elif verb == "compact":
            compact(path, BuildOptions(segment_tokens=random_.choice([80, 200])))
        else:
            chosen = random_.choice(list(twin.texts))
            pattern = f"*/{random_.randrange(3)}/*" if "folder" in verb else chosen
            if {fnmatchcase(name, pattern) for name in twin.texts} == {True, False}:
                listed = chosen_documents(path, [], [pattern])
                assert remove_documents(path, [], [pattern]).num_documents == twin.remove(pattern)
                assert not {document.name for document in listed} & twin.texts.keys()
        assert documents_in(path, tokenizer) == twin.texts
        assert [document.name for document in list_documents(path)] == list(twin.texts)
        assert verify_index(path).findings == ()

    compact(path)
    fresh = twin.folder.parent / "fresh"
    build_index(list(twin.texts), fresh, tokenizer, BuildOptions(keep_texts=options.keep_texts))
    assert bytes_of_segments(path) == bytes_of_segments(fresh)
    assert bytes_of_phrases(path) == bytes_of_phrases(fresh)


def test_what_is_there_already_is_not_added_again(
    twin: Twin, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = built(twin, tokenizer, LARGE, "one", "two")
    report = add_documents(path, twin.write("two", "three", "three"))
    assert (report.num_documents, report.tally.skipped) == (1, {"exact duplicate": 2})
    before = sorted(path.rglob("*"))
    report = add_documents(path, twin.write("three", "one"))
    assert (report.num_documents, report.tally.skipped) == (0, {"exact duplicate": 2})
    assert sorted(path.rglob("*")) == before
    report = add_documents(path, twin.write("three"), BuildOptions(keep_duplicates=True))
    assert (report.num_documents, report.tally.skipped) == (1, {})
    assert "exact duplicate" in add_documents(path, twin.write("one", "four")).describe()


def test_texts_are_kept_where_the_index_keeps_them(
    twin: Twin, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = built(twin, tokenizer, BuildOptions(keep_texts=True), "one", "two")
    add_documents(path, twin.write("three"))
    with Index.open(path) as index:
        assert index.keeps_texts
    other = twin.folder.parent / "other"
    build_index(twin.write("five"), other, tokenizer)
    add_documents(other, twin.write("six"), BuildOptions(keep_texts=True))
    with Index.open(other) as index:
        assert not index.keeps_texts


@pytest.mark.parametrize("keep_texts", [False, True])
def test_what_was_removed_is_in_no_file(
    *, keep_texts: bool, twin: Twin, tokenizer: PreTrainedTokenizerBase
) -> None:
    options = BuildOptions(segment_tokens=200, keep_texts=keep_texts)
    phrase = "quetzalcoatl"
    path = built(twin, tokenizer, options, "nothing " * 9, f"say {phrase}s", "more of it", "rest")
    add_documents(path, twin.write(f"again {phrase}"), options)
    names = [name for name, content in twin.texts.items() if phrase in content]
    names.append(str(twin.folder / "1/0004.txt"))
    compact(path)
    pair = tuple(tokenizer.encode(phrase[:2], add_special_tokens=False))
    with Index.open(path) as reader:
        assert count_of(reader.phrases, pair) == 2
        report = remove_documents(path, names)
        assert (report.num_documents, report.num_older) == (2, 1)
        assert "still being read" in report.describe()
        assert len(list(reader.documents())) == 5
    assert compact(path).num_older == 0

    sequences = [bytes(ids) for ids in _sequences(tokenizer, phrase)]
    for file in path.rglob("*"):
        content = file.read_bytes() if file.is_file() else b""
        for needle in (*sequences, *(name.encode() for name in names), phrase.encode()):
            assert needle not in content, file
    with Index.open(path) as index:
        assert count_of(index.phrases, pair) == 0
        assert len(list(index.documents())) == 3


def _sequences(tokenizer: PreTrainedTokenizerBase, words: str) -> Iterator[bytes]:
    """Yield the tokens of some words as an index stores them, and pairs of them."""
    ids = tokenizer.encode(words, add_special_tokens=False)
    yield b"".join(int(token).to_bytes(2, "little") for token in ids)
    yield b"".join(int(token).to_bytes(2, "little") for token in ids[:4])


@pytest.mark.soak
def test_removing_many_scattered_documents_is_one_piece_of_work(
    tmp_path: Path, vocabulary: Vocabulary
) -> None:
    path = tmp_path / "index"
    documents = [(f"{i % 2} {i}", [i % 997, i // 997]) for i in range(90_000)]
    build_from_tokens(documents, path, vocabulary)
    # As many pieces as no process may map.
    assert remove_documents(path, patterns=["1 *"]).num_documents == 45_000
    names = [document.name for document in list_documents(path)]
    assert names == [name for name, _ in documents if name.startswith("0")]
    assert verify_index(path).findings == ()


def test_names_and_patterns_that_are_of_no_document_are_errors_and_change_nothing(
    twin: Twin, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = built(twin, tokenizer, LARGE, "one", "two")
    before = sorted(path.rglob("*"))
    name = next(iter(twin.texts))
    for names, patterns, message in [
        ([name, "nobody", "nowhere"], [], r"no document 'nobody' \(and 1 more\)"),
        ([], ["*", "x*"], r"no document 'x\*'"),
        ([], ["*"], "would leave no document"),
        ([], [], "no document is named"),
    ]:
        with pytest.raises(SourceError, match=message):
            remove_documents(path, iter(names), iter(patterns))
    assert sorted(path.rglob("*")) == sorted([*before, path / "writer.lock"])
    assert remove_documents(path, iter([name])).num_documents == 1


def test_an_index_of_tokens_takes_no_texts(
    tiny_index: Path, twin: Twin, tokenizer: PreTrainedTokenizerBase
) -> None:
    assert tokenizer is not None
    with pytest.raises(IndexerError, match="built from token ids and has no tokenizer"):
        add_documents(tiny_index, twin.write("one"))
    assert verify_index(tiny_index).findings == ()


@pytest.mark.parametrize("name", ["tokens", "document_names", "document_digests", "texts"])
def test_damage_is_not_copied_under_a_new_checksum(
    name: str, twin: Twin, tokenizer: PreTrainedTokenizerBase
) -> None:
    options = BuildOptions(segment_tokens=20, keep_texts=True)
    path = built(twin, tokenizer, options, "one two three", "four five six", "seven eight")
    file = path / "segments/00000001" / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(DamagedIndexError, match=f"00000001/{name} is damaged"):
        compact(path)
    assert any(f"00000001/{name} is damaged" in each for each in verify_index(path).findings)
    assert len(list((path / "segments").iterdir())) == 3


def test_a_damaged_tokenizer_adds_nothing(twin: Twin, tokenizer: PreTrainedTokenizerBase) -> None:
    path = built(twin, tokenizer, LARGE, "one")
    content = bytearray((path / "tokenizer").read_bytes())
    content[-9] ^= 1
    (path / "tokenizer").write_bytes(content)
    with pytest.raises(DamagedIndexError, match="tokenizer is damaged"):
        add_documents(path, twin.write("two"))


def test_phrases_are_counted_anew_once_more_than_an_eighth_is_not_in_them(
    twin: Twin, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = built(twin, tokenizer, LARGE, "x" * 70)
    assert _uncounted(path) == 0
    add_documents(path, twin.write("y" * 10))  # 10 of 80 tokens
    assert _uncounted(path) == 10
    x, y = tokenizer.encode("xy", add_special_tokens=False)
    with Index.open(path) as index:
        assert (count_of(index.phrases, (x,)), count_of(index.phrases, (y,))) == (70, 0)
    add_documents(path, twin.write("z"))  # 11 of 81
    assert _uncounted(path) == 0
    add_documents(path, twin.write("w"))
    assert _uncounted(path) == 1
    assert verify_index(path).findings == ()
    compact(path)
    assert _uncounted(path) == 0


def _uncounted(path: Path) -> int:
    with Index.open(path) as index:
        return index.num_uncounted_tokens


def test_phrases_stay_where_merging_changes_none(
    twin: Twin, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = built(twin, tokenizer, SMALL, "x" * 50, "y" * 50)
    report = compact(path)
    assert (report.num_documents, report.num_segments) == (1, 1)
    assert [place.name for place in (path / "phrases").iterdir()] == ["00000000"]
    assert verify_index(path).findings == ()
    before = sorted(path.rglob("*"))
    assert compact(path).num_documents == 0
    assert sorted(path.rglob("*")) == before
