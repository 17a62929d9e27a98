import ctypes
import errno
import fcntl
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from indexer.build import BuildOptions, build_from_tokens
from indexer.change.verifying import verify_index
from indexer.errors import IndexBusyError, IndexerError, IndexExistsError
from indexer.reader import Index, Vocabulary
from tests.indexer.index_files import contents_but_lock
from tests.retriever.warm_interpreter import start

DocumentsOf = Callable[[Index], list[tuple[str, list[int]]]]

# Builds segment after segment, says so, and hangs before the last document.
HANGING_BUILD = """
import sys, time
from indexer.build import BuildOptions, build_from_tokens
from indexer.reader import Vocabulary

def documents():
    for number in range(50):
        yield f"new {number}", [number] * 10
    print("half-way", flush=True)
    time.sleep(600)

options = BuildOptions(segment_tokens=50, overwrite=True)
build_from_tokens(documents(), sys.argv[1], Vocabulary(100, "aa"), options)
"""


def test_an_existing_output_is_refused_and_left_alone(
    tmp_path: Path, tiny_index: Path, vocabulary: Vocabulary
) -> None:
    before = contents_but_lock(tiny_index)
    with pytest.raises(IndexExistsError, match="--overwrite"):
        build_from_tokens([("new", [1])], tiny_index, vocabulary)
    assert contents_but_lock(tiny_index) == before
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/thesis.txt").write_text("mine")
    for name, reason in [("file", "is a file"), ("folder", "not an index")]:
        with pytest.raises(IndexExistsError, match=reason):
            build_from_tokens(
                [("new", [1])], tmp_path / name, vocabulary, BuildOptions(overwrite=True)
            )
    assert (tmp_path / "folder/thesis.txt").read_text() == "mine"


@pytest.mark.parametrize(
    "name",
    [
        "thesis.txt",
        "catalog/notes",
        "segments/thesis.txt",
        "segments/00000000/thesis.txt",
        "segments/00000000/more/tokens",
        "segments/mine/tokens",
        "segments/1/tokens",
        "segments/00000000/counts1",
        "phrases/thesis.txt",
        "phrases/00000000/tokens",
        "phrases/00000000/more/tokens2",
        "phrases/mine/tokens2",
    ],
)
def test_what_an_index_does_not_hold_is_never_overwritten(
    name: str, tiny_index: Path, vocabulary: Vocabulary
) -> None:
    (tiny_index / name).parent.mkdir(parents=True, exist_ok=True)
    (tiny_index / name).write_text("mine")
    before = contents_but_lock(tiny_index)
    with pytest.raises(IndexExistsError, match=r"not an index \(it holds "):
        build_from_tokens([("new", [1])], tiny_index, vocabulary, BuildOptions(overwrite=True))
    assert contents_but_lock(tiny_index) == before
    assert list(tiny_index.parent.iterdir()) == [tiny_index]


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["segments/holiday.wav", "segments/00000000/clip.wav"], "holds segments"),
        (["segments/00000000/tokens"], "has no snapshot"),
    ],
)
def test_a_folder_that_resembles_an_index_is_never_overwritten(
    names: list[str], reason: str, tmp_path: Path, vocabulary: Vocabulary
) -> None:
    folder = tmp_path / "clips"
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("mine")
    with pytest.raises(IndexExistsError, match=reason):
        build_from_tokens([("new", [1])], folder, vocabulary, BuildOptions(overwrite=True))
    assert {(folder / name).read_text() for name in names} == {"mine"}


def test_an_index_with_a_link_in_it_is_never_overwritten(
    tmp_path: Path, tiny_index: Path, vocabulary: Vocabulary
) -> None:
    (tiny_index / "segments").rename(tmp_path / "elsewhere")
    (tiny_index / "segments").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(IndexExistsError, match="it holds segments"):
        build_from_tokens([("new", [1])], tiny_index, vocabulary, BuildOptions(overwrite=True))
    assert verify_index(tiny_index).findings == ()


def test_a_damaged_index_and_one_that_was_looked_at_may_be_overwritten(
    tiny_index: Path, vocabulary: Vocabulary
) -> None:
    (tiny_index / "segments/00000001/tokens").unlink()
    (tiny_index / "catalog/00000000").write_bytes(b"")
    (tiny_index / "writer.lock").touch()
    (tiny_index / ".scratch").mkdir()
    build_from_tokens([("new", [1])], tiny_index, vocabulary, BuildOptions(overwrite=True))
    assert verify_index(tiny_index).findings == ()


def test_an_empty_folder_and_missing_parents_are_fine_outputs(
    tmp_path: Path, vocabulary: Vocabulary
) -> None:
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "not/there/yet"):
        build_from_tokens([("a", [1])], path, vocabulary)
        assert verify_index(path).findings == ()


@pytest.mark.parametrize("in_one_step", [True, False])
def test_overwriting_replaces_the_index_under_readers_that_keep_theirs(
    *,
    in_one_step: bool,
    tiny_index: Path,
    vocabulary: Vocabulary,
    documents_of: DocumentsOf,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not in_one_step:  # as on a file system that cannot exchange folders
        monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace())
    with Index.open(tiny_index) as old:
        before = documents_of(old)
        build_from_tokens([("new", [7])], tiny_index, vocabulary, BuildOptions(overwrite=True))
        with Index.open(tiny_index) as new:
            assert documents_of(new) == [("new", [7])]
        assert documents_of(old) == before
    assert list(tiny_index.parent.iterdir()) == [tiny_index]


def test_a_failing_overwrite_leaves_the_old_index(
    tmp_path: Path, tiny_index: Path, vocabulary: Vocabulary
) -> None:
    before = contents_but_lock(tiny_index)
    for bad in ([], [("bad", [5000])]):
        with pytest.raises(IndexerError):
            build_from_tokens(bad, tiny_index, vocabulary, BuildOptions(overwrite=True))
    assert contents_but_lock(tiny_index) == before
    assert list(tmp_path.iterdir()) == [tiny_index]


@pytest.mark.parametrize("replacing", [False, True])
def test_a_killed_build_leaves_what_was_there_and_the_next_one_cleans_up(
    *, replacing: bool, tmp_path: Path, vocabulary: Vocabulary
) -> None:
    path = tmp_path / "index"
    if replacing:
        build_from_tokens([("old", [1, 2])], path, vocabulary)
    before = contents_but_lock(path)
    with start("-c", HANGING_BUILD, path) as process:
        assert process.stdout.readline() == "half-way\n"
        (partial,) = tmp_path.glob(".index.partial-*")
        assert list(partial.rglob("tokens"))
        process.send_signal(signal.SIGKILL)
    assert path.exists() == replacing
    assert contents_but_lock(path) == before
    assert partial.exists()

    build_from_tokens([("next", [3])], path, vocabulary, BuildOptions(overwrite=replacing))
    assert list(tmp_path.iterdir()) == [path]
    assert verify_index(path).findings == ()


def test_of_two_builds_at_once_the_second_is_refused_before_it_works(
    tmp_path: Path, vocabulary: Vocabulary, documents_of: DocumentsOf
) -> None:
    path = tmp_path / "index"
    begun, go_on = threading.Event(), threading.Event()

    def documents() -> Iterator[tuple[str, list[int]]]:
        begun.set()
        assert go_on.wait(60)
        yield "slow", [1]

    def build_slowly() -> None:
        build_from_tokens(documents(), path, vocabulary)

    thread = threading.Thread(target=build_slowly)
    thread.start()
    assert begun.wait(60)
    with pytest.raises(IndexBusyError, match=rf"is being built by process {os.getpid()} on"):
        build_from_tokens([("quick", [2])], path, vocabulary)
    go_on.set()
    thread.join()
    with Index.open(path) as index:
        assert documents_of(index) == [("slow", [1])]
    assert list(tmp_path.iterdir()) == [path]


def test_an_index_published_at_the_last_moment_is_not_replaced_unasked(
    tmp_path: Path,
    vocabulary: Vocabulary,
    documents_of: DocumentsOf,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "index"
    rename = Path.rename

    def rename_second(folder: Path, target: Path) -> Path:
        if target == path:
            monkeypatch.undo()
            build_from_tokens([("first", [1])], tmp_path / "other", vocabulary)
            (tmp_path / "other").rename(path)
        return rename(folder, target)

    monkeypatch.setattr(Path, "rename", rename_second)
    with pytest.raises(IndexExistsError, match="--overwrite"):
        build_from_tokens([("second", [2])], path, vocabulary)
    with Index.open(path) as index:
        assert documents_of(index) == [("first", [1])]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("taken", [False, True])
def test_a_failing_second_rename_keeps_the_old_index(
    *, taken: bool, tiny_index: Path, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename
    before = contents_but_lock(tiny_index)

    def fail_between(self: Path, target: Path) -> Path:
        if ".partial-" in self.name and not tiny_index.exists():
            if taken:  # by a user, in the instant in which nothing is there
                tiny_index.mkdir()
                (tiny_index / "thesis.txt").write_text("mine")
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace())
    monkeypatch.setattr(Path, "rename", fail_between)
    with pytest.raises(IndexerError, match="cannot put the index") as caught:
        build_from_tokens([("new", [1])], tiny_index, vocabulary, BuildOptions(overwrite=True))
    kept = tiny_index
    if taken:
        (kept,) = tiny_index.parent.glob(".tiny.index.replaced-*")
        assert str(kept) in str(caught.value)
        assert (tiny_index / "thesis.txt").read_text() == "mine"
    assert contents_but_lock(kept) == before
    assert {*tiny_index.parent.iterdir()} == {tiny_index, kept}


def test_a_build_needs_no_locks(
    tmp_path: Path, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    folder = tmp_path / ".index.partial-00000000"
    folder.mkdir()
    (tmp_path / ".index.lock-00000000").touch()  # perhaps of a build that is still running
    build_from_tokens([("a", [1])], tmp_path / "index", vocabulary)
    assert verify_index(tmp_path / "index").findings == ()
    assert len(list(tmp_path.iterdir())) == 3


def test_an_output_that_cannot_be_written_is_one_clear_error(
    tmp_path: Path, vocabulary: Vocabulary
) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(IndexerError, match="cannot write"):
        build_from_tokens([("a", [1])], tmp_path / "file/index", vocabulary)
