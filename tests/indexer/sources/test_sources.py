import gzip
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from indexer.build import BuildOptions, build_index
from indexer.build_report import BuildTally
from indexer.errors import SourceError
from indexer.sources import SourceOptions, plan
from tests.indexer.sources.source_reading import json_lines, read_all, texts

TextsOf = Callable[[Path], dict[str, str]]


def read(*sources: Path, max_bytes: int = 1000) -> tuple[dict[str, str], Counter[str]]:
    documents, tally = read_all(*sources, max_document_bytes=max_bytes)
    assert tally.skipped_places.keys() == tally.skipped.keys()
    return texts(documents), tally.skipped


def test_folders_are_read_by_suffix_in_order_of_names(tmp_path: Path) -> None:
    for name in ["b.py", "a.md", "sub/z.TXT", "sub/Makefile", "sub/deep/q.rs"]:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(name)
    for name in [".git/c.md", ".hidden.md", "__pycache__/c.py", "node_modules/x/c.js"]:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("never read")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    (tmp_path / "zeros.bin").write_bytes(b"text and \0")
    (tmp_path / "sub/page.mdx").write_text("# by content, whatever its suffix \U0001f600")
    documents, skipped = read(tmp_path)
    order = ["a.md", "b.py", "sub/Makefile", "sub/z.TXT", "sub/deep/q.rs"]
    order.insert(3, "sub/page.mdx")
    assert list(documents) == [f"{tmp_path}/{name}" for name in order]
    assert documents.pop(f"{tmp_path}/sub/page.mdx").startswith("# by content")
    order.remove("sub/page.mdx")
    assert documents == {f"{tmp_path}/{name}": name for name in order}
    assert skipped == {"not text by its first bytes": 2}


def test_symbolic_links_are_not_followed_out_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret.txt").write_text("secret")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "own.txt").write_text("own")
    (folder / "link.txt").symlink_to(tmp_path / "outside/secret.txt")
    (folder / "loop").symlink_to(folder)
    (folder / "out").symlink_to(tmp_path / "outside")
    documents, skipped = read(folder)
    assert list(documents.values()) == ["own"]
    assert skipped == {"symbolic link": 1}


def test_a_file_that_is_named_is_taken_whatever_its_suffix(tmp_path: Path) -> None:
    path = tmp_path / "notes.unknown"
    path.write_text("\ufeffbyte order marks are not text")
    assert read(path) == ({str(path): "byte order marks are not text"}, {})


def test_a_file_that_is_named_twice_is_read_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("once")
    documents, skipped = read(tmp_path, tmp_path / "a.txt")
    assert list(documents.values()) == ["once"]
    assert skipped == {"named twice": 1}


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_json_lines_are_documents_and_other_lines_are_counted(suffix: str, tmp_path: Path) -> None:
    content = json_lines(
        {"text": "first", "id": 1},
        "",
        {"other": "field"},
        {"text": 5},
        ["text"],
        '{"text": "cut',
        "[" * 60_000,
        {"text": "x" * 70_000},
        {"text": "last"},
    )
    path = tmp_path / f"rows{suffix}"
    path.write_bytes(gzip.compress(content.encode()) if suffix.endswith("gz") else content.encode())
    documents, skipped = read(path, max_bytes=500)
    assert documents == {f"{path}:1": "first", f"{path}:9": "last"}
    assert skipped == {"no text in field 'text'": 3, "not JSON": 2, "too large": 1}


def test_of_what_is_left_out_the_first_place_is_named(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json_lines({"text": "first"}, "{", {"other": 1}, {"other": 1}, {"text": " "}))
    report = build_index([path], tmp_path / "index", tokenizer)
    assert report.tally.skipped_places == {
        "not JSON": f"{path}:2",
        "no text in field 'text'": f"{path}:3",
        "empty": f"{path}:5",
    }
    keys = "its keys are 'other': name the key of the text with --field"
    described = (
        f"2 no text in field 'text' (first: {path}:3; {keys}), 1 empty (first: {path}:5), "
        f"1 not JSON (first: {path}:2; Expecting property name"
    )
    assert described in report.describe()


def test_of_a_damaged_gzip_the_lines_before_the_damage_stay(tmp_path: Path) -> None:
    rows = [{"text": f"row {i} " + os.urandom(200).hex()} for i in range(300)]
    whole = gzip.compress(json_lines(*rows).encode())
    cut, flipped, fake = (tmp_path / f"{name}.jsonl.gz" for name in ("cut", "flipped", "fake"))
    cut.write_bytes(whole[: len(whole) // 2])
    flipped.write_bytes(whole[: len(whole) // 2] + bytes(500) + whole[len(whole) // 2 + 500 :])
    fake.write_bytes(b"this is no gzip")
    for path, least in [(cut, 100), (flipped, 100), (fake, 0)]:
        documents, skipped = read(path)
        found = list(documents.values())
        assert found[:least] == [row["text"] for row in rows[:least]]
        assert len(found) < 300
        assert skipped["unreadable: damaged gzip"] == 1


def test_what_is_not_text_is_skipped_and_counted(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, texts_of: TextsOf
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "good.txt").write_text("h\u00e9llo \U0001f600\r\n")
    (source / "latin.txt").write_bytes("caf\u00e9".encode("latin-1"))
    (source / "zeros.txt").write_bytes(b"looks like text\0but is not")
    (source / "empty.txt").write_bytes(b"")
    (source / "blank.txt").write_bytes(b" \n\t ")
    (source / "long.txt").write_text("x" * 101)
    (source / "limit.txt").write_text("x" * 100)
    (source / "surrogate.jsonl").write_text('{"text": "half \\ud800 of a pair"}\n')
    report = build_index(
        [source], tmp_path / "index", tokenizer, BuildOptions(SourceOptions(max_document_bytes=100))
    )
    assert report.tally.skipped == {
        "empty": 2,
        "not text": 2,
        "too large": 1,
        "half of a character": 1,
    }
    assert texts_of(tmp_path / "index") == {
        f"{source}/good.txt": "h\u00e9llo \U0001f600\r\n",
        f"{source}/limit.txt": "x" * 100,
        f"{source}/surrogate.jsonl:1": "half \ufffd of a pair",
    }
    assert report.tally.num_bytes == 100 + len("half ??? of a pair") + len(
        (source / "good.txt").read_bytes()
    )


def test_unreadable_files_and_pipes_are_skipped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("fine")
    (tmp_path / "b.txt").write_text("locked")
    os.mkfifo(tmp_path / "c.txt")
    plain_open = Path.open

    def refusing(path: Path, mode: str) -> object:  # root may read everything, so pretend
        if path.name == "b.txt":
            raise PermissionError(13, "Permission denied")
        return plain_open(path, mode)

    monkeypatch.setattr(Path, "open", refusing)
    documents, skipped = read(tmp_path)
    assert list(documents.values()) == ["fine"]
    assert skipped == {"unreadable: Permission denied": 1, "not a regular file": 1}


def test_a_missing_source_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"nowhere: No such file"):
        plan([tmp_path / "nowhere"], SourceOptions(), BuildTally())
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SourceError, match="neither a file nor a folder"):
        plan([tmp_path / "pipe"], SourceOptions(), BuildTally())


@pytest.mark.parametrize("content", [b"", b"\0\0"])
def test_sources_without_a_document_are_an_error_and_leave_nothing(
    content: bytes, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    with pytest.raises(SourceError, match=r"no document to index$"):
        build_index([source], tmp_path / "index", tokenizer)
    (source / "a.txt").write_bytes(content)
    with pytest.raises(SourceError, match=r"skipped 1 (empty|not text)\b"):
        build_index([source], tmp_path / "index", tokenizer)
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"]
