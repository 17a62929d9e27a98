"""Whatever happens to the log: drafting goes on, and nothing half-written is ever read."""

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks import durability
from retriever import DraftRequest, RemoteDrafter, StateError, TokenIds
from retriever import log_records as records
from retriever.embedded import EmbeddedDrafter
from retriever.generations import Output
from retriever.generations_log import GenerationsLog
from retriever.log_store import Entry, LogOptions, LogStore
from tests.retriever.conftest import start_service, stop_service

ROOT = Path(__file__).parent.parent.parent
NUM_OUTPUTS = 120


def output(number: int) -> TokenIds:
    return durability.output_of(number)


def fill(state: Path, num_outputs: int = NUM_OUTPUTS) -> None:
    log = GenerationsLog(state)
    for number in range(num_outputs):
        log.append(Entry("", Output(output(number), 0.0)))
        log.commit()
    log.close()


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


def test_random_damage_never_crashes_and_never_shows_a_torn_output(tmp_path: Path) -> None:
    rng = np.random.default_rng(51)
    fill(tmp_path)
    data = tmp_path / "generations.mdb"
    whole = data.read_bytes()
    saved = []
    for _ in range(40):
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
from retriever.log_salvage import salvage
source, target = map(Path, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_FSIZE, (source.stat().st_size, -1))
sys.exit(salvage(source, Path("{tmp_path}/no/folder/copy")))
"""
    source = tmp_path / "generations.mdb"
    done = subprocess.run([sys.executable, "-c", limited, source, source], check=False, cwd=ROOT)
    assert done.returncode == 11
    assert kept(tmp_path) == list(range(NUM_OUTPUTS))


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    fill(tmp_path)
    store = LogStore(tmp_path / "generations.mdb", LogOptions())
    store.put({records.FORMAT_KEY: b"\x02"})
    store.close()
    with pytest.raises(StateError, match="upgrade foredraft"):
        GenerationsLog(tmp_path)


def test_a_full_log_stops_logging_and_not_drafting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = GenerationsLog(tmp_path, options=LogOptions(max_bytes=1 << 18))
    drafter = EmbeddedDrafter()
    drafter._log = drafter._pools._log = log
    for number in range(1000):
        drafter.open("s", output(number)[:1])
        drafter.draft([DraftRequest("s", output(number)[1:2], 2, 4)])
        drafter.close("s", output(number)[2:])
    assert 0 < drafter.log_failures < 1000
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "drafting goes on" in caplog.text
    last = output(999)
    tree = drafter.draft_context(last[:9], 4)
    assert tree.token_ids.tolist() == last[9:13].tolist()
    num_kept = len(log.load("").outputs)
    assert num_kept == 1000 - drafter.log_failures
    drafter.shut_down()
    assert len(kept_outputs(tmp_path)) == num_kept


def kept_outputs(state: Path) -> list[Output]:
    log = GenerationsLog(state)
    outputs = log.load("").outputs
    log.close()
    return outputs


def test_the_map_grows_as_far_as_it_may(tmp_path: Path) -> None:
    log = GenerationsLog(tmp_path, options=LogOptions(capacity=1 << 24))
    tokens = np.full(1 << 20, 70_000, np.int32)
    for _ in range(12):
        log.append(Entry("", Output(tokens, 0.0)))
        log.commit()
    assert log.failures == 0
    log.close()
    assert (tmp_path / "generations.mdb").stat().st_size > 48 << 20


LIMITED = """
import logging, resource, sys
from pathlib import Path
import numpy as np
from retriever.embedded import EmbeddedDrafter
logging.basicConfig(format="%(levelname)s %(message)s")
drafter = EmbeddedDrafter(state=Path(sys.argv[1]), durability=sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, 1 << 18))
for number in range(1000):
    drafter.remember(np.arange(number, number + 200))
tree = drafter.draft_context(np.arange(999, 1009), 4)
assert tree.token_ids.tolist() == [1009, 1010, 1011, 1012]
drafter.shut_down()
print(drafter.log_failures)
"""


@pytest.mark.parametrize("choice", ["process", "disk"])
def test_a_disk_that_takes_no_more_stops_logging_and_not_drafting(
    tmp_path: Path, choice: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, tmp_path, choice],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    failures = int(done.stdout)
    assert 0 < failures < 1000
    assert done.stderr.count("WARNING") == 1
    outputs = kept_outputs(tmp_path)
    assert len(outputs) == 1000 - failures
    assert all(len(found.tokens) == 200 for found in outputs)


READ_ONLY = """
import logging, os, sys
from pathlib import Path
import numpy as np
from retriever.embedded import EmbeddedDrafter
from retriever.errors import StateError
state = Path(sys.argv[1])
logging.basicConfig(format="%(levelname)s %(message)s")
EmbeddedDrafter().warm()
if os.getuid() == 0:
    os.setuid(65534)  # nothing is read-only to root
try:
    EmbeddedDrafter(state=state / "new")
except StateError as error:
    print(error)
drafter = EmbeddedDrafter(state=state)
drafter.remember(np.arange(200))
tokens = np.array(sys.argv[2].split(","), np.int32)
print(np.array_equal(drafter.draft_context(tokens[:8], 4).token_ids, tokens[8:12]))
print(drafter.log_failures)
drafter.shut_down()
"""


def test_a_directory_that_cannot_be_written_is_read_and_not_logged_to() -> None:
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder)
        fill(state)
        state.chmod(0o555)
        for path in state.iterdir():
            path.chmod(0o444)
        before = {path.name: path.read_bytes() for path in state.iterdir()}
        tokens = ",".join(map(str, output(NUM_OUTPUTS - 1)[:12].tolist()))
        done = subprocess.run(
            [sys.executable, "-c", READ_ONLY, state, tokens],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        refusal, warm, failures = done.stdout.splitlines()
        assert "cannot use the state directory" in refusal
        assert (warm, failures) == ("True", "1")
        assert done.stderr.count("WARNING") == 1
        assert {path.name: path.read_bytes() for path in state.iterdir()} == before
        state.chmod(0o755)


def test_a_state_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match="choose another"):
        EmbeddedDrafter(state=tmp_path / "file")


@pytest.mark.parametrize("choice", ["process", "disk"])
def test_kills_lose_nothing_that_was_acknowledged(choice: str) -> None:
    command = [sys.executable, "benchmarks/durability.py", "--kills", "30", "--json"]
    done = subprocess.run(
        [*command, "--durability", choice], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout)
    assert figures["kills"] == 30
    assert figures["acknowledged"] > 30


def test_the_check_of_the_kills_notices_what_is_lost_and_what_is_torn() -> None:
    def counted(numbers: list[int], acknowledged: int) -> tuple[int, int, int]:
        counts = durability.Counts()
        outputs = [Output(output(number), 0.0) for number in numbers]
        durability.check(outputs, acknowledged, counts)
        return counts.lost, counts.torn, counts.unacknowledged

    assert counted([0, 1, 2, 3], 4) == (0, 0, 0)
    assert counted([0, 1, 2, 3], 3) == (0, 0, 1)
    assert counted([0, 1, 2], 4) == (1, 0, 0)
    assert counted([0, 1, 3], 4) == (1, 0, 0)
    assert counted([], 2) == (2, 0, 0)
    assert counted([0, 2, 1, 3], 4) == (0, 1, 0)
    counts = durability.Counts()
    torn = [Output(output(0), 0.0), Output(output(1)[:-1], 0.0)]
    durability.check(torn, 2, counts)
    assert (counts.lost, counts.torn) == (0, 1)


def test_a_service_that_was_killed_starts_as_warm_as_it_was(tmp_path: Path) -> None:
    arguments = ("--address", "127.0.0.1:0", "--state", str(tmp_path / "state"))
    tokens = output(3)
    process, address = start_service(*arguments)
    with RemoteDrafter(address) as drafter:
        drafter.open("s", tokens[:1])
        drafter.close("s", tokens[1:])
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    process, address = start_service(*arguments)
    with RemoteDrafter(address) as drafter:
        drafter.open("s", tokens[:9])
        tree = drafter.draft([DraftRequest("s", tokens[:0], 9, 4)])[0]
        assert np.array_equal(tree.token_ids, tokens[9:13])
    stop_service(process)
    assert (tmp_path / "state" / "generations.seal").exists()
