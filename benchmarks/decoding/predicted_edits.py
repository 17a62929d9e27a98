"""What predictions bring on edits of files: tokens per step with the old file as one.

    python -m benchmarks.decoding.predicted_edits edits.jsonl --output predicted.json

Each recording is a prompt that holds a file in a block of code, and the file as it was rewritten.
Outputs are replayed with the file in the prompt; without it there, and with it, a third of it, or a
stale version of it as a prediction instead; and with the file of another recording as a prediction,
which is wrong. Ratios are of tokens per step, with 90% intervals by bootstrap over recordings, and of
median draft times. All ways take turns, recording by recording, each with a drafter of its own.
"""

import json
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import typer
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.table import Table

from decoder.commands.bench import circumstances
from decoder.commands.trace_command import print_table
from indexer.sources.recordings import RecordingTally, read_records
from retriever.drafter import DraftRequest, Prediction, TokenIds
from retriever.limits import Limits, checked_tokens
from retriever.replay.traces import ChatEncoder
from retriever.sessions.embedded import EmbeddedDrafter

IN_PROMPT: Final = "in the prompt"
NOWHERE: Final = "nowhere"
WHOLE: Final = "predicted instead"
THIRD: Final = "a third predicted instead"
STALE: Final = "a stale version predicted instead"
BOTH: Final = "in the prompt and predicted"
WRONG: Final = "in the prompt, another file predicted"
WRONG_ALONE: Final = "nowhere, another file predicted"
_DRAWS: Final = 2000
_BLOCK: Final = re.compile(r"```[^\n]*\n(.*)\n```", re.DOTALL)
_LINES_KEPT: Final = 12
"""Lines of a stale version between two that are not as they are."""

COMPARED: Final = {
    WHOLE: IN_PROMPT,
    BOTH: IN_PROMPT,
    THIRD: NOWHERE,
    STALE: IN_PROMPT,
    WRONG: IN_PROMPT,
    WRONG_ALONE: NOWHERE,
}
"""The way that each is compared with."""


@dataclass(frozen=True, slots=True, eq=False)
class Edit:
    """A recording as token ids.

    Attributes:
        prompt: with the file.
        rest: the prompt without the file.
        predicted: what is predicted, by the way.
        output: what was written.
    """

    prompt: TokenIds
    rest: TokenIds
    predicted: dict[str, TokenIds]
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
    drawn = random.Random(seed)
    lines: list[str] = []
    for number, line in enumerate(text.splitlines()):
        if number % _LINES_KEPT != _LINES_KEPT - 1:
            lines.append(line)
            continue
        change = drawn.choice(("drop", "insert", "rename", "move"))
        if change == "insert":
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
    edits = []
    for number, (prompt, text, output) in enumerate(found[:limit]):
        another = found[(number + 1) % len(found)][1]
        texts = {
            WHOLE: text,
            BOTH: text,
            THIRD: third_of(text),
            STALE: stale_version(text, number),
            WRONG: another,
            WRONG_ALONE: another,
        }
        edits.append(
            Edit(
                checked_tokens(encoder.encode_prompt(prompt), None),
                checked_tokens(encoder.encode_prompt(prompt.replace(text, "")), None),
                {
                    way: checked_tokens(encoder.encode_output(each), None)
                    for way, each in texts.items()
                },
                checked_tokens(encoder.encode_output(output), None),
            )
        )
    return edits


def replayed(
    drafter: EmbeddedDrafter,
    prompt: TokenIds,
    predictions: Sequence[Prediction],
    output: TokenIds,
    nodes: int,
    counted: Counted,
) -> None:
    """Replay an output, and count it."""
    drafter.open("edit", prompt, predictions=predictions)
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


def counted_at(
    edits: Sequence[Edit], nodes: int, *, keeps: bool, shown: Callable[[int], object]
) -> dict[str, Counted]:
    """Replay all ways at a budget, recording by recording.

    Args:
        edits: the recordings.
        nodes: the budget of each draft.
        keeps: whether outputs serve later ones.
        shown: called with the number of each recording.
    """
    ways = {way: Counted() for way in (IN_PROMPT, NOWHERE, *COMPARED)}
    limits = Limits() if keeps else Limits(generations_tokens=1)
    drafters = {way: EmbeddedDrafter(limits=limits) for way in ways}
    for drafter in drafters.values():
        drafter.warm()
    for number, edit in enumerate(edits):
        for way, counted in ways.items():
            prompt = edit.prompt if way in {IN_PROMPT, BOTH, WRONG} else edit.rest
            predicted = edit.predicted.get(way)
            predictions = [] if predicted is None else [Prediction(predicted, "old file")]
            replayed(drafters[way], prompt, predictions, edit.output, nodes, counted)
        shown(number)
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
    for way, counted in ways.items():
        figures[way] = {
            "tokens_per_step": rate(counted.array()),
            "draft_us": {
                "p50": float(np.percentile(counted.draft_us, 50)),
                "p99": float(np.percentile(counted.draft_us, 99)),
            },
        }
        base = COMPARED.get(way)
        if base is not None:
            low, high = interval(counted.array(), ways[base].array())
            ratio = figures[way]["tokens_per_step"] / figures[base]["tokens_per_step"]
            figures[way]["ratio"] = {"over": base, "mean": ratio, "from": low, "to": high}
    return figures


def table_of(nodes: int, figures: dict[str, Any]) -> Table:
    """Return the figures of one budget for reading."""
    table = Table("the file is", "tokens a step", "ratio", "90% interval", "over", "draft, us")
    table.box, table.title = SIMPLE_HEAD, f"{nodes} nodes"
    for way, each in figures.items():
        ratio = each.get("ratio")
        cells = ("", "", "")
        if ratio is not None:
            span = f"{ratio['from']:.3f} to {ratio['to']:.3f}"
            cells = (f"{ratio['mean']:.3f}", span, ratio["over"])
        rate_, draft_us = f"{each['tokens_per_step']:.2f}", f"{each['draft_us']['p50']:.0f}"
        table.add_row(way, rate_, *cells, draft_us)
    return table


def measure(
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
        ways = counted_at(edits, budget, keeps=keep, shown=lambda _: None)
        figures[str(budget)] = described(ways)
        print_table(table_of(budget, figures[str(budget)]))
    report = {
        "recordings": len(edits),
        "output_tokens": sum(len(edit.output) for edit in edits),
        "outputs_serve_later_ones": keep,
        "nodes": figures,
        "circumstances": circumstances(None),
    }
    output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(measure)
