"""Whatever happens to the log: drafting goes on, and nothing half-written is ever read."""

import logging
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks.serving import durability
from benchmarks.serving.durability import output_of as output
from retriever.errors import StateError
from retriever.log import log_store as records
from retriever.log.generations_log import GenerationsLog
from retriever.log.log_store import LogStore
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
    if damaged:  # an empty file is an empty log
        (path,) = aside(tmp_path)
        assert path.read_bytes()[: len(damaged)] == damaged
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
        saved.append(len(kept(tmp_path)))
    assert max(saved) > NUM_OUTPUTS // 2  # what could be read was kept
    assert min(saved) < NUM_OUTPUTS


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


@pytest.mark.parametrize("step", ["copying", "between the two names"])
def test_a_kill_while_mending_loses_nothing(tmp_path: Path, step: str) -> None:
    fill(tmp_path)
    unseal(tmp_path)
    data = tmp_path / "generations.mdb"
    if step == "copying":
        (tmp_path / "generations.salvaged-0badcafe").write_bytes(b"half of a copy")
        (tmp_path / "generations.salvaged").write_bytes(b"a copy of damaged data")
    else:
        data.rename(tmp_path / "generations.salvaged")
    assert kept(tmp_path) == list(range(NUM_OUTPUTS))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "generations.lock",
        "generations.mdb",
        "generations.seal",
    ]


def test_without_room_for_a_copy_the_log_is_opened_as_it_is(tmp_path: Path) -> None:
    fill(tmp_path)
    unseal(tmp_path)
    limited = f"""
import resource, sys
from pathlib import Path
from retriever.log.salvage import salvage
source, target = map(Path, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_FSIZE, (source.stat().st_size, -1))
sys.exit(salvage(source, Path("{tmp_path}/no/folder/copy")))
"""
    source = tmp_path / "generations.mdb"
    done = run("-c", limited, source, source, cwd=ROOT)
    assert done.returncode == 11
    assert kept(tmp_path) == list(range(NUM_OUTPUTS))


def test_another_format_is_refused(tmp_path: Path) -> None:
    fill(tmp_path)
    store = LogStore(tmp_path / "generations.mdb", LogOptions())
    store.put({records.FORMAT_KEY: b"\x02"})
    store.close()
    with pytest.raises(StateError, match="version 02, and this is version 1: remove"):
        GenerationsLog(tmp_path)
