"""Times the drafts of two checkouts alternately on the same recordings, and compares their trees.

    python -m benchmarks.paired_drafts --against ../before --workload NAME=TRACES,index=DIRECTORY

Each checkout has its own process. Both replay each recording, one after the other, and take turns
to go first. So other load on the machine affects both. The report has the ratio of their medians
for each recording, and the median of these ratios. `--batch` puts several recordings into one step,
as an engine does. With `--cold`, the processor's caches are flushed before each step, start and end
of a sequence, as a pass of a model would do.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any, Final
from zlib import crc32

import numpy as np
import typer

HERE: Final = Path(__file__).resolve().parent.parent
_OURS, _THEIRS = "ours", "against"
_FLUSHED: Final = np.ones(1 << 23)  # 64 MiB, more than caches hold; zeros would be one page


def main(  # noqa: PLR0913, PLR0917  (options of a command)
    against: Annotated[Path, typer.Option(help="Root of the other checkout.")],
    workload: Annotated[
        list[str], typer.Option(help="NAME=TRACES[,warm=FILE]...[,index=DIRECTORY]... Repeatable.")
    ],
    budget: Annotated[int, typer.Option(min=1, help="Nodes in each tree.")] = 32,
    batch: Annotated[int, typer.Option(min=1, help="Sequences in each step.")] = 1,
    limit: Annotated[int, typer.Option(min=1, help="Most recordings of each workload.")] = 80,
    threads: Annotated[
        str | None, typer.Option(help="Threads of ours and of the other checkout, as 2,1.")
    ] = None,
    cold: Annotated[bool, typer.Option("--cold", help="Flush caches before each step.")] = False,  # noqa: FBT002
    output: Annotated[Path | None, typer.Option(help="Where to write JSON.")] = None,
) -> None:
    """Time the drafts of this checkout and of another one alternately."""
    counts = threads.split(",") if threads else ["", ""]
    results = []
    for stated in workload:
        with ExitStack() as running:
            workers = {
                name: running.enter_context(
                    _worker(root, (stated, budget, batch, limit, int(cold), count))
                )
                for name, root, count in zip(
                    (_OURS, _THEIRS), (HERE, against.resolve()), counts, strict=True
                )
            }
            rounds = list(_rounds(workers))
        results.append({"workload": stated.partition("=")[0], **_summary(rounds)})
        print(json.dumps(results[-1], indent=1))
    figures = {
        "budget": budget,
        "batch": batch,
        "threads": threads,
        "cold": cold,
        "results": results,
    }
    if output is not None:
        from benchmarks.comparison import circumstances  # noqa: PLC0415  (of this checkout)

        output.write_text(
            json.dumps({"circumstances": circumstances(), **figures}, indent=1) + "\n"
        )


def _rounds(workers: dict[str, "subprocess.Popen[str]"]) -> Iterator[dict[str, Any]]:
    """Let both replay each recording alternately, and yield the measurements of both."""
    for each in workers.values():
        _answer(each)  # once it is warm
    number = 0
    while True:
        names = [_OURS, _THEIRS] if number % 2 else [_THEIRS, _OURS]
        measured = {}
        for name in names:
            print(number, file=workers[name].stdin, flush=True)
            measured[name] = _answer(workers[name])
        if not measured[_OURS]:
            return
        yield measured
        number += 1


def _answer(worker: "subprocess.Popen[str]") -> Any:
    line = worker.stdout.readline() if worker.stdout else ""
    if not line:
        raise SystemExit(f"a checkout's drafter ended with {worker.wait()}")
    return json.loads(line)


def _summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    summary: dict[str, Any] = {
        "replays": len(rounds),
        # Probabilities may differ in the last bit, as compilers order sums.
        **{
            f"same_{what}": sum(each[_OURS][what] == each[_THEIRS][what] for each in rounds)
            for what in ("trees", "probabilities")
        },
    }
    for name in (_OURS, _THEIRS):
        steps = np.concatenate([each[name]["step_us"] for each in rounds])
        tokens = sum(each[name]["tokens"] for each in rounds)
        drafts = sum(each[name]["drafts"] for each in rounds)
        summary[name] = {
            "step_us": {str(q): round(float(np.percentile(steps, q)), 1) for q in (10, 50, 90, 99)},
            "tokens_per_step": round(tokens / drafts, 4),
            "open_us": round(float(np.median([each[name]["open_us"] for each in rounds])), 1),
            "close_us": round(float(np.median([each[name]["close_us"] for each in rounds])), 1),
        }
    for what in ("step_us", "open_us", "close_us"):
        ratios = [np.median(each[_OURS][what]) / np.median(each[_THEIRS][what]) for each in rounds]
        low, middle, high = np.percentile(ratios, [25, 50, 75])
        summary[f"{what.removesuffix('_us')}_ratio"] = {
            "median": round(float(middle), 3),
            "quartiles": [round(float(low), 3), round(float(high), 3)],
        }
    return summary


@contextmanager
def _worker(root: Path, stated: tuple[object, ...]) -> Iterator["subprocess.Popen[str]"]:
    """Start a process that replays with a checkout's drafter; it gets the options of `serve`."""
    arguments = [str(each) for each in stated]
    process = subprocess.Popen(
        [sys.executable, "-P", __file__, *arguments],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def serve(workload: str, budget: int, batch: int, limit: int, cold: int, threads: str) -> None:  # noqa: PLR0913, PLR0917  (a command line)
    """Replay the recordings whose numbers come on standard input, with the checkout on the path."""
    from benchmarks.workloads import WorkloadFiles  # noqa: PLC0415
    from retriever.sessions.embedded import EmbeddedDrafter  # noqa: PLC0415
    from retriever.traces.traces import ChatEncoder  # noqa: PLC0415

    loaded = WorkloadFiles.parse(workload).load(ChatEncoder(None), limit)
    options: Any = {"threads": int(threads)} if threads else {}
    drafter = EmbeddedDrafter(loaded.indexes, **options)
    drafter.warm()
    for output in loaded.outputs:
        drafter.remember(output)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        traces = loaded.traces[int(line) * batch : (int(line) + 1) * batch]
        measured = {}
        if len(traces) == batch:
            measured = _replay(drafter, line.strip(), traces, budget, is_cold=bool(cold))
        print(json.dumps(measured), flush=True)


def _replay(
    drafter: Any, name: str, traces: list[Any], budget: int, *, is_cold: bool
) -> dict[str, Any]:
    """Replay recordings together until the first of them ends; return times and a checksum.

    A step is a call of `draft`, and reading the parts of the trees that a verifier needs.
    """
    from retriever.drafter import DraftRequest  # noqa: PLC0415

    names = [f"{name}-{number}" for number in range(len(traces))]
    flush = _FLUSHED.sum if is_cold else _FLUSHED[:0].sum
    open_us = close_us = 0.0
    for session, trace in zip(names, traces, strict=True):
        flush()
        began = time.perf_counter()
        drafter.open(session, trace.prompt)
        open_us += (time.perf_counter() - began) * 1e6
    committed, done = [trace.output[:0] for trace in traces], [0] * len(traces)
    step_us: list[float] = []
    trees = probabilities = 0
    while all(at < len(trace.output) for at, trace in zip(done, traces, strict=True)):
        requests = [
            DraftRequest(session, new, len(trace.prompt) + at, budget)
            for session, new, trace, at in zip(names, committed, traces, done, strict=True)
        ]
        flush()
        before = time.perf_counter()
        drafted = drafter.draft(requests)
        for tree in drafted:
            _ = tree.token_ids, tree.parents, tree.probabilities
        step_us.append((time.perf_counter() - before) * 1e6)
        for number, (trace, tree) in enumerate(zip(traces, drafted, strict=True)):
            for part in (tree.token_ids, tree.parents, tree.sources):
                trees = crc32(part.tobytes(), trees)
            probabilities = crc32(tree.probabilities.tobytes(), probabilities)
            path = tree.follow(trace.output[done[number] :])
            committed[number] = trace.output[done[number] : done[number] + len(path) + 1]
            done[number] += len(committed[number])
    for session, new in zip(names, committed, strict=True):
        flush()
        began = time.perf_counter()
        drafter.close(session, new)
        close_us += (time.perf_counter() - began) * 1e6
    return {
        "step_us": step_us,
        "open_us": open_us / len(traces),
        "close_us": close_us / len(traces),
        "tokens": sum(done),
        "drafts": len(step_us) * len(traces),
        "trees": trees,
        "probabilities": probabilities,
    }


if __name__ == "__main__":
    if "-P" in sys.orig_argv[:2]:
        stated, nodes, together, most, flushed, count = sys.argv[1:7]
        serve(stated, int(nodes), int(together), int(most), int(flushed), count)
    else:
        typer.run(main)
