"""One writer at a time; what a writer that fails or is killed leaves behind."""

import errno
import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from indexer.build import BuildOptions, build_from_tokens, build_index
from indexer.change.changes import add_documents, compact, remove_documents
from indexer.change.verifying import verify_index
from indexer.change.writer import writing
from indexer.errors import IndexBusyError, IndexerError
from indexer.format.output import writer_lock
from indexer.reader import Index, Vocabulary
from tests.indexer.index_files import contents_but_lock
from tests.retriever.warm_interpreter import WarmProcess, run, start

HOLDER = """
import sys
from pathlib import Path
from indexer.change.writer import writing
with writing(Path(sys.argv[1]), "add"):
    print("locked", flush=True)
    sys.stdin.read()
"""

# Runs a change with little room in each file, again and again; says how it ends, and what is left.
CRAMPED = """
import resource, sys
from pathlib import Path
from indexer.change.changes import add_documents, compact, remove_documents
from indexer.change.verifying import verify_index
from indexer.errors import IndexerError
from tests.indexer.index_files import contents_but_lock
path, verb, argument, *limits = sys.argv[1:]
before = contents_but_lock(Path(path))
for limit in map(int, limits):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        if verb == "add":
            add_documents(path, [argument])
        elif verb == "remove":
            remove_documents(path, [argument])
        else:
            compact(path)
    except IndexerError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert contents_but_lock(Path(path)) == before, limit
    assert verify_index(Path(path)).findings == (), limit
"""

AS_NOBODY = """
import os, sys
from indexer.change.changes import compact, remove_documents
from indexer.errors import IndexerError
from indexer.reader import Index
os.setuid(65534)  # nothing is read-only to root
try:
    compact(sys.argv[1])
except IndexerError as error:
    print(error)
with Index.open(sys.argv[1]) as index:
    print(index.num_documents)
"""


@pytest.fixture
def index(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> Path:
    """Return an index of several segments."""
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(f"{name} " * 500)
    paths = [tmp_path / f"{name}.txt" for name in "abc"]
    build_index(paths, tmp_path / "index", tokenizer, BuildOptions(segment_tokens=1100))
    return tmp_path / "index"


@contextmanager
def another_writer(index: Path) -> Iterator[WarmProcess]:
    with start("-c", HOLDER, index) as process:
        assert process.stdout.readline() == "locked\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_second_writer_is_refused_and_told_who_writes(index: Path) -> None:
    before = contents_but_lock(index)
    with another_writer(index) as process:
        for _ in range(2):  # who is refused must not wipe out who holds the lock
            with pytest.raises(IndexBusyError) as caught:
                compact(index)
        found = re.search(
            r"changed by process (\d+) on (\S+) \(`add`, since (\S+)\): wait until it is done",
            str(caught.value),
        )
        assert found is not None
        assert (int(found[1]), found[2]) == (process.pid, socket.gethostname())
        assert abs((datetime.now(UTC) - datetime.fromisoformat(found[3])).total_seconds()) < 600
    assert contents_but_lock(index) == before


def test_a_writer_that_was_killed_leaves_the_lock_free(index: Path) -> None:
    with another_writer(index) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert json.loads((index / "writer.lock").read_text())["pid"] == process.pid
    assert compact(index).num_documents == 2
    assert (index / "writer.lock").read_text() == ""


def test_two_writers_in_one_process_are_told_apart(index: Path) -> None:
    with writing(index, "first"), pytest.raises(IndexBusyError, match=f"{os.getpid()}.*`first`"):
        compact(index)


def test_an_index_is_not_replaced_while_it_is_changed_nor_changed_while_it_is_replaced(
    index: Path, vocabulary: Vocabulary
) -> None:
    overwriting = BuildOptions(overwrite=True)
    with writing(index, "add"), pytest.raises(IndexBusyError, match="`add`"):
        build_from_tokens([("new", [1])], index, vocabulary, overwriting)
    assert verify_index(index).findings == ()

    def documents() -> Iterator[tuple[str, list[int]]]:
        with pytest.raises(IndexBusyError, match="`build --overwrite`"):
            compact(index)
        yield "new", [1]

    build_from_tokens(documents(), index, vocabulary, overwriting)
    with Index.open(index) as opened:
        assert opened.document_at(0, 0).name == "new"
    assert sorted(index.parent.glob(".*")) == []


def test_an_index_that_appears_while_another_is_built_is_not_replaced_under_its_writer(
    tmp_path: Path, vocabulary: Vocabulary
) -> None:
    path = tmp_path / "index"
    building = iter([True])

    def documents() -> Iterator[tuple[str, list[int]]]:
        if next(building, False):
            build_from_tokens([("quick", [2])], tmp_path / "other", vocabulary)
            (tmp_path / "other").rename(path)
        yield "slow", [1]

    with writing_after(path, documents()) as rest, pytest.raises(IndexBusyError):
        build_from_tokens(rest, path, vocabulary, BuildOptions(overwrite=True))
    with Index.open(path) as opened:
        assert opened.document_at(0, 0).name == "quick"


@contextmanager
def writing_after(
    path: Path, documents: Iterator[tuple[str, list[int]]]
) -> Iterator[Iterator[tuple[str, list[int]]]]:
    """Lock the index at a path once the first document is taken."""
    locks = []

    def taken() -> Iterator[tuple[str, list[int]]]:
        for document in documents:
            locks.append(writing(path, "add"))
            locks[0].__enter__()
            yield document

    yield taken()
    locks[0].__exit__(None, None, None)


def test_the_lock_of_a_folder_that_was_replaced_is_not_taken_for_that_of_the_new_one(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer waits at the door while the house is exchanged."""
    flock = fcntl.flock

    def exchange_first(descriptor: int, kind: int) -> None:
        monkeypatch.undo()
        index.rename(index.parent / "old")
        (index.parent / "old" / "x").mkdir()
        index.mkdir()
        flock(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", exchange_first)
    with (
        writer_lock(index, "add"),
        pytest.raises(IndexBusyError),
        writer_lock(index, "add"),
    ):
        pass
    assert (index / "writer.lock").exists()


def test_a_file_system_without_locks_takes_no_changes(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    before = contents_but_lock(index)
    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(IndexerError, match=r"has no locks .* build the index on another one"):
        compact(index)
    with Index.open(index) as opened:
        assert opened.num_documents == 3
    assert contents_but_lock(index) == before


def test_what_a_killed_writer_left_is_removed_by_the_next_one(index: Path) -> None:
    places = [
        "catalog/.partial-0123abcd",
        ".scratch/0123abcd/00000000/tokens",
        "segments/00000007/tokens",
        "phrases/00000003/counts1",
    ]
    for place in places:
        (index / place).parent.mkdir(parents=True, exist_ok=True)
        (index / place).write_bytes(b"half")
    assert verify_index(index).findings == ()
    compact(index)
    assert not any((index / place).exists() for place in places)
    assert not (index / ".scratch").exists()
    assert {place.name for place in (index / "segments").iterdir()} == {"00000003"}


def test_a_change_that_fails_leaves_nothing(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents_but_lock(index)

    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("indexer.stages.gathering.Building.phrases", fail)
    (tmp_path / "d.txt").write_text("new")
    changes: list[Callable[[], object]] = [
        lambda: add_documents(index, [tmp_path / "d.txt"]),
        lambda: remove_documents(index, patterns=["*/a.txt"]),
        lambda: compact(index),
    ]
    for change in changes:
        with pytest.raises(KeyboardInterrupt):
            change()
        assert contents_but_lock(index) == before
    assert sorted(place.name for place in index.iterdir()) == [
        "catalog",
        "phrases",
        "segments",
        "tokenizer",
        "writer.lock",
    ]


@pytest.mark.parametrize("verb", ["add", "remove", "compact"])
def test_a_file_that_can_grow_no_further_leaves_the_index_as_it_was(
    verb: str, index: Path, tmp_path: Path
) -> None:
    before, limits = contents_but_lock(index), (0, 100, 1200, 1900)
    (tmp_path / "d.txt").write_text("d " * 1000)
    argument = tmp_path / ("d.txt" if verb == "add" else "a.txt")
    done = run("-c", CRAMPED, index, verb, argument, *limits)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"(?:cannot write [^\n]*File too large\n){4}", done.stdout), done
    assert contents_but_lock(index) == before
    assert verify_index(index).findings == ()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        pytest.skip("only some may mount a small disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_leaves_the_index_as_it_was(
    small_disk: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = small_disk / "index"
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(f"{name} " * 2500)
    paths = [tmp_path / f"{name}.txt" for name in "abc"]
    build_index(paths, path, tokenizer, BuildOptions(segment_tokens=5100))
    before = contents_but_lock(path)
    (tmp_path / "d.txt").write_text("d " * 20_000)
    room = os.statvfs(small_disk)
    (small_disk / "filler").write_bytes(bytes(room.f_bavail * room.f_bsize - (60 << 10)))
    changes: list[Callable[[], object]] = [
        lambda: add_documents(path, [tmp_path / "d.txt"]),
        lambda: compact(path),
    ]
    for change in changes:
        with pytest.raises(IndexerError, match=r"cannot write .*No space left"):
            change()
        assert contents_but_lock(path) == before
    assert verify_index(path).findings == ()
    remove_documents(path, [str(paths[0])])
    assert verify_index(path).findings == ()


def test_an_index_on_a_read_only_disk_is_not_changed(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def refuse(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return opened(path, flags, mode)

    before = sorted(index.rglob("*"))
    monkeypatch.setattr(os, "open", refuse)
    changes: list[Callable[[], object]] = [
        lambda: compact(index),
        lambda: remove_documents(index, patterns=["*/a.txt"]),
    ]
    for change in changes:
        with pytest.raises(IndexerError, match=rf"cannot write {index}: Read-only file system"):
            change()
    with Index.open(index) as read:
        assert read.num_documents == 3
    assert sorted(index.rglob("*")) == before


def others_may_enter(folder: Path) -> bool:
    return all(place.stat().st_mode & 0o001 for place in (folder, *folder.parents))


@pytest.mark.skipif(
    os.geteuid() != 0 or not others_may_enter(Path(sys.executable).resolve().parent),
    reason="becomes another user, who must find the interpreter",
)
def test_a_read_only_index_is_read_and_not_changed(index: Path, tmp_path: Path) -> None:
    for place in tmp_path.parents:
        if not place.stat().st_mode & 0o001:
            pytest.skip("others may not enter the temporary folder")
    done = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, str(index)], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"cannot write {index}: Permission denied\n3\n"
