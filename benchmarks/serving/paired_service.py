"""Steps over a service, in turns with another checkout.

Each checkout has a service and a strict client of its own, in processes of its own. A turn is a
round of steps of some sequences in one message; told are times of the client's call, ratios of
medians of neighbouring turns, and processor seconds of both together.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, Final

import typer

HERE: Final = Path(__file__).resolve().parents[2]
_PROMPT: Final = 400
_NEW: Final = 3
_MOST: Final = 3000
_SERVING: Final = "serving on "


def answer() -> None:
    """Do rounds of steps as asked on standard input, in the checkout that is first on the path."""
    import numpy as np  # noqa: PLC0415  (of the checkout that is measured, as all below)

    from retriever.client.strict import RemoteDrafter  # noqa: PLC0415
    from retriever.drafter import DraftRequest  # noqa: PLC0415

    service = subprocess.Popen(
        [sys.executable, "-m", "foredraft", "serve", "--address", "127.0.0.1:0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    lines: Any = service.stdout
    address = next(line for line in lines if line.startswith(_SERVING))
    drafter = RemoteDrafter(address.removeprefix(_SERVING).strip(), timeout_s=30.0)
    rng = np.random.default_rng(1)
    phrases = rng.integers(0, 32_000, (50, _NEW)).astype(np.int32)
    lengths: dict[str, int] = {}

    def steps(num_sequences: int, num_steps: int, budget: int) -> list[float]:
        times = []
        for _ in range(num_steps):
            requests = []
            for name in map(str, range(num_sequences)):
                if lengths.get(name, _MOST) >= _MOST:
                    if name in lengths:
                        drafter.close(name)
                    drafter.open(name, phrases[rng.integers(50, size=_PROMPT // _NEW)].ravel())
                    lengths[name] = _PROMPT // _NEW * _NEW
                lengths[name] += _NEW
                requests.append(
                    DraftRequest(name, phrases[rng.integers(50)], lengths[name], budget)
                )
            began_s = time.perf_counter()
            drafter.draft(requests)
            times.append(time.perf_counter() - began_s)
        return times

    print("ready", flush=True)
    try:
        for line in sys.stdin:
            asked = json.loads(line)
            before_s = _processor_s(service.pid)
            times = steps(**asked)
            spent_s = _processor_s(service.pid) - before_s
            print(json.dumps({"us": statistics.median(times) * 1e6, "s": spent_s}), flush=True)
    finally:
        drafter.shut_down()
        service.terminate()


def _processor_s(service: int) -> float:
    """Return the processor seconds of a service and of this client."""
    fields = Path(f"/proc/{service}/stat").read_text().rpartition(")")[2].split()
    own = os.times()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") + own.user + own.system


def _begin(root: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, __file__, "answer"],
        env=os.environ | {"PYTHONPATH": str(root)},
        cwd=root,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _end(process: "subprocess.Popen[str]") -> None:
    """Have a client end, and its service with it."""
    if process.stdin is not None:
        process.stdin.close()
    process.wait()


def _ask(process: "subprocess.Popen[str]", question: dict[str, int]) -> dict[str, float]:
    given: Any = process.stdin
    given.write(json.dumps(question) + "\n")
    given.flush()
    found: dict[str, float] = json.loads(process.stdout.readline() if process.stdout else "{}")
    return found


def main(
    against: Annotated[Path, typer.Option(help="Root of another checkout.")],
    budget: Annotated[int, typer.Option(help="Nodes in each tree.")] = 32,
    turns: Annotated[int, typer.Option(help="Of each checkout, for each number.")] = 20,
    sequences: Annotated[list[int] | None, typer.Option(help="In a message. Repeatable.")] = None,
    output: Annotated[Path | None, typer.Option(help="Where to write JSON.")] = None,
) -> None:
    """Measure steps over a service, in turns."""
    roots = {"ours": HERE, "against": against.resolve()}
    found: dict[str, dict[str, float]] = {}
    with ExitStack() as ended:
        processes = {name: ended.enter_context(_begin(root)) for name, root in roots.items()}
        for process in processes.values():
            ended.callback(_end, process)
            if process.stdout is not None:
                process.stdout.readline()
        for number in sequences or [1, 16, 64]:
            question = {
                "num_sequences": number,
                "num_steps": max(20, 400 // number),
                "budget": budget,
            }
            rounds: list[dict[str, dict[str, float]]] = []
            for turn in range(turns + 1):
                names: Sequence[str] = list(roots) if turn % 2 else list(roots)[::-1]
                asked = {name: _ask(processes[name], question) for name in names}
                rounds += [asked] if turn else []  # the first warms both up
            found[str(number)] = {
                "ours_us": round(statistics.median(each["ours"]["us"] for each in rounds), 1),
                "against_us": round(statistics.median(each["against"]["us"] for each in rounds), 1),
                "throughput": round(
                    statistics.median(
                        each["against"]["us"] / each["ours"]["us"] for each in rounds
                    ),
                    3,
                ),
                "processor": round(
                    sum(each["ours"]["s"] for each in rounds)
                    / sum(each["against"]["s"] for each in rounds),
                    3,
                ),
            }
            print(number, found[str(number)], flush=True)
    if output is not None:
        output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["answer"]:
        answer()
    else:
        typer.run(main)
