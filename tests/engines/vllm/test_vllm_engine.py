"""vLLM itself, started as a user would, on SmolLM2: `make test-engine-vllm` runs this.

Greedy outputs are compared in float32. A pass over several tokens adds up in another order than
one over a single token, in vLLM as elsewhere, so where two tokens are equally probable to some
1e-4, either may come: an output may leave the plain one at such a tie and nowhere else.
"""

import json
import os
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
from indexer.tokenizer import load_tokenizer
from tests.engines.smollm2 import save_smollm2
from tests.indexer.engines.corpora import save_byte_tokenizer, write_corpus

TIE = 1e-3
TOKENS = 40
TEXTS = (
    "Repeat this list three times: red, green, blue, yellow, black, white, orange, purple.",
    "Repeat this list three times: red, green, blue, yellow, black, white, orange, purple!",
    "Write the numbers from one to thirty, separated by commas.",
    "What is the capital of France? Answer in one sentence, then repeat the sentence.",
    "Write a Python function that adds two numbers, and then one that subtracts them.",
    "Tell me a short story about a fox and a crow.",
    "Explain why the sky is blue in simple words.",
    "Translate to French: the cat sits on the table and the dog lies under the table.",
    "Write the numbers from one to thirty, separated by commas.",
    "Write a poem in which every line begins with the words: in the morning.",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_smollm2(tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="module")
def job(model: Path) -> dict[str, Any]:
    tokenizer = load_tokenizer(str(model))
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in TEXTS
    ]
    return {"model": str(model), "prompts": prompts, "max_tokens": TOKENS}


def run(folder: Path, job: dict[str, Any], **more: Any) -> Any:
    """Do a job in a process of its own; in one that can be watched, if that is asked for.

    Everything is proposed, whatever passes cost on this machine, unless a job says otherwise.
    """
    more["settings"] = {"measure": False} | more.get("settings", {})
    report = folder / "report.json"
    inside = {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(not more.get("watch")))}
    done = subprocess.run(
        [sys.executable, "-m", "tests.engines.vllm.engine", str(report)],
        input=json.dumps(job | more),
        env={**os.environ, **inside, "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return {**json.loads(report.read_text()), "log": done.stdout + done.stderr}


@pytest.fixture(scope="module")
def plain(job: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run(tmp_path_factory.mktemp("plain"), job)["alone"]


def assert_identical(outputs: list[Any], plain: list[Any]) -> int:
    """Return how many are equal; every other one leaves the plain one at a tie."""
    num_equal = 0
    for ours, reference in zip(outputs, plain, strict=True):
        pairs = zip(ours["tokens"], reference["tokens"], strict=False)
        apart = next((at for at, (one, other) in enumerate(pairs) if one != other), None)
        num_equal += apart is None
        assert apart is None or reference["gaps"][apart] < TIE
    return num_equal


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
