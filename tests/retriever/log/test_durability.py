"""Processes that are killed lose nothing that they acknowledged."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.serving import durability
from benchmarks.serving.durability import output_of as output
from retriever.client.strict import RemoteDrafter
from retriever.drafter import DraftRequest
from retriever.predict.generations import Output
from tests.retriever.conftest import start_service, stop_service

ROOT = Path(__file__).parents[3]


@pytest.mark.faults
@pytest.mark.parametrize("choice", ["process", "disk"])
def test_kills_lose_nothing_that_was_acknowledged(choice: str) -> None:
    command = [sys.executable, "benchmarks/serving/durability.py", "--kills", "30", "--json"]
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


@pytest.mark.faults
def test_a_service_that_was_killed_starts_as_warm_as_it_was(tmp_path: Path) -> None:
    arguments = ("--address", "127.0.0.1:0", "--state", str(tmp_path / "state"))
    tokens = output(3)
    process, address = start_service(*arguments)
    with RemoteDrafter(address) as drafter:
        drafter.open("s", tokens[:1])
        drafter.close("s", tokens[1:])
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    process, address = start_service(*arguments)
    with RemoteDrafter(address) as drafter:
        drafter.open("s", tokens[:9])
        tree = drafter.draft([DraftRequest("s", tokens[:0], 9, 4)])[0]
        assert np.array_equal(tree.token_ids, tokens[9:13])
    stop_service(process)
    assert (tmp_path / "state" / "generations.seal").exists()
