import itertools
import mmap
import os
import random
import resource
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from indexer.build import BuildOptions, build_from_tokens
from indexer.change.verifying import verify_index
from indexer.errors import IndexerError, IndexNotFoundError, TokenizerMismatchError
from indexer.format.snapshots import HeldSnapshot, hold_latest
from indexer.reader import Index, Vocabulary
from tests.retriever.warm_interpreter import run

DocumentsOf = Callable[[Index], list[tuple[str, list[int]]]]


def test_an_open_index_tells_its_size_and_vocabulary(
    tiny_index: Path, vocabulary: Vocabulary
) -> None:
    with Index.open(str(tiny_index)) as index:
        assert (index.num_documents, index.num_tokens) == (4, 15)
        assert index.vocabulary == vocabulary
        assert index.path == tiny_index
        assert [segment.name for segment in index.segments] == ["00000000", "00000001"]
        assert [len(segment.tokens) for segment in index.segments] == [8, 11]


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
    options = BuildOptions(segment_tokens=1000, keep_duplicates=True)
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
    options = BuildOptions(segment_tokens=100_000, keep_duplicates=True)
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
    assert run("-c", code, tiny_index).returncode == 0


def test_another_tokenizer_is_refused_with_both_named(
    tiny_index: Path, vocabulary: Vocabulary
) -> None:
    Index.open(tiny_index, vocabulary=vocabulary).close()
    other = Vocabulary(1000, "ee" * 32)
    with pytest.raises(TokenizerMismatchError) as caught:
        Index.open(tiny_index, vocabulary=other)
    for part in ("another tokenizer", "vocabulary 1000", "0f0f", "eeee", "or rebuild the index"):
        assert part in str(caught.value)


def test_a_path_without_an_index_is_not_found(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no index")
    (tmp_path / "folder").mkdir()
    for name in ("nowhere", "file", "folder"):
        with pytest.raises(IndexNotFoundError):
            Index.open(tmp_path / name)


def test_an_index_that_is_replaced_again_and_again_is_never_mixed(
    tmp_path: Path, documents_of: DocumentsOf
) -> None:
    path = tmp_path / "index"
    stop = threading.Event()
    failures: list[BaseException] = []

    def replace() -> None:
        try:
            for number in itertools.count():
                documents = [(f"{number}", [number % 7] * (number % 5 + 1))] * (number % 3 + 1)
                options = BuildOptions(segment_tokens=1, overwrite=True, keep_duplicates=True)
                build_from_tokens(documents, path, Vocabulary(7, f"{number}"), options)
                if stop.is_set():
                    return
        except BaseException as error:  # noqa: BLE001  (whatever it is, the test must see it)
            failures.append(error)

    def read() -> set[str]:
        with Index.open(path) as index:
            number = int(index.vocabulary.fingerprint)
            expected = (f"{number}", [number % 7] * (number % 5 + 1))
            assert documents_of(index) == [expected] * (number % 3 + 1)
            return {index.vocabulary.fingerprint}

    build_from_tokens([("0", [0])], path, Vocabulary(7, "0"))
    thread = threading.Thread(target=replace)
    thread.start()
    try:
        seen: set[str] = set()
        ends = time.monotonic() + 1
        while time.monotonic() < ends or (len(seen) < 2 and time.monotonic() < ends + 60):
            seen |= read()
            assert verify_index(path).findings == ()
    finally:
        stop.set()
        thread.join()
    assert failures == []
    assert len(seen) > 1


def test_an_index_replaced_while_it_is_opened_is_opened_anew(
    tiny_index: Path, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter(range(2))

    def replacing(path: Path) -> HeldSnapshot:
        held = hold_latest(path)
        if next(times, None) is not None:
            options = BuildOptions(overwrite=True)
            build_from_tokens([("new", [7] * 3)], path, vocabulary, options)
        return held

    monkeypatch.setattr("indexer.reader.hold_latest", replacing)
    with Index.open(tiny_index) as index:
        assert index.document_at(0, 0).name == "new"

    def always_moving(path: Path) -> HeldSnapshot:
        held = hold_latest(path)
        copy = Path(shutil.copytree(path, path.with_name(f"copy-{next(numbers)}")))
        path.rename(copy.with_suffix(".old"))
        copy.rename(path)
        return held

    numbers = itertools.count()
    monkeypatch.setattr("indexer.reader.hold_latest", always_moving)
    with pytest.raises(IndexerError, match="replaced faster"):
        Index.open(tiny_index)


@pytest.mark.skipif(sys.platform != "linux", reason="as is done on Linux alone")
def test_pages_in_memory_are_read_without_a_fault(tmp_path: Path) -> None:
    tokens = np.arange(1 << 21) % 251
    path = tmp_path / "index"
    build_from_tokens([("a", tokens.tolist())], path, Vocabulary(256, "aa"))
    faults = {}
    for entered in (False, True):
        with Index.open(path) as index:
            for array in index.mapped_arrays():
                array[:].sum()  # reads the file
        with Index.open(path) as index:
            if entered:
                index.enter_resident_pages()
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            for array in index.mapped_arrays():
                array[:: mmap.PAGESIZE // array.itemsize].max()
            faults[entered] = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults[True] < faults[False] / 4


@pytest.mark.skipif(sys.platform != "linux", reason="as is done on Linux alone")
def test_pages_of_a_file_that_was_cut_are_no_error(tmp_path: Path) -> None:
    path = tmp_path / "index"
    tokens = np.arange(1 << 20) % 251
    build_from_tokens([("a", tokens.tolist())], path, Vocabulary(256, "aa"))
    with Index.open(path) as index:
        for file in path.rglob("suffixes"):
            os.truncate(file, 1 << 16)
        index.enter_resident_pages()
