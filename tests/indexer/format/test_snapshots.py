"""Readers and a writer at once: each reader sees one whole snapshot, and keeps it."""

import fcntl
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from indexer.build import BuildOptions, build_index
from indexer.change import writer as writer_module
from indexer.change.changes import add_documents, compact, remove_documents
from indexer.change.verifying import verify_index
from indexer.errors import DamagedIndexError
from indexer.format.snapshots import publish
from indexer.reader import Index
from tests.retriever.warm_interpreter import WarmProcess, start

READER = """
import sys
from indexer.reader import Index
index = Index.open(sys.argv[1])
print(index.number, flush=True)
sys.stdin.read()
print(sum(num_tokens for _, num_tokens in index.documents()), flush=True)
"""

# Opens again and again until its input ends; every snapshot must be whole.
LOOPING_READER = """
import json, select, sys
import numpy as np
from indexer.reader import Index
from tests.indexer.stages.phrase_reading import successors
numbers = []
print("ready", flush=True)
while not select.select([sys.stdin], [], [], 0)[0]:
    with Index.open(sys.argv[1]) as index:
        numbers.append(index.number)
        documents = list(index.documents())
        assert len(documents) == index.num_documents
        assert sum(num_tokens for _, num_tokens in documents) == index.num_tokens
        added = {name.rsplit("/", 1)[1] for name in (d.name for d, _ in documents)} - {"base.txt"}
        assert 1 <= len(added) <= 2, added  # the writer adds one before it removes another
        for segment in index.segments:
            assert np.array_equal(np.sort(segment.suffixes), np.flatnonzero(segment.tokens < 65535))
        successors(index.phrases, (1,))
assert numbers == sorted(numbers)
print(json.dumps([len(numbers), len(set(numbers))]))
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "base.txt").write_text("base " * 40)
    return folder


@pytest.fixture
def index(tmp_path: Path, source: Path, tokenizer: PreTrainedTokenizerBase) -> Path:
    path = tmp_path / "index"
    build_index([source / "base.txt"], path, tokenizer)
    return path


def add(index: Path, source: Path, name: str, text: str) -> None:
    (source / name).write_text(text)
    add_documents(index, [source / name])


def names_in(index: Index) -> list[str]:
    return [document.name.rsplit("/", 1)[1] for document, _ in index.documents()]


def files_in(index: Path) -> set[str]:
    places = (index / name for name in ("catalog", "segments", "phrases"))
    return {str(each.relative_to(index)) for place in places for each in place.iterdir()}


@contextmanager
def reading_process(index: Path, code: str = READER) -> Iterator[WarmProcess]:
    with start("-c", code, index) as process:
        try:
            yield process
        finally:
            process.kill()


def said_by(process: WarmProcess) -> str:
    return process.stdout.readline().strip()


def test_readers_keep_what_they_opened_until_the_last_one_closes(index: Path, source: Path) -> None:
    first, second = Index.open(index), Index.open(index)
    old_files = files_in(index)
    add(index, source, "more.txt", "more " * 40)
    remove_documents(index, [str(source / "base.txt")])
    assert old_files <= files_in(index)
    for reader in (first, second):
        assert names_in(reader) == ["base.txt"]
        assert not reader.is_latest()
        with Index.open(index) as newer:
            assert names_in(newer) == ["more.txt"]
            assert newer.number == reader.number + 2
        assert verify_index(index).findings == ()
        reader.close()
        compact(index)
        assert (old_files <= files_in(index)) == (reader is first)
    assert files_in(index) == {"catalog/00000002", "segments/00000001", "phrases/00000002"}


def test_a_snapshot_between_two_that_are_read_goes_by_itself(index: Path, source: Path) -> None:
    with Index.open(index) as oldest:
        add(index, source, "a.txt", "a " * 90)
        add(index, source, "b.txt", "b " * 90)
        assert {name for name in files_in(index) if "catalog" in name} == {
            "catalog/00000000",
            "catalog/00000002",
        }
        assert names_in(oldest) == ["base.txt"]


def test_an_index_that_nobody_refers_to_is_closed(index: Path, source: Path) -> None:
    Index.open(index)
    add(index, source, "a.txt", "a " * 90)
    assert "catalog/00000000" not in files_in(index)


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_reader_in_another_process_keeps_its_files_as_long_as_it_lives(
    *, is_killed: bool, index: Path, source: Path
) -> None:
    with reading_process(index) as process:
        assert said_by(process) == "0"
        add(index, source, "a.txt", "a " * 500)
        report = compact(index)
        assert report.num_older == 1
        assert "catalog/00000000" in files_in(index)
        if is_killed:
            process.send_signal(signal.SIGKILL)
        else:
            assert process.communicate()[0].strip() == "200"
        process.wait()
    assert compact(index).num_older == 0
    assert {name for name in files_in(index) if "catalog" in name} == {"catalog/00000002"}


def test_a_reader_in_a_loop_always_sees_one_whole_snapshot(index: Path, source: Path) -> None:
    add(index, source, "0.txt", "0 " * 30)
    with reading_process(index, LOOPING_READER) as process:
        assert said_by(process) == "ready"
        ends = time.monotonic() + 0.5
        number = 0
        while time.monotonic() < ends or number < 18:
            number += 1
            add(index, source, f"{number}.txt", f"{number} " * (10 + number % 50))
            remove_documents(index, patterns=[f"*/{number - 1}.txt"])
            if number % 3 == 0:
                compact(index)
        opened, seen = process.communicate("stop")[0].strip("[]\n").split(",")
    assert process.returncode == 0
    assert int(opened) >= int(seen) > 5
    assert verify_index(index).findings == ()


def test_a_reader_that_comes_while_files_are_removed_finds_the_next_snapshot(
    index: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_too_late(path: Path, flags: int) -> int:
        if Path(path).parent == index / "catalog":
            monkeypatch.undo()
            add(index, source, "a.txt", "a " * 90)
        return opened_at_once(path, flags)

    opened_at_once = os.open
    monkeypatch.setattr(os, "open", open_too_late)
    with Index.open(index) as opened:
        assert (opened.number, names_in(opened)) == (1, ["base.txt", "a.txt"])


def test_an_unlinked_snapshot_that_was_opened_before_is_not_held(
    index: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = fcntl.flock

    def lock_too_late(descriptor: int, kind: int) -> None:
        monkeypatch.undo()
        add(index, source, "a.txt", "a " * 90)
        lock(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", lock_too_late)
    with Index.open(index) as opened:
        assert opened.number == 1


def test_names_that_change_while_they_are_listed_are_listed_again(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = Path.iterdir
    lists: list[list[Path]] = [[], []]

    def changing(folder: Path) -> Iterator[Path]:
        return iter(lists.pop()) if folder == index / "catalog" and lists else listed(folder)

    monkeypatch.setattr(Path, "iterdir", changing)
    Index.open(index).close()
    assert lists == []


def test_what_cannot_be_removed_stays_for_the_next_writer(
    index: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refuse)
        patched.setattr(os, "unlink", refuse)
        add(index, source, "a.txt", "a " * 90)
    assert {"catalog/00000000", "catalog/00000001", "phrases/00000000"} <= files_in(index)
    compact(index)
    assert "phrases/00000000" not in files_in(index)
    assert "catalog/00000000" not in files_in(index)


def test_a_damaged_old_snapshot_that_is_held_stops_no_writer(index: Path, source: Path) -> None:
    with Index.open(index):
        add(index, source, "a.txt", "a " * 90)
        (index / "catalog/00000000").write_bytes(b"damaged")
        add(index, source, "b.txt", "b " * 90)
        assert "phrases/00000000" in files_in(index)  # who knows what is still read
    compact(index)
    assert "phrases/00000000" not in files_in(index)


def test_a_damaged_latest_snapshot_is_not_changed(index: Path, source: Path) -> None:
    before = files_in(index)
    (index / "catalog/00000000").write_bytes(b"damaged")
    with pytest.raises(DamagedIndexError):
        add(index, source, "a.txt", "a")
    assert files_in(index) == before


def test_a_folder_in_place_of_a_snapshot_is_one_clear_error(index: Path) -> None:
    (index / "catalog/00000001").mkdir()
    with pytest.raises(DamagedIndexError, match="00000001 is unreadable"):
        Index.open(index)


def test_new_folders_are_on_disk_before_they_are_published(
    index: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    monkeypatch.setattr(
        writer_module, "sync_folder", lambda path: events.append(str(path.relative_to(index)))
    )

    def published(*arguments: object) -> None:
        events.append("published")
        publish(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(writer_module, "publish", published)
    add(index, source, "a.txt", "a " * 90)
    assert events == [
        "phrases",
        "phrases/00000001",
        "segments",
        "segments/00000001",
        "published",
    ]


def test_threads_may_open_while_another_changes(index: Path, source: Path) -> None:
    failures: list[BaseException] = []
    stop = threading.Event()

    def read() -> None:
        try:
            while not stop.is_set():
                with Index.open(index) as opened:
                    assert "base.txt" in names_in(opened)
        except BaseException as error:  # noqa: BLE001  (whatever it is, the test must see it)
            failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(4):
        add(index, source, f"{number}.txt", f"{number} " * 20)
        compact(index, BuildOptions())
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []
