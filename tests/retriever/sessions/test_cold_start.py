"""Nobody waits for a compiler: services answer, engines decode, and rare evidence is left out."""

import importlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from retriever.client.connecting import connect
from retriever.drafter import DraftRequest, Prediction, SequenceOptions
from retriever.kernels.compiling import GROUPS, PREDICTIONS, NotKeptError, RareKernels, only_kept
from retriever.service.draft_stream import without_drafts
from retriever.sessions import cold_start
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.v1 import retriever_pb2 as pb
from tests.retriever.kernels.kept_kernels import keep_in

ROOT = Path(__file__).parents[3]
PHRASE = np.array([1, 2, 3, 4, 5, 6] * 4, np.int32)

SOURCE = """
from retriever.kernels.compiling import kernel

@kernel()
def successor(number):
    return number + 1
"""


def test_what_is_kept_is_loaded_and_nothing_else_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_in(tmp_path / "caches", monkeypatch)
    (tmp_path / "kept_successors.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    successor = importlib.import_module("kept_successors").successor
    with pytest.raises(NotKeptError), only_kept():
        successor(1)
    assert successor(1) == 2
    del sys.modules["kept_successors"]
    again = importlib.import_module("kept_successors").successor
    with only_kept():
        assert again(1) == 2
    with pytest.raises(NotKeptError), only_kept():
        again(1.5)
    assert again(1.5) == 2.5


@pytest.fixture
def asked() -> Iterator[list[RareKernels]]:
    found: list[RareKernels] = []
    for kernels in (GROUPS, PREDICTIONS):
        kernels.defer(found.append)
    yield found
    for kernels in (GROUPS, PREDICTIONS):
        kernels.is_ready = True


def test_rare_evidence_is_left_out_until_its_kernels_are_ready(asked: list[RareKernels]) -> None:
    drafter = EmbeddedDrafter()
    expected = [Prediction(np.arange(1, 40, dtype=np.int32))]

    def size(name: str, predictions: list[Prediction]) -> int:
        options = SequenceOptions(predictions=tuple(predictions), group="g")
        drafter.open(name, PHRASE[:3], options)
        return len(drafter.draft([DraftRequest(name, PHRASE[3:4], 4, 8)])[0].token_ids)

    assert [size("a", []), size("b", expected), size("c", expected)] == [0, 0, 0]
    assert asked == [GROUPS, PREDICTIONS]  # once each
    assert drafter.state.pool("").running is None
    PREDICTIONS.is_ready = GROUPS.is_ready = True
    assert size("d", expected) > 0
    assert drafter.state.pool("").running is not None
    drafter.shut_down()


def test_a_message_is_answered_without_a_drafter() -> None:
    message = pb.DraftStreamRequest(sequence_number=3)
    message.steps.add(session_id="a")
    message.steps.add(session_id="b").outcomes.add()
    answer = without_drafts(message)
    assert (answer.sequence_number, len(answer.trees), len(answer.outcome_trees)) == (3, 2, 1)
    assert not answer.statuses


@pytest.mark.programs
def test_a_service_drafts_while_and_after_its_kernels_are_compiled(tmp_path: Path) -> None:
    """With an empty cache: empty drafts at once, then drafts; and the next start finds all kept."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "foredraft", "serve", "--address", "127.0.0.1:0"]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        began = time.monotonic()
        address = process.stdout.readline().split()[-1]
        client = connect([address])
        sizes = [_drafted(client, "0")]
        assert time.monotonic() - began < 10  # imports on a busy machine; compiling takes longer
        while sizes[-1] == 0 and time.monotonic() < began + 600:
            time.sleep(0.5)
            before = time.monotonic()
            sizes.append(_drafted(client, str(len(sizes))))
            assert time.monotonic() - before < 1
        process.terminate()
        told = process.stderr.read()
    assert sizes[0] == 0 < sizes[-1]
    assert "kernels are compiled; no drafts yet" in told
    assert "drafts are made from now on" in told
    looking = "from retriever.sessions.cold_start import are_kept; assert are_kept([2])"
    kept = [sys.executable, "-c", looking]
    subprocess.run(kept, env=environment, check=True)


def _drafted(client: object, name: str) -> int:
    """Return the size of a draft; 0 where the session is not known (any more)."""
    from retriever.errors import RetrieverError  # noqa: PLC0415

    try:
        client.open(name, PHRASE)  # type: ignore[attr-defined]
        (tree,) = client.draft([DraftRequest(name, PHRASE[:1], len(PHRASE) + 1, 8)])  # type: ignore[attr-defined]
    except RetrieverError:
        return 0
    return len(tree.token_ids)


def test_what_cannot_be_kept_is_not_compiled_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_start, "can_keep", lambda: False)
    began = time.monotonic()
    assert cold_start.begin_compiling([2]).wait() == 0
    assert time.monotonic() - began < 20
