"""Whatever happens to the log: drafting goes on, and what is damaged is set aside and not lost."""

import logging
import os
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import lmdb
import numpy as np
import pytest

from benchmarks.serving import durability
from benchmarks.serving.durability import output_of as output
from retriever.errors import StateError
from retriever.log import log_files, log_reader, log_store as records
from retriever.log.generations_log import GenerationsLog
from retriever.log.log_files import LogFiles, open_store
from retriever.log.log_store import LogStore, Remembered
from retriever.log.options import LogOptions
from retriever.predict.generations import Output
from retriever.predict.pool import Entry
from tests.retriever.log.state_folders import NUM_OUTPUTS, fill
from tests.retriever.warm_interpreter import run
from tests.suite_parts import cases

ROOT = Path(__file__).parents[3]


def kept(state: Path) -> list[int]:
    """The numbers of the outputs in the log; each must be whole."""
    log = GenerationsLog(state)
    outputs = [found.tokens for found in log.load("").outputs]
    log.append(Entry("", Output(output(NUM_OUTPUTS), 0.0)))
    log.commit()
    assert log.failures == 0
    assert log.load("").outputs[-1].tokens.tolist() == output(NUM_OUTPUTS).tolist()
    log.close()
    numbers = [durability.number_of(tokens) for tokens in outputs]
    for number, tokens in zip(numbers, outputs, strict=True):
        assert np.array_equal(tokens, output(number))
    assert numbers == sorted(numbers)
    return numbers


def aside(state: Path) -> list[Path]:
    return list(state.glob("generations.damaged-*"))


def names_in(state: Path) -> list[str]:
    return sorted(path.name for path in state.iterdir())


def unseal(state: Path) -> None:
    (state / "generations.seal").unlink()


def rewrite(path: Path, change: Callable[[bytearray], None]) -> None:
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.clear(),
        lambda content: content.__delitem__(slice(5000, None)),
        lambda content: content.__setitem__(slice(None), bytes(len(content))),
        lambda content: content.__setitem__(slice(None), os.urandom(len(content))),
        lambda content: content.__setitem__(slice(0, 8192), b"not LMDB" * 1024),
    ],
    ids=["empty", "cut off", "zeros", "noise", "head"],
)
def test_a_damaged_log_is_set_aside_and_drafting_starts_cold(
    tmp_path: Path,
    sealed: bool,  # noqa: FBT001  a parameter of the test
    change: Callable[[bytearray], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    fill(tmp_path)
    rewrite(tmp_path / "generations.mdb", change)
    if not sealed:
        unseal(tmp_path)
    damaged = (tmp_path / "generations.mdb").read_bytes()
    assert kept(tmp_path) == []
    (path,) = aside(tmp_path)
    assert path.read_bytes() == damaged
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert path.name in caplog.text
    assert kept(tmp_path) == [NUM_OUTPUTS]


@pytest.mark.seeds
def test_random_damage_never_crashes_and_never_shows_a_torn_output(tmp_path: Path) -> None:
    rng = np.random.default_rng(51)
    fill(tmp_path)
    data = tmp_path / "generations.mdb"
    whole = data.read_bytes()
    saved = []
    for _ in range(cases(12, of=40)):
        content = bytearray(whole)
        for _ in range(int(rng.integers(1, 4))):
            begin = int(rng.integers(0, len(content)))
            length = int(rng.integers(1, 1 << int(rng.integers(1, 13))))
            content[begin : begin + length] = rng.bytes(len(content[begin : begin + length]))
        if rng.random() < 0.3:
            del content[int(rng.integers(4096, len(content))) :]
        data.write_bytes(content)
        before = aside(tmp_path)
        saved.append(len(kept(tmp_path)))
        set_aside = set(aside(tmp_path)) - set(before)
        assert bool(set_aside) == (saved[-1] == 0)  # whole or not at all, but for single records
        assert all(path.read_bytes() == content for path in set_aside)
    assert max(saved) > NUM_OUTPUTS // 2
    assert min(saved) == 0


def test_a_damaged_record_is_left_out_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(tmp_path)
    needle = output(60)[5:50].astype("<u4").tobytes()

    def flip(content: bytearray) -> None:
        assert content.count(needle) == 1
        content[content.index(needle) + 17] ^= 1

    rewrite(tmp_path / "generations.mdb", flip)
    assert kept(tmp_path) == [number for number in range(NUM_OUTPUTS) if number != 60]
    assert "1 records" in caplog.text


@pytest.mark.parametrize("sealed", [True, False])
def test_a_kill_while_copying_loses_nothing(
    tmp_path: Path,
    sealed: bool,  # noqa: FBT001  a parameter of the test
) -> None:
    fill(tmp_path)
    if not sealed:
        unseal(tmp_path)
    (tmp_path / "generations.copy-0badcafe").write_bytes(b"half of a copy")
    assert kept(tmp_path) == list(range(NUM_OUTPUTS))
    assert names_in(tmp_path) == ["generations.lock", "generations.mdb", "generations.seal"]


@pytest.mark.parametrize("tail", [b"", b"\xff" * 8, b"\xff" * 7, bytes(9)])
def test_a_damaged_key_harms_nothing_else(tmp_path: Path, tail: bytes) -> None:
    """LMDB takes any key: a number that is the last one, and keys that are cut off or too long."""
    fill(tmp_path)
    unseal(tmp_path)
    opened = lmdb.open(str(tmp_path / "generations.mdb"), subdir=False, lock=False)
    with closing(opened) as file, file.begin(write=True) as transaction:
        transaction.put(b"o\0\0" + tail, b"neither a checksum nor an output")
    log = GenerationsLog(tmp_path, options=LogOptions(max_age_s=1e9), clock=lambda: 1.0)
    assert log.load("").num_damaged == 1
    log.remove_expired()
    for number in (NUM_OUTPUTS, NUM_OUTPUTS + 1):
        log.append(Entry("", Output(output(number), 0.0)))
        log.commit()
    assert log.failures == 0
    numbers = [durability.number_of(found.tokens) for found in log.load("").outputs]
    assert sorted(numbers) == list(range(NUM_OUTPUTS + 2))
    log.close()


def test_a_log_that_was_set_aside_is_never_overwritten(tmp_path: Path) -> None:
    contents = [os.urandom(number) for number in (10_000, 20_000, 30_000)]
    for content in contents:
        (tmp_path / "generations.mdb").write_bytes(content)
        assert kept(tmp_path) == []
    assert [path.read_bytes() for path in sorted(aside(tmp_path))] == contents


def test_a_log_that_cannot_be_written_is_read_first_and_not_copied(tmp_path: Path) -> None:
    fill(tmp_path)
    unseal(tmp_path)
    before = (tmp_path / "generations.mdb").read_bytes()
    files = LogFiles(tmp_path)
    files.writable = False  # nothing is read-only to root
    store, _ = open_store(files, "", LogOptions())
    found = Remembered()
    store.read("", 0.0, found)
    store.close()
    files.release()
    assert len(found.outputs) == NUM_OUTPUTS
    assert names_in(tmp_path) == ["generations.lock", "generations.mdb"]
    assert (tmp_path / "generations.mdb").read_bytes() == before


def test_a_damaged_log_that_cannot_be_set_aside_is_left_as_it_is(tmp_path: Path) -> None:
    fill(tmp_path)
    rewrite(tmp_path / "generations.mdb", lambda content: content.__delitem__(slice(5000, None)))
    files = LogFiles(tmp_path)
    files.writable = False  # nothing is read-only to root
    with pytest.raises(StateError, match=r"is damaged \(.*\), and its directory cannot be written"):
        open_store(files, "", LogOptions())
    files.release()
    assert (tmp_path / "generations.mdb").stat().st_size == 5000
    assert names_in(tmp_path) == ["generations.lock", "generations.mdb", "generations.seal"]


def test_without_room_for_a_copy_the_log_is_opened_as_it_is(tmp_path: Path) -> None:
    fill(tmp_path)
    unseal(tmp_path)
    limited = """
import resource, sys
from pathlib import Path
from retriever.log.generations_log import GenerationsLog
from retriever.log import log_files
state = Path(sys.argv[1])
size = (state / "generations.mdb").stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, resource.RLIM_INFINITY))
print(log_files.damage_in(state / "generations.mdb", state / "copy"), (state / "copy").exists())
print(len(GenerationsLog(state).load("").outputs))
"""
    done = run("-c", limited, tmp_path, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", str(NUM_OUTPUTS)]
    assert kept(tmp_path) == list(range(NUM_OUTPUTS))
    assert names_in(tmp_path) == ["generations.lock", "generations.mdb", "generations.seal"]


def log_reader_that(does: str) -> str:
    return f"import os, signal, sys, time\n{does}\n"


READERS = {
    "crashes": (log_reader_that("os.kill(os.getpid(), signal.SIGSEGV)"), "ends with SIGSEGV"),
    "says so": (log_reader_that("sys.stderr.write('torn'); sys.exit(10)"), "torn"),
    "hangs": (log_reader_that("time.sleep(60)"), "cannot be read within"),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(each, marks=[pytest.mark.faults] * (each == "hangs")) for each in READERS],
)
def test_a_log_that_its_reader_finds_damaged_is_set_aside_with_the_reason(
    tmp_path: Path,
    case: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    program, reason = READERS[case]
    state = prepared(tmp_path, program, monkeypatch)
    whole = (state / "generations.mdb").read_bytes()
    monkeypatch.setattr(log_files, "READING_S", 5.0 if case == "hangs" else 60.0)
    assert kept(state) == []
    (path,) = aside(state)
    assert path.read_bytes() == whole
    (record,) = caplog.records
    assert reason in record.getMessage()
    assert path.name in record.getMessage()
    assert "\n" not in record.getMessage()


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (log_reader_that("raise MemoryError('too little')"), "status 1: MemoryError: too little"),
        (log_reader_that("os.kill(os.getpid(), signal.SIGKILL)"), "status -9: it was killed"),
        (None, "cannot be started"),
    ],
    ids=["fails", "is killed", "does not start"],
)
def test_a_log_that_nothing_could_read_is_neither_opened_nor_set_aside(
    tmp_path: Path, program: str | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = prepared(tmp_path, program or "", monkeypatch)
    with monkeypatch.context() as patch:
        if program is None:
            patch.setattr(sys, "executable", "/no/such/python")
        with pytest.raises(StateError, match=f"{reason}.*start again, or choose another"):
            GenerationsLog(state)
    assert not aside(state)
    monkeypatch.undo()
    assert kept(state) == list(range(NUM_OUTPUTS))


def prepared(tmp_path: Path, program: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state that was not closed in order, and another program in the reader's place."""
    (tmp_path / "program.py").write_text(program)
    monkeypatch.setattr(log_reader, "__file__", str(tmp_path / "program.py"))
    fill(tmp_path / "state")
    unseal(tmp_path / "state")
    return tmp_path / "state"


def test_another_format_is_refused(tmp_path: Path) -> None:
    fill(tmp_path)
    store = LogStore(tmp_path / "generations.mdb", LogOptions())
    store.put({records.FORMAT_KEY: b"\x02"})
    store.close()
    with pytest.raises(StateError, match="version 02, and this is version 1: remove"):
        GenerationsLog(tmp_path)


def test_a_directory_of_copies_is_no_state_directory(tmp_path: Path) -> None:
    for day in ("27", "28"):
        fill(tmp_path / day)
    (tmp_path / "notes.txt").write_text("which is which")
    with pytest.raises(StateError, match="holds 2: name one of them, the last is 28"):
        GenerationsLog(tmp_path)
    assert names_in(tmp_path) == ["27", "28", "notes.txt"]
    assert kept(tmp_path / "28") == list(range(NUM_OUTPUTS))
