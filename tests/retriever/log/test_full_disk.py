"""Where the disk takes no more, drafting goes on and logging does not."""

import errno
import logging
import os
import sys
import tempfile
from functools import partial
from pathlib import Path

import grpc
import numpy as np
import pytest

from benchmarks.serving.durability import output_of as output
from retriever.drafter import DraftRequest
from retriever.errors import StateError
from retriever.log import generations_log, pools
from retriever.log.generations_log import GenerationsLog
from retriever.log.log_store import LogStore
from retriever.log.options import LogOptions
from retriever.plugins.admin.administration import Administration
from retriever.predict.generations import Output
from retriever.predict.pool import Entry
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.v1 import retriever_pb2 as pb
from retriever.v1.retriever_pb2_grpc import RetrieverServiceStub
from tests.retriever.draft_streams import Exchange
from tests.retriever.log.state_folders import NUM_OUTPUTS, drafter_on, fill
from tests.retriever.security.in_process import serving
from tests.retriever.service.decodes import wait_until
from tests.retriever.warm_interpreter import run

ROOT = Path(__file__).parents[3]


def test_a_full_log_stops_logging_and_not_drafting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "LogOptions", partial(LogOptions, max_bytes=1 << 18))
    drafter = EmbeddedDrafter(state=tmp_path)
    for number in range(1000):
        drafter.open("s", output(number)[:1])
        drafter.draft([DraftRequest("s", output(number)[1:2], 2, 4)])
        drafter.close("s", output(number)[2:])
    assert 0 < drafter.stats().log_failures < 1000
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "a restart loses these outputs: free space" in caplog.text
    last = output(999)
    tree = drafter.draft_context(last[:9], 4)
    assert tree.token_ids.tolist() == last[9:13].tolist()
    num_kept = 1000 - drafter.stats().log_failures
    drafter.shut_down()
    assert len(kept_outputs(tmp_path)) == num_kept


def test_a_disk_that_takes_outputs_again_is_told_with_what_was_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(generations_log, "_BETWEEN_TOLD_S", 0.0)
    drafter = EmbeddedDrafter(state=tmp_path)
    drafter.remember(output(0))
    with monkeypatch.context() as patched:
        patched.setattr(LogStore, "append", full)
        drafter.remember(output(1))
    drafter.remember(output(2))
    drafter.shut_down()
    told = [record.getMessage() for record in caplog.records]
    assert ["cannot be saved" in each for each in told] == [True, False]
    assert "1 that were refused are only in memory" in told[1]


def test_callers_are_told_where_their_outputs_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a call at once; in a stream with the next response once the disk has answered."""
    with drafter_on(tmp_path / "state") as drafter, serving(drafter) as address:
        snapshot = Administration(drafter.state).snapshot
        with grpc.insecure_channel(address) as channel:
            stub = RetrieverServiceStub(channel)

            def close(name: str, tokens: list[int], *, forget: bool = False) -> int:
                stub.OpenSession(pb.OpenSessionRequest(session_id=name, prompt=[1]))
                closing = pb.CloseSessionRequest(
                    session_id=name, new_token_ids=tokens, forget=forget
                )
                return int(stub.CloseSession(closing).save_status)

            def stream_close(number: int) -> int:
                opened = pb.OpenSessionRequest(session_id=str(number), prompt=[1])
                closed = pb.CloseSessionRequest(session_id=str(number), new_token_ids=[2, 3, 4])
                return exchange(number, openings=[opened], closings=[closed]).num_not_kept

            assert close("a", [2, 3]) == pb.SAVE_STATUS_DISK
            assert close("b", [2, 3], forget=True) == close("c", []) == pb.SAVE_STATUS_NOTHING
            exchange = Exchange(channel)
            with monkeypatch.context() as full:
                full.setattr(LogStore, "append", refuse)
                full.setattr(LogStore, "delete", refuse)
                assert close("d", [2, 3]) == pb.SAVE_STATUS_DISK_REFUSED
                told = stream_close(1) + stream_close(2)
                assert wait_until(lambda: drafter.stats().log_failures == 3)
                assert told + exchange(3).num_not_kept == 2
                assert exchange(4).num_not_kept == 0
                drafter.remember(output(7))
                with pytest.raises(grpc.RpcError) as refused:
                    stub.DeleteTenantData(pb.DeleteTenantDataRequest())
                assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
                details = refused.value.details() or ""
                assert "ask again once the operator" in details
                assert str(tmp_path) not in details
                assert not len(drafter.draft_context(output(7)[:9], 4))
            assert len(kept_outputs(Path(snapshot(tmp_path, "refused").path))) == 1
            stub.DeleteTenantData(pb.DeleteTenantDataRequest())
            assert kept_outputs(Path(snapshot(tmp_path, "deleted").path)) == []
            assert close("e", [2, 3]) == pb.SAVE_STATUS_DISK
            exchange.end()
    with serving(EmbeddedDrafter()) as address, grpc.insecure_channel(address) as channel:
        stub = RetrieverServiceStub(channel)
        stub.OpenSession(pb.OpenSessionRequest(session_id="s", prompt=[1]))
        closing = pb.CloseSessionRequest(session_id="s", new_token_ids=[2])
        assert stub.CloseSession(closing).save_status == pb.SAVE_STATUS_MEMORY


def refuse(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


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
from retriever.sessions.embedded import EmbeddedDrafter
logging.basicConfig(format="%(levelname)s %(message)s")
drafter = EmbeddedDrafter(state=Path(sys.argv[1]), durability=sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, 1 << 18))
for number in range(1000):
    drafter.remember(np.arange(number, number + 200))
tree = drafter.draft_context(np.arange(999, 1009), 4)
assert tree.token_ids.tolist() == [1009, 1010, 1011, 1012]
drafter.shut_down()
print(drafter.stats().log_failures)
"""


@pytest.mark.parametrize("choice", ["process", "disk"])
def test_a_disk_that_takes_no_more_stops_logging_and_not_drafting(
    tmp_path: Path, choice: str
) -> None:
    done = run("-c", LIMITED, tmp_path, choice, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    failures = int(done.stdout)
    assert 0 < failures < 1000
    assert done.stderr.count("WARNING") == 1
    outputs = kept_outputs(tmp_path)
    assert len(outputs) == 1000 - failures
    assert all(len(found.tokens) == 200 for found in outputs)


READ_ONLY = """
import logging, os, sys, tempfile
from pathlib import Path
import numpy as np
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.errors import StateError
state = Path(sys.argv[1])
logging.basicConfig(format="%(levelname)s %(message)s")
EmbeddedDrafter().warm()
with tempfile.TemporaryDirectory() as folder:  # imports what only root may be able to read
    EmbeddedDrafter(state=Path(folder)).shut_down()
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
print(drafter.stats().log_failures)
drafter.shut_down()
"""


def others_may_enter(folder: Path) -> bool:
    return all(part.stat().st_mode & 0o001 for part in (folder, *folder.parents))


@pytest.mark.skipif(
    os.getuid() == 0 and not (others_may_enter(ROOT) and others_may_enter(Path(sys.prefix))),
    reason="root cannot become another user who may not enter the folders of the project",
)
def test_a_directory_that_cannot_be_written_is_read_and_not_logged_to() -> None:
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder)
        fill(state)
        state.chmod(0o555)
        for path in state.iterdir():
            path.chmod(0o444)
        before = {path.name: path.read_bytes() for path in state.iterdir()}
        tokens = ",".join(map(str, output(NUM_OUTPUTS - 1)[:12].tolist()))
        done = run("-c", READ_ONLY, state, tokens, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        refusal, warm, failures = done.stdout.splitlines()
        assert "cannot use the state directory" in refusal
        assert (warm, failures) == ("True", "1")
        warned = [each for each in done.stderr.splitlines() if each.startswith("WARNING")]
        # Another user than the one who compiled them may have no kernels, which is told, too.
        assert ["outputs cannot be saved" in each for each in warned if "kernels" not in each] == [
            True
        ]
        assert {path.name: path.read_bytes() for path in state.iterdir()} == before
        state.chmod(0o755)


def test_a_state_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match="choose another"):
        EmbeddedDrafter(state=tmp_path / "file")


def test_a_deletion_that_is_asked_for_again_rewrites_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = GenerationsLog(tmp_path)
    tokens = np.arange(70_000, 70_200, dtype=np.int32)
    log.append(Entry("t", Output(tokens, 0.0, b"o" * 16)))
    log.commit()
    with monkeypatch.context() as full:
        full.setattr(LogStore, "copy", refuse)
        with pytest.raises(StateError):
            log.delete_origin("t", b"o" * 16)
    log.delete_origin("t", b"o" * 16)
    log.close()
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(tokens[50:60].tobytes() in content for content in files)
