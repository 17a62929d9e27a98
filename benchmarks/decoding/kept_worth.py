"""What kept recycled logits are worth: tokens per pass cold, after a restart, and from a service.

    python -m benchmarks.decoding.kept_worth --prompts questions.jsonl --output kept.json

A first decoder answers some prompts with a state directory, and ends. Then each way answers other
prompts from its start on, at the same fixed budget: from nothing; with what a state directory keeps
besides (outputs and weights); with recycled logits too; with recycled logits alone; and with those
that another decoder has shared through a service. Ratios are of tokens per pass, over cold, with
90% intervals by bootstrap over prompts.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import typer
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.table import Table

from decoder.assembly import draft_limits
from decoder.budget.budget import FixedBudget
from decoder.commands.bench import circumstances
from decoder.commands.prompts import Prompt, read_prompts
from decoder.commands.trace_command import print_table
from decoder.drafters.fusion import FusedDrafter
from decoder.drafters.keeping import kept_logits
from decoder.drafters.recycling import RecycledLogits
from decoder.loop import Decoder
from decoder.model.pretrained import LanguageModel, ModelOptions, Precision, load_model
from decoder.model.target import Target
from indexer.tokenizer import DEFAULT_MODEL
from retriever.client.shared_findings import SharedFindings
from retriever.drafter import FindingsStore
from retriever.sessions.embedded import EmbeddedDrafter

COLD: Final = "cold"
_READY: Final = "serving on "
_DRAWS: Final = 4000
_FIRST: Final = 8
"""Prompts right after the start, where most is to be gained: a decoder warms up by itself."""

Counts = NDArray[np.int64]
"""int64[prompts, 2], tokens and passes of each."""


@dataclass(frozen=True, slots=True)
class Bench:
    """What all ways have in common.

    Attributes:
        language_model: what decodes.
        target: its passes.
        indexes: that are drafted from.
        nodes: the budget of each pass.
        max_new_tokens: of each prompt.
    """

    language_model: LanguageModel
    target: Target
    indexes: Sequence[Path]
    nodes: int
    max_new_tokens: int

    def answered(
        self,
        prompts: Sequence[Prompt],
        state: Path | None = None,
        store: FindingsStore | None = None,
        *,
        recycles: bool = True,
    ) -> Counts:
        """Answer prompts from a start on, with what a state directory or a store keeps.

        Args:
            prompts: to answer.
            state: keeps outputs and weights; None for memory alone.
            store: keeps recycled logits; None for the state directory, if there is one.
            recycles: whether recycled logits are kept at all.
        """
        vocabulary = self.language_model.vocabulary
        retrieval = EmbeddedDrafter.open_indexes(self.indexes, vocabulary=vocabulary, state=state)
        recycled, place = RecycledLogits(), store or retrieval
        is_kept = recycles and (store is not None or state is not None)
        model = self.language_model.model
        kept = kept_logits(recycled, place, model, vocabulary) if is_kept else None
        try:
            if kept is not None:
                kept.load()
            fused = FusedDrafter([retrieval], draft_limits(self.language_model), recycled=recycled)
            stop_ids = self.language_model.stop_ids
            decoder = Decoder(self.target, fused, FixedBudget(self.nodes), stop_ids=stop_ids)
            counts = [self._counts(decoder, prompt) for prompt in prompts]
            if kept is not None:
                kept.save()
            return np.array(counts)
        finally:
            retrieval.shut_down()

    def _counts(self, decoder: Decoder, prompt: Prompt) -> tuple[int, int]:
        generation = decoder.generate(self.language_model.encode(prompt.text), self.max_new_tokens)
        for _ in generation:
            pass
        return generation.statistics.num_tokens, generation.statistics.num_passes


def measure(
    bench: Bench, earlier: Sequence[Prompt], others: Sequence[Prompt], measured: Sequence[Prompt]
) -> dict[str, Counts]:
    """Return the counts of each way.

    Args:
        bench: how.
        earlier: answered before the restart.
        others: answered by another decoder.
        measured: answered by each way.
    """
    with tempfile.TemporaryDirectory() as folder, service() as address:
        state = Path(folder, "state")
        bench.answered(earlier, state)

        def copied(name: str) -> Path:
            return Path(shutil.copytree(state, Path(folder, name)))

        with ExitStack() as opened:
            alone = EmbeddedDrafter(state=copied("alone"))
            opened.callback(alone.shut_down)
            shared = opened.enter_context(SharedFindings([address]))
            found = {COLD: bench.answered(measured)}
            found["outputs kept"] = bench.answered(measured, copied("outputs"), recycles=False)
            found["recycled logits kept"] = bench.answered(measured, store=alone)
            found["both kept"] = bench.answered(measured, copied("both"))
            bench.answered(others, store=shared)
            found["shared by another"] = bench.answered(measured, store=shared)
    return found


@contextmanager
def service() -> Iterator[str]:
    """Run a service in a process of its own during the block; give its address."""
    command = [sys.executable, "-m", "foredraft", "serve", "--address", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline() if process.stdout else ""
            if not line.startswith(_READY):
                raise RuntimeError(f"the service did not start: {line}")
            yield line.removeprefix(_READY).strip()
        finally:
            process.terminate()


def summary(found: dict[str, Counts]) -> dict[str, dict[str, Any]]:
    """Return tokens per pass of each way, and what it is over cold, with 90% intervals."""
    return {
        name: {
            "tokens_per_pass": _pace(counts),
            "over_cold": _pace(counts) / _pace(found[COLD]),
            "interval": _interval(counts, found[COLD]),
            f"first_{_FIRST}_over_cold": _pace(counts[:_FIRST]) / _pace(found[COLD][:_FIRST]),
            "tokens_and_passes": counts.tolist(),
        }
        for name, counts in found.items()
    }


def _pace(counts: Counts) -> float:
    tokens, passes = counts.sum(axis=0).tolist()
    return float(tokens / passes)


def _interval(counts: Counts, cold: Counts) -> list[float]:
    """Return a 90% interval of the ratio, by bootstrap over prompts."""
    drawn = np.random.default_rng(0).integers(0, len(counts), (_DRAWS, len(counts)))
    ways = [each[drawn].sum(axis=1) for each in (counts, cold)]
    paces = [way[:, 0] / way[:, 1] for way in ways]
    bounds: list[float] = np.quantile(paces[0] / paces[1], [0.05, 0.95]).tolist()
    return bounds


def table_of(nodes: int, found: dict[str, dict[str, Any]]) -> Table:
    """Return the figures of a budget for people."""
    table = Table(title=f"tokens per pass, {nodes} nodes", box=SIMPLE_HEAD)
    for name in ("", "tokens per pass", "over cold", "90%", f"first {_FIRST} prompts"):
        table.add_column(name, justify="right")
    for name, figures in found.items():
        low, high = figures["interval"]
        table.add_row(
            name,
            f"{figures['tokens_per_pass']:.3f}",
            f"{figures['over_cold']:.3f}",
            f"{low:.3f} to {high:.3f}",
            f"{figures[f'first_{_FIRST}_over_cold']:.3f}",
        )
    return table


def main(  # noqa: PLR0913, PLR0917  as many as a command has
    prompts: Annotated[Path, typer.Option(help="Spec-Bench's questions, or a prompt a line.")],
    output: Annotated[Path, typer.Option(help="Where the figures go (JSON).")],
    index: Annotated[list[Path] | None, typer.Option(help="Index to draft from.")] = None,
    model: Annotated[str, typer.Option(help="The model.")] = DEFAULT_MODEL,
    per_category: Annotated[int, typer.Option(help="Prompts measured of each category.")] = 2,
    earlier: Annotated[int, typer.Option(help="Prompts before a restart, and of the other.")] = 60,
    budget: Annotated[list[int] | None, typer.Option(help="Nodes. Default: 16 and 32.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens for each.")] = 64,
    dtype: Annotated[Precision, typer.Option(help="What to compute in.")] = Precision.BFLOAT16,
) -> None:
    """Measure what kept recycled logits are worth."""
    measured = read_prompts(prompts, per_category=per_category)
    rest = [prompt for prompt in read_prompts(prompts) if prompt not in measured]
    order = np.random.default_rng(0).permutation(len(rest)).tolist()
    rest = [rest[place] for place in order]
    language_model = load_model(ModelOptions(model, precision=dtype))
    report: dict[str, Any] = {
        **circumstances(language_model),
        "num_prompts": len(measured),
        "num_earlier": len(rest[:earlier]),
        "num_others": len(rest[earlier : 2 * earlier]),
        "max_new_tokens": max_new_tokens,
        "indexes": [path.name for path in index or []],
        "budgets": {},
    }
    target = Target(language_model.model)
    for nodes in budget or [16, 32]:
        bench = Bench(language_model, target, index or [], nodes, max_new_tokens)
        found = summary(measure(bench, rest[:earlier], rest[earlier : 2 * earlier], measured))
        report["budgets"][str(nodes)] = found
        print_table(table_of(nodes, found))
        output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
