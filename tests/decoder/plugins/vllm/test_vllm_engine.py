"""vLLM itself, started as a user would, on SmolLM2: `make test-engine-vllm` runs this.

See `vllm_jobs` for how outputs are compared.
"""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-engine-vllm")

from indexer.build import build_index
from tests.decoder.plugins.vllm.vllm_jobs import TOKENS, assert_identical, run
from tests.indexer.engines.corpora import save_byte_tokenizer, write_corpus


def test_greedy_output_is_that_of_vllm_alone(
    job: dict[str, Any], plain: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run(tmp_path, job, num_speculative_tokens=6, together=True)
    num_alone = assert_identical(done["alone"], plain)
    ends = [done["together"][str(number)] for number in range(len(plain))]
    num_together = assert_identical(ends, plain)
    accepted = done["counts"]["vllm:spec_decode_num_accepted_tokens"]
    steps = sum(output["num_steps"] for output in done["alone"])
    with capsys.disabled():
        sys.stdout.write(
            f"\nequal to plain: {num_alone} alone, {num_together} together, of {len(plain)}; "
            f"{sum(len(output['tokens']) for output in done['alone']) / steps:.2f} tokens a step; "
            f"{done['counts']}\n"
        )
    assert num_alone >= len(plain) - 1
    assert accepted > 0
    assert sum(len(output["tokens"]) for output in done["alone"]) > 1.3 * steps


def test_sessions_are_not_mixed_up(job: dict[str, Any], plain: Any, tmp_path: Path) -> None:
    more = job["prompts"] * 2
    done = run(
        tmp_path,
        job,
        prompts=more,
        max_tokens=2 * TOKENS,
        watch=True,
        together=True,
        alone=0,
        abort={"3": 4, "5": 9, "11": 16},
        max_model_len=256,
        block_size=32,
        num_blocks=20,  # fewer than eight sequences need in the end: some are preempted
        enable_prefix_caching=False,
        num_speculative_tokens=6,
    )
    assert done["mixed_up"] == []
    assert done["num_rows"] > 100
    assert done["num_asked"] > done["num_rows"] / 2
    assert done["moved"] > 0
    assert done["counts"]["vllm:num_preemptions"] > 0
    assert done["failures"] == 0
    of_sources = [
        count
        for series, count in done["exposed"].items()
        if series.startswith("foredraft:spec_accepted_tokens_total")
    ]
    assert 0 < sum(of_sources) <= done["counts"]["vllm:spec_decode_num_accepted_tokens"]
    assert done["most_sessions"] <= 8 + 8 * 2  # what runs, and what ended in the last calls
    assert (done["sessions_left"], done["sessions_of_drafter"]) == (1, 1)
    assert done["tokens_left"] < 200
    finished = done["together"]
    assert not {"3", "5", "11"} & finished.keys()
    ends = {number: end for number, end in finished.items() if int(number) < len(plain)}
    assert_identical(list(ends.values()), [plain[int(number)] for number in ends])


@pytest.fixture
def server() -> Iterator[tuple[int, str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    process = subprocess.Popen(
        [sys.executable, "-m", "retriever", "serve", "--address", address],
        stderr=subprocess.DEVNULL,
    )
    deadline_s = time.monotonic() + 120
    while time.monotonic() < deadline_s:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", int(address.rpartition(":")[2]))) == 0:
                break
        time.sleep(0.2)
    yield process.pid, address
    process.kill()
    process.wait()


def test_vllm_goes_on_when_the_server_is_killed(
    job: dict[str, Any], plain: Any, server: tuple[int, str], tmp_path: Path
) -> None:
    pid, address = server
    done = run(
        tmp_path,
        job,
        watch=True,
        settings={"server": [address], "deadline_s": 0.5},
        server=pid,
        kill_at=4,
        num_speculative_tokens=6,
    )
    assert_identical(done["alone"], plain)
    assert done["mixed_up"] == []
    assert "cannot be reached" not in done["log"]


def test_troubles_cost_drafts_alone(job: dict[str, Any], plain: Any, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus", 1, 50)
    index = tmp_path / "index"
    build_index([corpus], index, str(save_byte_tokenizer(tmp_path / "tokenizer")))
    settings = {"server": ["127.0.0.1:1"], "index": [str(index)]}
    done = run(tmp_path, job, settings=settings, num_speculative_tokens=200)
    assert_identical(done["alone"], plain)
    assert "no drafts from 127.0.0.1:1 for now" in done["log"]
    assert f"no drafts from {index}" in done["log"]
    assert "at most 128 tokens" in done["log"]
    assert done["counts"]["vllm:spec_decode_num_accepted_tokens"] > 0
