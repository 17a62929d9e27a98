"""`python -m benchmarks.peers`: other systems' own programs and our drafter, in turns.

Every drafter begins with the same outputs, those that draw on a corpus with the same documents,
and all replay the same recordings in one run. Programs are built before, by
`python -m benchmarks.peers.build_programs`; one that is not there has a row with the reason.
"""

import ctypes
import datetime as dt
import gc
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import typer
from rich.console import Console

from benchmarks.comparison import circumstances, describe
from benchmarks.peers.build_programs import ProgramError, programs_folder
from benchmarks.peers.contestants import NOT_TO_BE_HAD, SLOW, Absent, contenders
from benchmarks.peers.in_turns import Tally, Turns, replay_in_turns
from benchmarks.peers.peer import Contender, Kind, Made
from benchmarks.peers.peer_report import PeerReport, Row, Times
from benchmarks.workloads import Workload, WorkloadError, WorkloadFiles, stdlib_workload
from retriever.commands.options import clear_errors
from retriever.errors import RetrieverError
from retriever.traces.traces import ChatEncoder

BUDGETS: Final = (8, 32, 64)
RESULTS: Final = Path(__file__).parents[1] / "results" / "drafting"

console = Console(stderr=True)


class UnknownPeerError(RetrieverError):
    """There is no contender of this name."""


def main(
    workload: Annotated[
        list[str] | None,
        typer.Option(help="NAME=TRACES[,warm=FILE]...[,index=DIRECTORY]... Repeatable."),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(help="What to measure. Repeatable; default: all but what is slow."),
    ] = None,
    budget: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Nodes in each tree. Repeatable; default: 8, 32 and 64."),
    ] = None,
    turns: Annotated[
        Turns, typer.Option(help="Whose turn it is changes after each step, or each trace.")
    ] = Turns.STEP,
    search: Annotated[
        int, typer.Option(min=0, help="First traces to find programs' best settings with.")
    ] = 20,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Replay only the first traces of each workload.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Tokenizer for text. Default: SmolLM2's.")
    ] = None,
    programs: Annotated[
        Path | None, typer.Option(help="Where programs were built. Default: as when building.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Where to write, without suffix. Default: by date.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, not the tables.")] = False,
) -> None:
    """Compare programs; write JSON, a report and a plot."""
    stem = output or RESULTS / f"{dt.datetime.now(dt.UTC).date()}-programs"
    with clear_errors():
        chosen = _chosen(contenders(programs_folder(programs)), peer)
        absent = list(NOT_TO_BE_HAD)
        absent += [Absent(*each) for each in SLOW.items() if each[0] not in (peer or [])]
        before = circumstances()
        with ExitStack() as opened:
            workloads = _workloads(workload or [], ChatEncoder(tokenizer), limit, opened)
            run = _Run(chosen, search, turns, absent, required=frozenset(peer or []))
            described = [describe(each) for each in workloads]
            report = PeerReport(before, str(turns), described, [], absent)
            for each in workloads:
                for nodes in sorted(budget or BUDGETS):
                    report.rows.extend(run.measure(each, nodes))
                    paths = report.write(stem)  # what there is, should the run be ended
    print(report.as_text() if json else report.as_markdown())
    console.print(*paths, sep="\n")


def _chosen(known: list[Contender], names: list[str] | None) -> list[Contender]:
    by_name = {each.name: each for each in known}
    for name in names or []:
        if name not in by_name:
            raise UnknownPeerError(f"no peer {name!r}: choose from {', '.join(by_name)}")
    return [each for each in known if (each.name in names if names else each.name not in SLOW)]


def _workloads(
    stated: list[str], encoder: ChatEncoder, limit: int | None, opened: ExitStack
) -> list[Workload]:
    files = [WorkloadFiles.parse(text) for text in stated]
    loaded = [each.load(encoder, limit) for each in files]
    loaded = loaded or [opened.enter_context(stdlib_workload(encoder, limit))]
    for each in loaded:
        if not each.traces:
            raise WorkloadError(f"{each.name} has no trace to replay")
    return loaded


class _Run:
    """Measures workloads, and notes what is not built.

    Args:
        chosen: what to measure.
        search: first traces to find programs' best settings with.
        turns: whose turn is when.
        absent: is added to.
        required: names that must be there.
    """

    def __init__(
        self,
        chosen: list[Contender],
        search: int,
        turns: Turns,
        absent: list[Absent],
        *,
        required: frozenset[str],
    ) -> None:
        self._chosen = chosen
        self._search = search
        self._turns = turns
        self._absent = absent
        self._required = required

    def measure(self, workload: Workload, budget: int) -> Iterator[Row]:
        """Give a row for each drafter.

        Raises:
            ProgramError: one that must be there is not built.
        """
        contenders_here = [
            each for each in self._chosen if workload.indexes or not each.needs_index
        ]
        made: dict[str, Made] = {}
        memory: dict[str, float] = {}
        for contender in contenders_here:
            self._make(contender, workload, budget, made, memory)
        console.print(f"{workload.name}, {budget} nodes: replaying {', '.join(made)}")
        peers = {name: each.peer for name, each in made.items()}
        tallies = replay_in_turns(peers, workload.traces, budget, self._turns)
        for contender in contenders_here:
            if contender.name in made:
                row = _row(workload, contender, budget, tallies[contender.name])
                row = replace(row, settings=made[contender.name].settings)
                if contender.kind is not Kind.READING:
                    row = replace(row, memory_mb=memory.get(contender.name))
                console.print(f"  {row.in_a_line()}")
                yield row

    def _make(
        self,
        contender: Contender,
        workload: Workload,
        budget: int,
        made: dict[str, Made],
        memory: dict[str, float],
    ) -> None:
        """Make a contender's drafter, and note what memory it took."""
        try:
            # The first one compiles and imports what is not the drafter's memory.
            contender.make(replace(workload, outputs=[], indexes=[]), budget, ())
            before = anonymous_bytes()
            made[contender.name] = contender.make(workload, budget, workload.traces[: self._search])
            after = anonymous_bytes()
        except ProgramError as error:
            if contender.name in self._required:
                raise
            absent = Absent(contender.name, str(error))
            if absent not in self._absent:
                self._absent.append(absent)
            return
        console.print(f"  {contender.name} is ready")
        if before is not None and after is not None:
            memory[contender.name] = (after - before) / 1e6


def anonymous_bytes() -> int | None:
    """Return what this process holds in memory besides mapped files, where the system says so.

    What was freed is given back first, or the next drafter would begin with memory of the last.
    """
    gc.collect()
    with suppress(OSError, AttributeError):  # other C libraries have no such function
        ctypes.CDLL(None).malloc_trim(0)
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    sizes = [line.split()[1] for line in status.splitlines() if line.startswith("RssAnon:")]
    return int(sizes[0]) * 1024 if sizes else None


def _row(workload: Workload, contender: Contender, budget: int, tally: Tally) -> Row:
    is_reading = contender.kind is Kind.READING
    return Row(
        workload=workload.name,
        contender=contender.name,
        kind=str(contender.kind),
        evidence=contender.evidence,
        reads=contender.reads,
        budget=budget,
        steps=tally.steps,
        tokens_per_step=tally.tokens_per_step,
        nodes_per_step=tally.nodes / max(1, tally.steps),
        # Time and memory of a reading say nothing of the program that it stands for.
        times=None if is_reading else _times(tally),
    )


def _times(tally: Tally) -> Times:
    draft, opening, closing = tally.draft_us, tally.open_us, tally.close_us
    return Times(
        draft_us_p50=float(np.median(draft)),
        draft_us_p99=float(np.percentile(draft, 99)),
        draft_us_p50_by_fifth=tally.medians(),
        open_us_p50=float(np.median(opening)),
        close_us_p50=float(np.median(closing)),
    )


if __name__ == "__main__":
    typer.run(main)
