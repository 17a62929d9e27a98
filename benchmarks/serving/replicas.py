"""Two services of one model under eight engines, while one is drained and the other killed.

    python -m benchmarks.serving.replicas --seconds 300 --json

Every 20 s one service is drained (SIGTERM) and, halfway to the next, the other killed (SIGKILL);
each is started again at once, and the next time they change parts. Engines are processes with a
scripted target and a `ResilientDrafter` over both addresses. Counted are outputs that differ from
plain decoding, steps that end later than their deadline and a fifth, and drafts gone without by
reason.
Next to them a process only waits for such deadlines: what it misses, the machine has missed.
"""

import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from benchmarks.comparison import circumstances
from benchmarks.serving.replica_engines import Counts, Load, decode, waits
from retriever.client.strict import RemoteDrafter
from retriever.errors import RetrieverError

_DRAIN_S: Final = 8.0  # sessions move within some steps, so it ends earlier
_START_S: Final = 120.0  # compiling kernels, where there is no cache of them


class Served:
    """A service at a fixed address, ended and started again.

    Args:
        folder: of its state and log.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        self._state = folder / "state"
        self._log = folder / "log"
        self.tracebacks = 0
        self.start()

    def start(self) -> None:
        """Start it, and wait until it serves."""
        command = [sys.executable, "-m", "retriever", "serve", "--address", self.address]
        options = ["--state", str(self._state), "--drain-s", str(_DRAIN_S)]
        with self._log.open("w") as log:
            self._process = subprocess.Popen([*command, *options], stdout=log, stderr=log)
        until_s = time.monotonic() + _START_S
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > until_s:
                raise RuntimeError(f"no service at {self.address}: {self._log.read_text()}")
            time.sleep(0.05)

    def end(self, number: signal.Signals) -> float:
        """End it by a signal; return how long that took, in seconds."""
        began_s = time.monotonic()
        self._process.send_signal(number)
        self._process.wait(_DRAIN_S + 10)
        self.tracebacks += self._log.read_text().count("Traceback")
        return time.monotonic() - began_s

    def _is_ready(self) -> bool:
        try:
            with RemoteDrafter(self.address) as remote:
                return remote.server_info().phase == "ready"
        except RetrieverError:
            return False


@contextmanager
def _pair() -> Iterator[tuple[Served, Served]]:
    with tempfile.TemporaryDirectory() as name:
        pair = Served(Path(name) / "0"), Served(Path(name) / "1")
        try:
            yield pair
        finally:
            for each in pair:
                each.end(signal.SIGKILL)


def measure(  # noqa: PLR0913  (what a run consists of)
    *,
    seconds: float,
    every_s: float,
    engines: int,
    deadline_s: float,
    pass_s: float,
    width: int,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Run engines against two services that end in turn; return what was seen.

    Args:
        seconds: how long.
        every_s: time from one drain to the next, in seconds.
        engines: how many.
        deadline_s: of a step, in seconds.
        pass_s: of the scripted target, in seconds.
        width: sequences of each engine.
        say: is told of each end of a service.
    """
    context = get_context("spawn")
    with (
        _pair() as pair,
        context.Manager() as shared,
        ProcessPoolExecutor(engines + 1, mp_context=context) as processes,
    ):
        until: Any = shared.Event()
        addresses = tuple(each.address for each in pair)
        connected: Any = shared.Barrier(engines + 1)
        load = Load(addresses, deadline_s, pass_s, width, connected, until)
        control = processes.submit(waits, load)
        decoding = [processes.submit(decode, number, load) for number in range(engines)]
        try:
            connected.wait(_START_S)
            ends = _end_in_turn(pair, seconds, every_s, say)
        finally:
            until.set()
        counts = Counts()
        for each in decoding:
            counts.add(each.result())
        waited = control.result()
    return {
        "engines": asdict(counts) | {"fail_opens": dict(counts.fail_opens)},
        "late_share": counts.late / max(1, counts.steps),
        "control": {"waits": waited.steps, "late": waited.late, "longest_s": waited.longest_s},
        "ends": ends,
        "tracebacks": sum(each.tracebacks for each in pair),
    }


def _end_in_turn(
    pair: tuple[Served, Served], seconds: float, every_s: float, say: Callable[[str], None]
) -> dict[str, Any]:
    """Drain one and kill the other, in turn; each is back before the next ends."""
    began_s, drains = time.monotonic(), list[float]()
    kills = 0
    for number in range(int(seconds / every_s) or 1):
        drained, killed = pair if number % 2 == 0 else pair[::-1]
        for at_s, served, how in (
            (number * every_s, drained, signal.SIGTERM),
            ((number + 0.5) * every_s, killed, signal.SIGKILL),
        ):
            time.sleep(max(0.0, began_s + at_s - time.monotonic()))
            took_s = served.end(how)
            served.start()
            say(f"{served.address}: {how.name}, ended after {took_s:.2f} s, and is back")
            drains += [took_s] if how is signal.SIGTERM else []
            kills += how is signal.SIGKILL
    time.sleep(max(0.0, began_s + seconds - time.monotonic()))
    return {"drains": len(drains), "longest_drain_s": max(drains), "kills": kills}


def main(  # noqa: PLR0913, PLR0917  (a command has as many options as it needs)
    seconds: Annotated[float, typer.Option(min=1, help="How long.")] = 300.0,
    every: Annotated[float, typer.Option(min=1, help="From one drain to the next, in s.")] = 20.0,
    engines: Annotated[int, typer.Option(min=1, help="Processes that decode.")] = 8,
    deadline_ms: Annotated[float, typer.Option(min=1, help="Longest wait of a step.")] = 20.0,
    pass_ms: Annotated[float, typer.Option(min=0, help="Time of the target's pass.")] = 20.0,
    width: Annotated[int, typer.Option(min=1, help="Sequences of an engine.")] = 4,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,  # noqa: FBT002
) -> None:
    """Show what engines notice of services that are drained and killed."""
    report = measure(
        seconds=seconds,
        every_s=every,
        engines=engines,
        deadline_s=deadline_ms / 1e3,
        pass_s=pass_ms / 1e3,
        width=width,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    given = {"seconds": seconds, "every_s": every, "engines": engines, "width": width}
    given |= {"deadline_ms": deadline_ms, "pass_ms": pass_ms}
    if json_:
        print(json.dumps({"circumstances": circumstances(), "given": given, **report}, indent=2))
        return
    seen = report["engines"]
    print(f"{seen['outputs']} outputs, {seen['wrong']} wrong; {seen['steps']} steps")
    print(f"late: {seen['late']} ({report['late_share']:.5%}); control: {report['control']}")
    print(f"without a service's draft: {seen['fail_opens']} of {seen['drafts']}")
    print(report["ends"])


if __name__ == "__main__":
    typer.run(main)
