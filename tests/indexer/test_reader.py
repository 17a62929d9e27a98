import random
import shutil
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import lmdb
import numpy as np
import pytest

from indexer.build import BuildOptions, build_from_tokens
from indexer.errors import (
    DamagedIndexError,
    FormatVersionError,
    IndexNotFoundError,
    TokenizerMismatchError,
)
from indexer.format import FileRecord, encode_json
from indexer.reader import Index, Vocabulary

FILES = [
    "checksum",
    "catalog/data.mdb",
    "segments/00000001/tokens",
    "segments/00000001/suffixes",
    "segments/00000001/starts",
]


def rewrite_record(path: Path, key: bytes, value: bytes | None) -> None:
    """Change a record of the catalog, and its checksum to match."""
    with (
        lmdb.open(str(path / "catalog"), lock=False) as environment,
        environment.begin(write=True) as transaction,
    ):
        if value is None:
            transaction.delete(key)
        else:
            transaction.put(key, value)
    record = FileRecord.of_file(path / "catalog/data.mdb")
    (path / "checksum").write_bytes(encode_json(record.encode()))


def test_an_open_index_tells_its_size_and_vocabulary(
    tiny_index: Path, vocabulary: Vocabulary
) -> None:
    with Index.open(str(tiny_index)) as index:
        assert (index.num_documents, index.num_tokens) == (4, 13)
        assert index.vocabulary == vocabulary
        assert index.path == tiny_index
        assert [segment.name for segment in index.segments] == ["00000000", "00000001"]
        assert [len(segment.tokens) for segment in index.segments] == [8, 9]


def test_arrays_are_plain_native_and_read_only(tiny_index: Path) -> None:
    with Index.open(tiny_index) as index:
        segment = index.segments[0]
    kinds = {"tokens": np.uint16, "suffixes": np.uint32, "starts": np.uint32}
    for name, dtype in kinds.items():
        array = getattr(segment, name)
        assert type(array) is np.ndarray
        assert (array.dtype, array.flags.writeable) == (np.dtype(dtype), False)
        assert len(array) == array.size > 0  # still there although the index is closed


def test_every_position_is_traced_to_its_document(tmp_path: Path) -> None:
    rng = random.Random(3)
    lengths = [rng.randrange(1, 30) for _ in range(700)]
    documents = [(f"document {i} " + "x" * 90, [0] * n) for i, n in enumerate(lengths)]
    options = BuildOptions(max_segment_tokens=1000)
    build_from_tokens(documents, tmp_path / "x", Vocabulary(1, "aa"), options)
    remaining = iter(documents)
    with Index.open(tmp_path / "x") as index:
        assert len(index.segments) > 5
        for number, segment in enumerate(index.segments):
            start = 0
            while start < len(segment.tokens):
                name, ids = next(remaining)
                for position in range(start, start + len(ids) + 1):
                    found = index.document_at(number, position)
                    assert (found.name, found.licence, found.start) == (name, "", start)
                start += len(ids) + 1
    assert next(remaining, None) is None


@pytest.mark.parametrize(("segment", "position"), [(-1, 0), (2, 0), (0, -1), (0, 8)])
def test_positions_outside_the_index_are_refused(
    segment: int, position: int, tiny_index: Path
) -> None:
    with Index.open(tiny_index) as index, pytest.raises(IndexError, match=r"no (segment|position)"):
        index.document_at(segment, position)


def test_opening_takes_no_longer_for_a_larger_index(tmp_path: Path) -> None:
    path = tmp_path / "large"
    documents = ((f"document {i}", np.full(50, i % 100)) for i in range(20_000))
    options = BuildOptions(max_segment_tokens=100_000)
    build_from_tokens(documents, path, Vocabulary(100, "aa"), options)
    times = []
    for _ in range(5):
        begun = time.perf_counter()
        Index.open(path).close()
        times.append(time.perf_counter() - begun)
    assert min(times) < 0.05


def test_one_index_may_be_open_many_times_in_many_threads(tiny_index: Path) -> None:
    failures: list[BaseException] = []

    def use() -> None:
        try:
            for _ in range(50):
                with Index.open(tiny_index) as index:
                    assert index.document_at(1, 0).name == "c"
        except BaseException as error:  # noqa: BLE001  (whatever it is, the test must see it)
            failures.append(error)

    with Index.open(tiny_index) as kept:
        threads = [threading.Thread(target=use) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert kept.document_at(0, 0).name == "a"
    assert failures == []
    kept.close()  # closing twice does nothing
    with pytest.raises(ValueError, match="closed"):
        kept.document_at(0, 0)


def test_an_index_may_be_used_in_a_forked_process(tiny_index: Path) -> None:
    code = (
        "import os, sys; from indexer.reader import Index; index = Index.open(sys.argv[1]); "
        "child = os.fork(); "
        "names = index.document_at(0, 0).name + Index.open(sys.argv[1]).document_at(1, 0).name; "
        "status = os.waitpid(child, 0)[1] if child else 0; "
        "os._exit(status or names != 'ac')"
    )
    subprocess.run([sys.executable, "-c", code, str(tiny_index)], check=True)


def test_another_tokenizer_is_refused_with_both_named(
    tiny_index: Path, vocabulary: Vocabulary
) -> None:
    Index.open(tiny_index, vocabulary=vocabulary).close()
    other = Vocabulary(1000, "ee" * 32)
    with pytest.raises(TokenizerMismatchError) as caught:
        Index.open(tiny_index, vocabulary=other)
    for part in ("another tokenizer", "vocabulary 1000", "0f0f", "eeee", "--tokenizer"):
        assert part in str(caught.value)


def test_a_path_without_an_index_is_not_found(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no index")
    (tmp_path / "folder").mkdir()
    for name in ("nowhere", "file", "folder"):
        with pytest.raises(IndexNotFoundError):
            Index.open(tmp_path / name)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("size", [None, 0, 1, -4096, -1, +1])
def test_a_file_that_is_missing_or_of_another_size_is_refused(
    name: str, size: int | None, tiny_index: Path
) -> None:
    file = tiny_index / name
    content = file.read_bytes()
    if size is None:
        file.unlink()
    elif size > 0:
        file.write_bytes(content[:size] if size == 1 and len(content) > 1 else content + b"\0")
    else:
        file.write_bytes(content[: max(len(content) + size, 0)] if size else b"")
    with pytest.raises(DamagedIndexError, match=rf"{file.name}"):
        Index.open(tiny_index)


@pytest.mark.parametrize("name", ["catalog", "segments", "segments/00000000"])
def test_a_half_copied_index_is_refused(name: str, tiny_index: Path) -> None:
    shutil.rmtree(tiny_index / name)
    with pytest.raises(DamagedIndexError, match="missing"):
        Index.open(tiny_index)


def test_a_catalog_of_zeros_is_refused(tiny_index: Path) -> None:
    file = tiny_index / "catalog/data.mdb"
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(DamagedIndexError, match="cannot be opened"):
        Index.open(tiny_index)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (b"format", None),
        (b"format", b"{"),
        (b"vocabulary", None),
        (b"vocabulary", b"[]"),
        (b"vocabulary", b'{"size":1000}'),
        (b"segments", b"null"),
        (b"segments", b'[{"name":"../../etc","documents":1,"tokens":1,"files":{}}]'),
    ],
)
def test_records_that_no_builder_writes_are_refused(
    key: bytes, value: bytes | None, tiny_index: Path
) -> None:
    rewrite_record(tiny_index, key, value)
    with pytest.raises(DamagedIndexError, match="record"):
        Index.open(tiny_index)


def test_a_missing_document_is_noticed_when_it_is_looked_up(tiny_index: Path) -> None:
    rewrite_record(tiny_index, b"document/00000001/" + struct.pack(">I", 0), None)
    with Index.open(tiny_index) as index:
        assert index.document_at(0, 7).name == "b"
        with pytest.raises(DamagedIndexError, match="lists no document for position 2"):
            index.document_at(1, 2)


def test_a_newer_format_is_refused_with_advice(tiny_index: Path) -> None:
    rewrite_record(tiny_index, b"format", b"2")
    with pytest.raises(FormatVersionError, match=r"version 2.*upgrade"):
        Index.open(tiny_index)
