"""What a tenant's stream waits for other tenants: its steps beside attackers that ask for much.

A victim asks for one-sequence steps, and now and then opens and closes a session, in a process of
its own. It is measured alone, beside each attack (`fairness_attacks.ATTACKS`), and right before
that beside a control: processes that take the processor time that the attack takes, at full cores
and a rest, and ask for nothing.
Phases are short and repeated, so that a noisy machine is the same for both.
"""

import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from pathlib import Path
from queue import Empty, SimpleQueue
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Final, NamedTuple

import grpc
import numpy as np
import typer
from numpy.typing import NDArray

from benchmarks.comparison import circumstances
from benchmarks.serving.fairness_attacks import ATTACKS, Tally, attack, spin
from indexer.build import build_from_tokens
from indexer.reader import Vocabulary
from retriever.security.access import add_token
from retriever.v1 import retriever_pb2 as pb
from retriever.v1.retriever_pb2_grpc import RetrieverServiceStub

_SPAWN: Final = get_context("spawn")
_VOCABULARY: Final = 32_000
_PROMPT: Final = 400
_NODES: Final = 32
_NEW: Final = 3
_PAUSE_S: Final = 0.004
"""Between two steps: an engine's own pass."""

_STEPS_PER_OPENING: Final = 8
_LONGEST: Final = 20_000  # tokens of the victim's sequence before it begins again
_SETTLED_S: Final = 0.3  # of an attack before it counts, and after it for what it left
_LONGEST_S: Final = 60.0  # that the victim may wait
_KINDS: Final = ("step", "open", "close")


class Sample(NamedTuple):
    """A request of the victim: when it ended, what it was, and how long it took."""

    at_s: float
    kind: str
    took_s: float


def victim(address: str, token: str, outbox: Any) -> None:
    """Ask until killed; put samples."""
    asked: SimpleQueue[pb.DraftStreamRequest] = SimpleQueue()
    channel = grpc.insecure_channel(address)
    metadata = (("authorization", f"Bearer {token}"),)
    call = RetrieverServiceStub(channel).DraftStream(iter(asked.get, None), metadata=metadata)
    rng = np.random.default_rng(1)
    phrases = rng.integers(0, _VOCABULARY, (50, _NEW))
    number = 0

    def ask(**fields: Any) -> float:
        nonlocal number
        number += 1
        began_s = time.perf_counter()
        asked.put(pb.DraftStreamRequest(sequence_number=number, **fields))
        response = next(call)
        took_s = time.perf_counter() - began_s
        if response.statuses:
            raise SystemExit(f"the victim was refused: {response.statuses[0].message}")
        return took_s

    prompt = rng.integers(0, _VOCABULARY, _PROMPT).tolist()
    length = _LONGEST
    for round_ in range(1 << 40):
        if length >= _LONGEST:
            closings = [pb.CloseSessionRequest(session_id="main")] if round_ else []
            ask(closings=closings)
            ask(openings=[pb.OpenSessionRequest(session_id="main", prompt=prompt)])
            length = _PROMPT
        length += _NEW
        new = phrases[rng.integers(50)].tolist()
        step = pb.SessionStep(
            session_id="main", new_token_ids=new, length=length, budget_nodes=_NODES
        )
        took = [("step", ask(steps=[step]))]
        if round_ % _STEPS_PER_OPENING == 0:
            opening = pb.OpenSessionRequest(session_id="brief", prompt=prompt)
            closing = pb.CloseSessionRequest(session_id="brief", new_token_ids=new)
            took += [("open", ask(openings=[opening])), ("close", ask(closings=[closing]))]
        for kind, took_s in took:
            outbox.put(Sample(time.monotonic(), kind, took_s))
        time.sleep(_PAUSE_S)


class Phases:
    """Runs phases and sorts the victim's samples into them."""

    def __init__(self, inbox: Any, seconds: float) -> None:
        self._inbox = inbox
        self._seconds = seconds
        self._samples: list[Sample] = []

    def run(self, *watched: int) -> tuple[dict[str, list[float]], float]:
        """Return the victim's times of a phase by kind, and cores that processes took."""
        time.sleep(_SETTLED_S)
        begin_s, begin_cpu_s = time.monotonic(), _cpu_s(watched)
        time.sleep(self._seconds)
        end_s, end_cpu_s = time.monotonic(), _cpu_s(watched)
        cores = (end_cpu_s - begin_cpu_s) / (end_s - begin_s)
        self._take(end_s)
        time.sleep(_SETTLED_S)
        times: dict[str, list[float]] = defaultdict(list)
        for at_s, kind, took_s in self._samples:
            if begin_s <= at_s - took_s and at_s - took_s < end_s:
                times[kind].append(took_s)
        return times, cores

    def _take(self, end_s: float) -> None:
        """Take samples until one began after the end: a long wait then counts, too."""
        self._samples.clear()
        while not self._samples or self._samples[-1].at_s - self._samples[-1].took_s < end_s:
            self._samples.append(self._inbox.get(timeout=_LONGEST_S))


def _cpu_s(pids: Sequence[int]) -> float:
    """Return processor time that processes have taken, in seconds."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


@contextmanager
def _service(folder: Path, *options: str) -> Iterator[tuple[int, str]]:
    """Run a service on a synthetic index, with state; yield its process and address."""
    rng = np.random.default_rng(3)
    phrases = rng.integers(0, _VOCABULARY, (500, 12))
    documents = [
        (f"document-{at}", phrases[rng.integers(0, 500, 80)].ravel().tolist()) for at in range(1000)
    ]
    build_from_tokens(documents, folder / "corpus", Vocabulary(_VOCABULARY, "ab" * 32))
    command = [sys.executable, "-m", "retriever", "serve", "--address", "127.0.0.1:0"]
    command += ["--index", str(folder / "corpus"), "--access", str(folder / "access")]
    command += ["--state", str(folder / "state"), "--max-tenant-sessions", "4096", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline() if process.stdout is not None else ""
        yield process.pid, line.removeprefix("serving on ").strip()
    finally:
        process.kill()
        process.communicate(timeout=30)


@contextmanager
def _running(target: Any, *arguments: Any) -> Iterator[int]:
    """Run a process of a function; yield its id."""
    process = _SPAWN.Process(target=target, args=arguments, daemon=True)
    process.start()
    try:
        yield process.pid or 0
    finally:
        process.kill()
        process.join()


@contextmanager
def _controls(cores: float, go: Any) -> Iterator[None]:
    with ExitStack() as running:
        while cores > 0:
            running.enter_context(_running(spin, min(1.0, cores), go))
            cores -= 1
        yield


def measure(
    kinds: Sequence[str], repeats: int, seconds: float, options: Sequence[str] = ()
) -> dict[str, Any]:
    """Return figures of the victim alone, beside each attack, and beside its control."""
    alone: dict[str, list[float]] = defaultdict(list)
    figures: dict[str, Any] = {}
    with TemporaryDirectory() as folder:
        tokens = {name: add_token(Path(folder, "access"), name) for name in ("victim", "attacker")}
        with _service(Path(folder), *options) as (pid, address):
            inbox = _SPAWN.Queue()
            with _running(victim, address, tokens["victim"], inbox):
                time.sleep(2)
                phases = Phases(inbox, seconds)
                phases.run()
                for kind in kinds:
                    figures[kind] = _beside(
                        kind, phases, repeats, (pid, address, tokens["attacker"]), alone
                    )
    return {"alone": _summary(alone), "attacks": figures}


def _beside(
    kind: str,
    phases: Phases,
    repeats: int,
    service: tuple[int, str, str],
    alone: dict[str, list[float]],
) -> dict[str, Any]:
    """Repeat phases of a control and an attack; return figures of both."""
    pid, address, token = service
    beside: dict[str, dict[str, list[float]]] = {
        "control": defaultdict(list), "attack": defaultdict(list)
    }  # fmt: skip
    go, spinning = _SPAWN.Event(), _SPAWN.Event()
    tallies = _SPAWN.Queue()
    with _running(attack, kind, address, token, go, tallies) as attacker:
        tallies.get(timeout=60)  # it has its messages
        _, idle_cores = phases.run(pid)
        go.set()
        _, cores = phases.run(pid, attacker)
        go.clear()
        taken = max(0.0, min(os.cpu_count() or 1, cores - idle_cores))
        with _controls(taken, spinning):
            time.sleep(1)
            for repeat in range(repeats):
                _say(f"{kind}: {repeat + 1} of {repeats}")
                _add(alone, phases.run()[0])
                spinning.set()
                _add(beside["control"], phases.run()[0])
                spinning.clear()
                go.set()
                _add(beside["attack"], phases.run()[0])
                go.clear()
                time.sleep(1)  # for what the attack left
    tally = Tally()
    try:
        while True:
            tally = tallies.get_nowait()
    except Empty:
        pass
    summaries = {name: _summary(times) for name, times in beside.items()}
    ratios = {
        f"{of}_p99_over_control": round(
            summaries["attack"][of]["p99_ms"] / summaries["control"][of]["p99_ms"], 2
        )
        for of in _KINDS
        if of in summaries["attack"] and of in summaries["control"]
    }
    _say(f"{kind}: {ratios}")
    return {
        **ratios,
        **summaries,
        "control_cores": round(taken, 2),
        "answered": tally.answered,
        "refused": tally.refused,
        "failed": tally.failed,
    }


def _add(to: dict[str, list[float]], times: dict[str, list[float]]) -> None:
    for kind, more in times.items():
        to[kind] += more


def _summary(times: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    return {kind: _ms(np.array(times[kind])) for kind in _KINDS if times.get(kind)}


def _ms(times_s: NDArray[np.float64]) -> dict[str, float]:
    median, p99, most = np.percentile(times_s, [50, 99, 100]) * 1e3
    return {
        "p50_ms": round(float(median), 3),
        "p99_ms": round(float(p99), 3),
        "max_ms": round(float(most), 3),
        "samples": len(times_s),
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(  # noqa: PLR0913  (a command has as many options as it has)
    *,
    attacks: Annotated[
        list[str] | None, typer.Option("--attack", help="Only this one. Repeatable.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Times that phases are repeated.")] = 5,
    seconds: Annotated[float, typer.Option(help="Length of a phase.")] = 2.0,
    option: Annotated[
        list[str] | None, typer.Option(help="For `serve`, for example --max-tenants=9. Repeatable.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on one line.")] = False,
    output: Annotated[Path | None, typer.Option(help="Write the figures here, too.")] = None,
) -> None:
    """Print what a tenant waits for others."""
    figures = {
        **circumstances(),
        "repeats": repeats,
        "seconds": seconds,
        **measure(attacks or list(ATTACKS), repeats, seconds, option or ()),
    }
    if output is not None:
        output.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures, indent=None if as_json else 1))


if __name__ == "__main__":
    typer.run(main)
