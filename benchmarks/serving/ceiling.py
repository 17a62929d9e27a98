"""A service at its ceiling: what it says that it keeps, against what the system says it has.

    python -m benchmarks.serving.ceiling --seconds 600 --json

A real `foredraft serve` with a ceiling in bytes. Tenants open sessions of 500 to 200,000 tokens,
let them grow, close some and abandon others, and go on as soon as they are refused, so that the
service is full all the time. Each second `foredraft_memory_bytes` is read, and the resident memory
from the system right before and after. Past a warm-up of a fifth of the time, they must agree
within 5%, by their median and 95th percentile, and what is reserved must stay below the ceiling.
"""

import json
import math
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated, Any, Final

import grpc
import numpy as np
import typer

from benchmarks.comparison import circumstances
from retriever.security.access import add_token
from retriever.v1 import retriever_pb2 as pb
from retriever.v1.retriever_pb2_grpc import RetrieverServiceStub

MOST_OFF: Final = 0.05
"""Greatest difference between what is said and what is, as a part of the latter."""

_WARM_UP: Final = 0.2
_SHORTEST, _LONGEST = 500, 200_000  # tokens of prompts; their logarithms are uniform
_VOCABULARY: Final = 50_000
_STEPS: Final = 8  # sequences in a step
_MIB: Final = 1 << 20


@dataclass
class Pressed:
    """What happened at the ceiling.

    Attributes:
        said: bytes by the metric, one each second past the warm-up.
        resident: bytes by the system at the same times.
        reserved: bytes taken from the ceiling at the same times.
        answers: calls by what was answered: `ok`, a limit, or a status.
        evictions: how often what made room.
        status: of the process at its end.
    """

    said: list[float] = field(default_factory=list)
    resident: list[float] = field(default_factory=list)
    reserved: list[float] = field(default_factory=list)
    answers: Counter[str] = field(default_factory=Counter)
    evictions: dict[str, float] = field(default_factory=dict)
    status: int = 0

    @property
    def off(self) -> list[float]:
        """Differences, as parts of what is resident."""
        return [said / real - 1.0 for said, real in zip(self.said, self.resident, strict=True)]

    def figures(self, max_bytes: int) -> dict[str, Any]:
        """Return the figures of the run."""
        return {
            "samples": len(self.said),
            "largest_difference": max(map(abs, self.off)),
            "p95_difference": sorted(map(abs, self.off))[int(0.95 * len(self.off))],
            "median_difference": sorted(self.off)[len(self.off) // 2],
            "resident_mib": [min(self.resident) / _MIB, max(self.resident) / _MIB],
            "said_mib": [min(self.said) / _MIB, max(self.said) / _MIB],
            "reserved_of_ceiling": [min(self.reserved) / max_bytes, max(self.reserved) / max_bytes],
            "answers": dict(self.answers),
            "evictions": self.evictions,
            "status": self.status,
        }


class Tenant(threading.Thread):
    """One tenant, which wants more than there is."""

    def __init__(self, address: str, token: str, seed: int, over: threading.Event) -> None:
        super().__init__(daemon=True)
        self.answers: Counter[str] = Counter()
        self._metadata = (("authorization", f"Bearer {token}"),)
        self._channel = grpc.insecure_channel(
            address, options=[("grpc.max_send_message_length", -1)]
        )
        self._stub = RetrieverServiceStub(self._channel)
        self._rng = np.random.default_rng(seed)
        self._over = over
        self._lengths: dict[str, int] = {}
        self._outbox: SimpleQueue[pb.DraftStreamRequest | None] = SimpleQueue()
        self._number = 0

    def run(self) -> None:
        """Open sessions, let them grow, and close some, until it is over."""
        answers = self._stub.DraftStream(iter(self._outbox.get, None), metadata=self._metadata)
        with self._channel:
            while not self._over.is_set():
                if self._open() or not self._lengths:
                    self._step(answers)
                else:
                    for name in self._some(len(self._lengths) // 4 + 1):
                        self._end(name)
            self._outbox.put(None)

    def _open(self) -> bool:
        low, high = math.log(_SHORTEST), math.log(_LONGEST)
        length = int(math.exp(self._rng.uniform(low, high)))
        name = f"{self._rng.integers(1 << 62)}"
        prompt = self._rng.integers(_VOCABULARY, size=length).tolist()
        opening = pb.OpenSessionRequest(session_id=name, prompt=prompt)
        is_open = self._ask(lambda: self._stub.OpenSession(opening, metadata=self._metadata))
        if is_open:
            self._lengths[name] = length
        return is_open

    def _step(self, answers: Iterator[pb.DraftStreamResponse]) -> None:
        self._number += 1
        message = pb.DraftStreamRequest(sequence_number=self._number)
        steps = {}
        for name in self._some(_STEPS):
            new = self._rng.integers(_VOCABULARY, size=int(self._rng.integers(1, 400))).tolist()
            steps[name] = self._lengths[name] + len(new)
            message.steps.add(
                session_id=name, new_token_ids=new, length=steps[name], budget_nodes=16
            )
        self._outbox.put(message)
        refused = {status.session_id for status in next(answers).statuses}
        self._lengths |= {name: length for name, length in steps.items() if name not in refused}
        for name in refused:
            del self._lengths[name]  # ended as idle, or there is no room: abandoned
        self.answers.update(ok=len(steps) - len(refused), step_refused=len(refused))

    def _end(self, name: str) -> None:
        del self._lengths[name]
        if self._rng.random() < 0.1:  # noqa: PLR2004
            return  # abandoned
        output = self._rng.integers(_VOCABULARY, size=int(self._rng.integers(1, 2000))).tolist()
        closing = pb.CloseSessionRequest(session_id=name, new_token_ids=output)
        self._ask(lambda: self._stub.CloseSession(closing, metadata=self._metadata))

    def _some(self, num: int) -> list[str]:
        names = list(self._lengths)
        return [names[at] for at in self._rng.permutation(len(names))[:num]]

    def _ask(self, call: Any) -> bool:
        try:
            call()
        except grpc.RpcError as error:
            details = error.details() or ""
            limits = [each for each in ("max_tenant_bytes", "max_bytes") if each in details]
            self.answers[limits[0] if limits else error.code().name] += 1
            return False
        self.answers["ok"] += 1
        return True


@contextmanager
def _service(folder: Path, max_bytes: int) -> Iterator[tuple["subprocess.Popen[str]", str, str]]:
    command = [
        *(sys.executable, "-m", "retriever", "serve", "--address", "127.0.0.1:0"),
        *("--max-bytes", str(max_bytes), "--max-tenant-bytes", str(max_bytes // 3)),
        *("--access", str(folder / "access"), "--state", str(folder / "state")),
        *("--idle-session-s", "60", "--idle-eviction-s", "5", "--log-format", "json"),
        *("--max-sessions", "100000", "--max-tenant-sessions", "50000"),
        *("--metrics-address", "127.0.0.1:0", "--generations-tokens", str(1 << 18)),
    ]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        line = process.stdout.readline() if process.stdout is not None else ""
        address = line.removeprefix("serving on ").strip()
        try:
            yield process, address, _metrics_address(folder / "log")
        finally:
            process.terminate()
            process.communicate(timeout=60)


def _metrics_address(log: Path) -> str:
    events = map(json.loads, log.read_text().splitlines())
    return next(str(event["address"]) for event in events if event.get("event") == "metrics")


def _read(metrics: str) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=30) as page:
        lines = page.read().decode().splitlines()
    pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


def _resident(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def press(seconds: float, max_bytes: int, num_tenants: int) -> Pressed:
    """Run a service at its ceiling for a time, and compare each second."""
    pressed, over = Pressed(), threading.Event()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokens = [add_token(folder / "access", str(at)) for at in range(num_tenants)]
        with _service(folder, max_bytes) as (process, address, metrics):
            tenants = [Tenant(address, each, at, over) for at, each in enumerate(tokens)]
            for tenant in tenants:
                tenant.start()
            began_s = time.monotonic()
            while (passed_s := time.monotonic() - began_s) < seconds:
                time.sleep(1.0)
                before, found, after = (
                    _resident(process.pid),
                    _read(metrics),
                    _resident(process.pid),
                )
                if passed_s > _WARM_UP * seconds:
                    pressed.said.append(found["foredraft_memory_bytes"])
                    pressed.resident.append((before + after) / 2)
                    pressed.reserved.append(found["foredraft_memory_reserved_bytes"])
            over.set()
            for tenant in tenants:
                tenant.join(60)
                pressed.answers += tenant.answers
            pressed.evictions = {
                each: value for each, value in _read(metrics).items() if "evictions_total" in each
            }
        pressed.status = process.returncode
    return pressed


def main(
    seconds: Annotated[float, typer.Option(help="How long.")] = 60.0,
    max_bytes: Annotated[int, typer.Option(help="The ceiling, in bytes.")] = 1 << 30,
    tenants: Annotated[int, typer.Option(help="Tenants that press against it.")] = 4,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,  # noqa: FBT002
) -> None:
    """Compare what a service at its ceiling says with what it has; fail if they are 5% apart."""
    figures = press(seconds, max_bytes, tenants).figures(max_bytes)
    if json_:
        told = {"seconds": seconds, "max_bytes": max_bytes, "tenants": tenants}
        print(json.dumps({**circumstances(), **told, **figures}, indent=2))
    else:
        for name, value in figures.items():
            print(f"{name:22} {value}")
    held = figures["p95_difference"] <= MOST_OFF and figures["reserved_of_ceiling"][1] <= 1.0
    if not held or figures["status"] != 0:
        raise SystemExit(1)


if __name__ == "__main__":
    typer.run(main)
