"""What predictions bring on edits of files: tokens per step with the old file as one.

    python -m benchmarks.decoding.predicted_edits edits.jsonl --output predicted.json

Each recording is a prompt that holds a file in a block of code, and the file as it was rewritten.
Outputs are replayed with a text in place of the file in the prompt (the file, a third of it, a
stale version of it, nothing), and with the same text as a prediction instead. Last, a wrong
prediction is added: the file of a recording far away. Ratios are of tokens per step, with 90%
intervals by bootstrap over recordings. All ways take turns, recording by recording, each with a
drafter of its own.
"""

import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import typer
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.table import Table

from decoder.budget.cost_store import describe_machine, versions
from decoder.commands.trace_command import print_table
from indexer.sources.recordings import RecordingTally, read_records
from retriever.drafter import DraftRequest, Prediction, TokenIds
from retriever.limits import Limits, checked_tokens
from retriever.replay.traces import ChatEncoder
from retriever.sessions.embedded import EmbeddedDrafter

_DRAWS: Final = 2000
_BLOCK: Final = re.compile(r"```[^\n]*\n(.*)\n```", re.DOTALL)
_LINES_KEPT: Final = 12
"""Of so many lines of a stale version one is not as it is in the file."""


@dataclass(frozen=True, slots=True)
class Way:
    """What a drafter is told of the file.

    Attributes:
        in_prompt: the text in its place in the prompt.
        predicted: the text that is predicted; empty for none.
        over: the way that it is compared with.
    """

    in_prompt: str
    predicted: str = ""
    over: str = ""


NOTHING: Final = "nothing"
FILE: Final = "the file"
THIRD: Final = "a third"
STALE: Final = "a stale version"
WRONG: Final = "another file"

WAYS: Final = {
    "no file": Way(NOTHING),
    "file in the prompt": Way(FILE),
    "file predicted": Way(NOTHING, FILE, "file in the prompt"),
    "file in the prompt and predicted": Way(FILE, FILE, "file in the prompt"),
    "third in the prompt": Way(THIRD),
    "third predicted": Way(NOTHING, THIRD, "third in the prompt"),
    "stale version in the prompt": Way(STALE),
    "stale version predicted": Way(NOTHING, STALE, "stale version in the prompt"),
    "file in the prompt, another predicted": Way(FILE, WRONG, "file in the prompt"),
    "no file, another predicted": Way(NOTHING, WRONG, "no file"),
}


@dataclass(frozen=True, slots=True, eq=False)
class Edit:
    """A recording as token ids.

    Attributes:
        prompts: by the text in place of the file.
        texts: by their names.
        output: what was written.
    """

    prompts: dict[str, TokenIds]
    texts: dict[str, TokenIds]
    output: TokenIds


@dataclass(slots=True, eq=False)
class Counted:
    """What was counted of one way.

    Attributes:
        counts: tokens and steps of each recording.
        draft_us: time of each draft, in microseconds.
    """

    counts: list[tuple[int, int]] = field(default_factory=list)
    draft_us: list[float] = field(default_factory=list)

    def array(self) -> NDArray[np.int64]:
        """Return int64[recordings, 2]."""
        return np.array(self.counts, np.int64)


def stale_version(text: str, seed: int) -> str:
    """Return a file as it was before other changes: lines dropped, moved and written otherwise."""
    drawn = np.random.default_rng(seed)
    lines: list[str] = []
    for number, line in enumerate(text.splitlines()):
        change = drawn.choice(("drop", "insert", "rename", "move"))
        if number % _LINES_KEPT != _LINES_KEPT - 1:
            lines.append(line)
        elif change == "insert":
            lines += [line, f"{line[: len(line) - len(line.lstrip())]}value_{number} = {number}"]
        elif change == "rename":
            lines.append(re.sub(r"[a-z_]{4,}", f"name_{number}", line, count=1))
        elif change == "move":
            lines.insert(max(0, len(lines) - 3), line)
    return "\n".join(lines)


def third_of(text: str) -> str:
    """Return the middle third of a file's lines."""
    lines = text.splitlines()
    return "\n".join(lines[len(lines) // 3 : 2 * len(lines) // 3])


def read_edits(path: Path, encoder: ChatEncoder, limit: int | None) -> list[Edit]:
    """Read recordings; those without a file in their prompt are left out."""
    found: list[tuple[str, str, str]] = []
    for _, row in read_records(path, RecordingTally()):
        block = _BLOCK.search(row["prompt"])
        if block is not None:
            found.append((row["prompt"], block.group(1), row["output"]))
    return [
        _edit(each, found[(number + len(found) // 2) % len(found)][1], number, encoder)
        for number, each in enumerate(found[:limit])
    ]


def _edit(recorded: tuple[str, str, str], another: str, number: int, encoder: ChatEncoder) -> Edit:
    prompt, text, output = recorded
    texts = {
        NOTHING: "",
        FILE: text,
        THIRD: third_of(text),
        STALE: stale_version(text, number),
        WRONG: another,
    }
    placed = {name: prompt.replace(text, each) for name, each in texts.items() if name != WRONG}
    return Edit(
        {name: checked_tokens(encoder.encode_prompt(each), None) for name, each in placed.items()},
        {name: checked_tokens(encoder.encode_output(each), None) for name, each in texts.items()},
        checked_tokens(encoder.encode_output(output), None),
    )


def replay_edit(
    drafter: EmbeddedDrafter, way: Way, edit: Edit, nodes: int, counted: Counted
) -> None:
    """Replay an output, and count it."""
    prompt, output = edit.prompts[way.in_prompt], edit.output
    text = edit.texts[way.predicted] if way.predicted else output[:0]
    drafter.open("edit", prompt, predictions=[Prediction(text)] if len(text) else [])
    done = steps = 0
    committed = output[:0]
    while done < len(output):
        request = DraftRequest("edit", committed, len(prompt) + done, nodes)
        began_s = time.perf_counter()
        tree = drafter.draft([request])[0]
        counted.draft_us.append((time.perf_counter() - began_s) * 1e6)
        committed = output[done : done + len(tree.follow(output[done:])) + 1]
        done += len(committed)
        steps += 1
    drafter.close("edit", committed)
    counted.counts.append((done, steps))


def counted_at(edits: Sequence[Edit], nodes: int, *, keeps: bool) -> dict[str, Counted]:
    """Replay all ways at a budget, recording by recording.

    Args:
        edits: the recordings.
        nodes: the budget of each draft.
        keeps: whether outputs serve later ones.
    """
    ways = {name: Counted() for name in WAYS}
    limits = Limits() if keeps else Limits(generations_tokens=1)
    drafters = {name: EmbeddedDrafter(limits=limits) for name in ways}
    for drafter in drafters.values():
        drafter.warm()
    for edit in edits:
        for name, counted in ways.items():
            replay_edit(drafters[name], WAYS[name], edit, nodes, counted)
    return ways


def rate(counts: NDArray[np.int64]) -> float:
    """Return the tokens per step of int64[recordings, 2]."""
    tokens, steps = counts.sum(axis=0)
    return float(tokens / steps)


def interval(counts: NDArray[np.int64], base: NDArray[np.int64]) -> tuple[float, float]:
    """Return the 90% interval of a ratio of rates, by bootstrap over recordings."""
    drawn = np.random.default_rng(0).integers(0, len(counts), (_DRAWS, len(counts)))
    ratios = [rate(counts[each]) / rate(base[each]) for each in drawn]
    low, high = np.percentile(ratios, [5, 95])
    return float(low), float(high)


def described(ways: dict[str, Counted]) -> dict[str, Any]:
    """Return the figures of all ways at one budget."""
    figures: dict[str, Any] = {}
    for name, counted in ways.items():
        figures[name] = {
            "tokens_per_step": rate(counted.array()),
            "draft_us": {
                "p50": float(np.percentile(counted.draft_us, 50)),
                "p99": float(np.percentile(counted.draft_us, 99)),
            },
        }
        base = WAYS[name].over
        if base:
            low, high = interval(counted.array(), ways[base].array())
            ratio = figures[name]["tokens_per_step"] / figures[base]["tokens_per_step"]
            figures[name]["ratio"] = {"over": base, "mean": ratio, "from": low, "to": high}
    return figures


def table_of(nodes: int, figures: dict[str, Any]) -> Table:
    """Return the figures of one budget for reading."""
    table = Table("way", "tokens a step", "ratio", "90% interval", "over", "draft, us")
    table.box, table.title = SIMPLE_HEAD, f"{nodes} nodes"
    for name, each in figures.items():
        ratio = each.get("ratio")
        cells = ("", "", "")
        if ratio is not None:
            span = f"{ratio['from']:.3f} to {ratio['to']:.3f}"
            cells = (f"{ratio['mean']:.3f}", span, ratio["over"])
        rate_, draft_us = f"{each['tokens_per_step']:.2f}", f"{each['draft_us']['p50']:.0f}"
        table.add_row(name, rate_, *cells, draft_us)
    return table


def measure(  # noqa: PLR0913, PLR0917  (options)
    traces: Annotated[Path, typer.Argument(help="Edits: `prompt` with a file, and `output`.")],
    output: Annotated[Path, typer.Option(help="Where the figures go, as JSON.")],
    nodes: Annotated[list[int] | None, typer.Option(help="Budgets; 8, 32 and 64.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Whose token ids.")] = None,
    limit: Annotated[int | None, typer.Option(min=2, help="Only the first recordings.")] = None,
    keep: Annotated[  # noqa: FBT002  (a flag)
        bool, typer.Option(help="Outputs serve later ones, as in a service.")
    ] = True,
) -> None:
    """Measure what predictions bring, and write it down."""
    edits = read_edits(traces, ChatEncoder(tokenizer), limit)
    figures: dict[str, Any] = {}
    for budget in nodes or [8, 32, 64]:
        ways = counted_at(edits, budget, keeps=keep)
        figures[str(budget)] = described(ways)
        print_table(table_of(budget, figures[str(budget)]))
    report = {
        "recordings": len(edits),
        "output_tokens": sum(len(edit.output) for edit in edits),
        "outputs_serve_later_ones": keep,
        "nodes": figures,
        "date": datetime.now(UTC).date().isoformat(),
        "machine": describe_machine(),
        "versions": versions(),
    }
    output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(measure)
