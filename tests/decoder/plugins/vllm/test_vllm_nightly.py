"""The whole recipe of docs/how-to/measuring.md with vLLM: a day, a night, and the next day."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-engine-vllm")

from retriever.client.strict import RemoteDrafter
from tests.decoder.plugins.vllm.vllm_jobs import TEXTS, assert_identical, run
from tests.patience import free_port

ROOT = Path(__file__).parents[4]
RECIPE = ROOT / "examples" / "nightly"
PATIENCE_S = 300.0
ENDING_S = 30.0
NUM_TOKENS = 48
QUESTIONS = TEXTS[2:7]
COUNTED = ("generation_tokens", "spec_decode_num_accepted_tokens", "spec_decode_num_draft_tokens")


def wait_until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.2)


class Recipe:
    """`run.sh` at work in a folder of its own."""

    def __init__(self, model: Path, data: Path) -> None:
        self.model, self.data = model, data
        self.port, metrics = free_port(), free_port()
        self._metrics = f"http://127.0.0.1:{metrics}/metrics"
        self.variables = {
            **os.environ,
            "FOREDRAFT_REFRESH": "0.5",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "DATA": str(data),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "FOREDRAFT_METRICS_ADDRESS": f"127.0.0.1:{metrics}",
        }
        options = f"--port {self.port} --dtype float32 --enforce-eager --max-model-len 512"
        options += f" --max-num-seqs 8 --kv-cache-memory-bytes {1 << 28}"
        # Everything is proposed, whatever passes cost on this machine.
        settings = {"server": [f"unix:{data}/draft.sock"], "measure": False}
        ours = json.dumps({"foredraft": settings}, separators=(",", ":"))
        options += f" --additional-config {ours}"
        self.log = data.with_suffix(".log")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [str(RECIPE / "run.sh"), str(model), *options.split()],
                env=self.variables,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def is_up(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-4000:]
        try:
            fetched(f"http://127.0.0.1:{self.port}/health")
        except OSError:
            return False
        return True

    def ask(self, question: str, *, stream: bool = False) -> list[int]:
        """Return the tokens of an answer, none where it is streamed."""
        body = {
            "model": str(self.model),
            "messages": [{"role": "user", "content": question}],
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "stream": stream,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:  # noqa: S310  ours
            content = answer.read()
        return [] if stream else list(json.loads(content)["choices"][0]["token_ids"])

    def counts(self) -> dict[str, float]:
        """vLLM's figures, and the service's accepted tokens by source."""
        found = dict.fromkeys(COUNTED, 0.0)
        for line in fetched(f"http://127.0.0.1:{self.port}/metrics").splitlines():
            name, _, value = line.rpartition(" ")
            for counted in COUNTED:
                if name.startswith(f"vllm:{counted}_total{{"):
                    found[counted] += float(value)
        for line in fetched(self._metrics).splitlines():
            name, _, value = line.rpartition(" ")
            if name.startswith("foredraft_accepted_tokens_total{"):
                found[name.split('"')[1]] = float(value)
        return found

    def index_night(self) -> None:
        """Let a night pass: today's log is yesterday's, and is indexed.

        The service forgets what it has seen, as on long days: it drafts from the index then.
        """
        today = datetime.now(UTC).date()
        logs = self.data / "logs"
        (logs / f"{today}.jsonl").rename(logs / f"{today - timedelta(days=1)}.jsonl")
        with self._client() as client:
            client.delete_tenant_data()
        more = {"REQUEST_LOG": str(logs), "INDEX": str(self.data / "answers.index")}
        command = [str(RECIPE / "nightly.sh"), str(self.model)]
        subprocess.run(command, env=self.variables | more, check=True)

    def drafts_from_index(self) -> bool:
        with self._client() as client:
            return any(info.num_documents for info in client.list_indexes())

    def _client(self) -> RemoteDrafter:
        return RemoteDrafter(f"unix:{self.data / 'draft.sock'}")


def fetched(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310  ours
        return str(answer.read().decode())


def since(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    spent = {name: after[name] - before[name] for name in after}
    passes = spent["generation_tokens"] - spent["spec_decode_num_accepted_tokens"]
    return spent | {"tokens_per_pass": round(spent["generation_tokens"] / passes, 2)}


def left_of(session: int) -> list[str]:
    """What of a session goes on.

    Python's trackers of shared memory end a moment after the processes that they serve.
    """
    listing = ["ps", "-o", "stat=,comm=", "-g", str(session)]
    deadline_s = time.monotonic() + ENDING_S
    while True:
        listed = subprocess.run(listing, capture_output=True, text=True, check=False).stdout
        left = [line for line in listed.splitlines() if not line.startswith("Z")]
        if not left or time.monotonic() > deadline_s:
            return left
        time.sleep(0.2)


@pytest.fixture
def recipe(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recipe]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # on busy machines two threads wait for each other
    running = Recipe(model, tmp_path / "data")
    yield running
    if running.process.poll() is None:
        os.killpg(running.process.pid, signal.SIGKILL)
        running.process.wait()


def test_vllm_drafts_today_what_it_answered_yesterday(
    recipe: Recipe, job: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wait_until(recipe.is_up)
    before = recipe.counts()
    first = [recipe.ask(question) for question in QUESTIONS]
    recipe.ask(QUESTIONS[0], stream=True)
    evening = recipe.counts()
    recipe.index_night()
    wait_until(recipe.drafts_from_index)
    second = [recipe.ask(question) for question in QUESTIONS]
    night = recipe.counts()
    days = [since(before, evening), since(evening, night)]
    begun_s = time.monotonic()
    os.killpg(recipe.process.pid, signal.SIGINT)  # as a terminal does at Ctrl-C
    assert recipe.process.wait(60) == 130
    took_s = time.monotonic() - begun_s
    left = left_of(recipe.process.pid)
    plain = run(tmp_path, job, prompts=job["prompts"][2:7], max_tokens=NUM_TOKENS)["alone"]
    equal = [
        assert_identical([{"tokens": tokens} for tokens in answers], plain)
        for answers in (first, second)
    ]
    with capsys.disabled():
        sys.stdout.write(
            "".join(f"\nday {number}: {day}" for number, day in enumerate(days, 1))
            + f"\nequal to plain: {equal} of {len(plain)}; ended in {took_s:.1f} s\n"
        )
    assert left == []
    assert min(equal) >= len(plain) - 1
    assert days[0]["corpus"] == 0
    assert days[1]["corpus"] > NUM_TOKENS
    assert days[1]["tokens_per_pass"] > days[0]["tokens_per_pass"]
    (log,) = (recipe.data / "logs").glob(f"{datetime.now(UTC).date()}.jsonl")
    assert len(log.read_text().splitlines()) == len(QUESTIONS)
