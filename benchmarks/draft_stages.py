"""Times the stages of drafts on recordings: each part of the kernel, and what Python adds.

    python -m benchmarks.draft_stages --workload NAME=TRACES,warm=FILE,index=DIRECTORY

Each stage is a call of its own here, less the time of a call that does nothing. Between the stages
of one draft nothing else runs, so caches are as cold as they are when one call does them all. What
remains of a step is Python: checks, sessions, counts, and the tree's arrays.
"""

import json
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, Final
from unittest.mock import patch

import numpy as np
import typer

from benchmarks.comparison import circumstances
from benchmarks.workloads import WorkloadFiles
from retriever.commands.factories import own_drafter
from retriever.kernels import entries
from retriever.predict import databases
from retriever.predict.draft import Predictor
from retriever.replay.replay import replay
from retriever.replay.traces import ChatEncoder

STAGES: Final = {
    "sequence": entries.CONTEXT,
    "generations": entries.GENERATIONS,
    "corpus": entries.CORPUS,
    "tree": entries.TREE,
}
_COMMIT, _STEP, _REST = "learning and commit", "step", "Python and calls"


class Clock:
    """Takes the place of the kernels and times them.

    Attributes:
        times_us: times of each stage, in microseconds.
    """

    def __init__(self) -> None:
        self.times_us: dict[str, list[float]] = {name: [] for name in (*STAGES, _COMMIT)}
        self._draft: Callable[..., Any] = entries.draft_tree
        self._commit: Callable[..., Any] = entries.commit_tokens

    def draft(self, *arguments: Any) -> tuple[int, int, int]:
        """Do the stages of a draft one by one; arguments as of `entries.draft_tree`."""
        shared, sequence, lane, scratch, stages, row, longest, *rest = arguments
        idle_s = self._timed(shared, sequence, lane, scratch, 0, row, longest, *rest)[0]
        size, found = 0, longest
        for name, stage in STAGES.items():
            if stages & stage:
                seconds, (size, row, match) = self._timed(
                    shared, sequence, lane, scratch, stage, row, longest, *rest
                )
                found = match if stage == entries.CORPUS else found
                self.times_us[name].append(max(0.0, seconds - idle_s) * 1e6)
        return size, row, found

    def commit(self, *arguments: Any) -> int:
        """Commit tokens; arguments as of `entries.commit_tokens`."""
        began = perf_counter()
        learned: int = self._commit(*arguments)
        self.times_us[_COMMIT].append((perf_counter() - began) * 1e6)
        return learned

    def _timed(self, *arguments: Any) -> tuple[float, tuple[int, int, int]]:
        began = perf_counter()
        drafted: tuple[int, int, int] = self._draft(*arguments)
        return perf_counter() - began, drafted


def main(
    workload: Annotated[
        list[str], typer.Option(help="NAME=TRACES[,warm=FILE]...[,index=DIRECTORY]... Repeatable.")
    ],
    budget: Annotated[int, typer.Option(min=1, help="Nodes in each tree.")] = 32,
    limit: Annotated[int, typer.Option(min=1, help="Most recordings of each workload.")] = 80,
    output: Annotated[Path | None, typer.Option(help="Where to write JSON.")] = None,
) -> None:
    """Time the stages of drafts, and whole steps, each in a replay of its own."""
    results = [
        {"workload": stated.partition("=")[0], **_measured(stated, budget, limit)}
        for stated in workload
    ]
    figures = {"circumstances": circumstances(), "budget": budget, "results": results}
    text = json.dumps(figures, indent=1)
    print(text)
    if output is not None:
        output.write_text(text + "\n")


def _measured(stated: str, budget: int, limit: int) -> dict[str, Any]:
    loaded = WorkloadFiles.parse(stated).load(ChatEncoder(None), limit)
    whole = replay(own_drafter(loaded.indexes, loaded.outputs, budget), loaded.traces, budget)
    clock = Clock()
    timed = own_drafter(loaded.indexes, loaded.outputs, budget)
    with (
        patch.object(databases, "draft_tree", clock.draft),
        patch.object(databases, "commit_tokens", clock.commit),
        patch.object(Predictor, "in_one_call", new=False),
    ):
        again = replay(timed, loaded.traces, budget)
    medians = {name: float(np.median(times)) for name, times in clock.times_us.items()}
    step_us = float(np.median(whole.draft_us))
    stages = {**clock.times_us, _STEP: whole.draft_us}
    return {
        "tokens_per_step": round(again.tokens / again.steps, 4),
        "stages_us": {
            name: {str(q): round(float(np.percentile(times, q)), 2) for q in (10, 50, 90, 99)}
            for name, times in stages.items()
        },
        _REST: round(step_us - sum(medians.values()), 2),
    }


if __name__ == "__main__":
    typer.run(main)
