import codecs
import gzip
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from indexer.build_report import BuildTally
from indexer.format.compression import zstd
from indexer.sources import SourceOptions, plan, read
from tests.indexer.sources.source_reading import json_lines, read_all, texts

Compress = Callable[[bytes], bytes]
COMPRESSIONS = [
    pytest.param(gzip.compress, "gz", id="gz"),
    pytest.param(zstd.compress, "zst", id="zst"),
]
NAMES = {"gz": "gzip", "zst": "zstd"}
MIB = 1 << 20


@pytest.mark.parametrize(("compress", "suffix"), COMPRESSIONS)
def test_whole_files_and_lines_are_decompressed(
    compress: Compress, suffix: str, tmp_path: Path
) -> None:
    contents = {
        "a.md": b"\xef\xbb\xbfmarkdown",
        "b.py": b"code",
        "README": b"read me",
        "rows.jsonl": json_lines({"text": "one"}, {"text": "two"}).encode(),
        "unknown.tar": b"not read",
    }
    for name, content in contents.items():
        halves = content[:5], content[5:]  # streams one after the other are one
        path = tmp_path / f"{name}.{suffix}"
        path.write_bytes(b"".join(map(compress, halves)))
    documents, tally = read_all(tmp_path)
    assert {Path(name).name: text for name, text in texts(documents).items()} == {
        f"README.{suffix}": "read me",
        f"a.md.{suffix}": "markdown",
        f"b.py.{suffix}": "code",
        f"rows.jsonl.{suffix}:1": "one",
        f"rows.jsonl.{suffix}:2": "two",
    }
    assert tally.skipped == {"not text by its first bytes": 1}


@pytest.mark.parametrize(("compress", "suffix"), COMPRESSIONS)
def test_what_comes_before_damage_stays(compress: Compress, suffix: str, tmp_path: Path) -> None:
    generator = random.Random(0)
    rows = [{"text": f"row {i} " + generator.randbytes(200).hex()} for i in range(3000)]
    whole = compress(json_lines(*rows).encode())
    middle = len(whole) // 2
    damaged = {
        "cut": whole[:middle],
        "flipped": whole[:middle] + bytes(500) + whole[middle + 500 :],
        "trailing": whole + b"what is this",
        "fake": b"this is not compressed",
    }
    for name, content in damaged.items():
        (tmp_path / f"{name}.jsonl.{suffix}").write_bytes(content)
        (tmp_path / f"{name}.txt.{suffix}").write_bytes(content)
    documents, tally = read_all(tmp_path)
    found = texts(documents)
    for name, least, most in [("cut", 500, 1600), ("flipped", 500, 1600), ("trailing", 3000, 3000)]:
        numbered = [found.get(f"{tmp_path}/{name}.jsonl.{suffix}:{i + 1}") for i in range(3000)]
        kept = [text for text in numbered if text is not None]
        assert least <= len(kept) <= most
        assert kept[:least] == [row["text"] for row in rows[:least]]
    reason = f"unreadable: damaged {NAMES[suffix]}"
    assert tally.skipped.pop(reason) == 8
    assert tally.skipped_places[reason] == f"{tmp_path}/cut.jsonl.{suffix}"
    assert set(tally.skipped) <= {"not JSON", "not text", "no text in field 'text'"}


def peak_of(path: Path, **options: int) -> tuple[int, BuildTally]:
    """Return how much memory planning and reading take at most, in bytes."""
    chosen = SourceOptions(**options)  # type: ignore[arg-type]
    tally = BuildTally()
    tracemalloc.start()
    try:
        for block in plan([path], chosen, tally):
            assert not list(read(block, chosen, tally))
        return tracemalloc.get_traced_memory()[1], tally
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("name", ["one.txt", "one.jsonl"])
def test_a_giant_document_is_skipped_in_little_memory(
    name: str, suffix: str, tmp_path: Path
) -> None:
    path = tmp_path / (name + suffix)
    opened = {"": Path.open, ".gz": gzip.open, ".zst": zstd.open}[suffix]
    with opened(path, "wb") as file:  # type: ignore[operator]
        file.write(b'{"text": "')
        for _ in range(48):
            file.write(b"x" * MIB)
        file.write(b'"}\n')
    peak, tally = peak_of(path, max_document_bytes=MIB // 2, block_bytes=4 * MIB)
    assert peak < 12 * MIB
    assert tally.skipped == {"too large": 1}
    assert tally.num_bytes_read == tally.num_bytes_found == path.stat().st_size


def test_a_line_after_a_giant_one_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json_lines({"text": "a"}, {"text": "x" * 900_000}, {"text": "b"}))
    documents, tally = read_all(path, max_document_bytes=1000)
    assert texts(documents) == {f"{path}:1": "a", f"{path}:3": "b"}
    assert tally.skipped_places == {"too large": f"{path}:2"}


@pytest.mark.parametrize(
    ("mark", "encoding"),
    [
        (codecs.BOM_UTF8, "utf-8"),
        (codecs.BOM_UTF16_LE, "utf-16-le"),
        (codecs.BOM_UTF16_BE, "utf-16-be"),
        (codecs.BOM_UTF32_LE, "utf-32-le"),
        (codecs.BOM_UTF32_BE, "utf-32-be"),
    ],
)
@pytest.mark.parametrize("otherwise", ["utf-8", "latin-1", "utf-16-le"])
def test_a_byte_order_mark_tells_the_encoding(
    mark: bytes, encoding: str, otherwise: str, tmp_path: Path
) -> None:
    words = ["caf\u00e9", "\u0a0a\u010a\u2028", "\U0001f600"]  # with 0a in many places
    rows = "".join(f'{{"text": "{word}"}}\n' for word in words)
    (tmp_path / "a.txt").write_bytes(mark + words[0].encode(encoding))
    (tmp_path / "b.jsonl").write_bytes(mark + rows.encode(encoding))
    documents, tally = read_all(tmp_path, encoding=otherwise)
    assert list(texts(documents).values()) == [words[0], *words]
    assert not tally.skipped


def test_other_encodings_are_named_or_are_not_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("caf\u00e9".encode("latin-1"))
    (tmp_path / "b.jsonl").write_bytes('{"text": "caf\u00e9"}\n{"text": "b"}\n'.encode("latin-1"))
    documents, tally = read_all(tmp_path)
    assert texts(documents) == {f"{tmp_path}/b.jsonl:2": "b"}
    assert tally.skipped == {"not text": 2}
    assert tally.skipped_places == {"not text": f"{tmp_path}/a.txt"}
    documents, _ = read_all(tmp_path, encoding="latin-1")
    assert list(texts(documents).values()) == ["caf\u00e9", "caf\u00e9", "b"]


def test_utf_16_that_breaks_off_is_counted_and_what_came_before_stays(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = json_lines(*({"text": "x" * 9000} for _ in range(9)))
    path.write_bytes(rows.encode("utf-16")[:-40_001])
    documents, tally = read_all(path)
    assert 1 <= len(documents) <= 6
    assert tally.skipped == {"not text": 1}
