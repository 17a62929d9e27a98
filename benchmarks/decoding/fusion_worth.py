"""The gain of fusing: tokens per pass of each drafter alone and of all together, at equal nodes.

    python -m benchmarks.decoding.fusion_worth --prompts questions.jsonl --index my.index --output F

Every way of drafting decodes the same prompts with the same fixed budget, after the same other
prompts, so that each is as warm as the others. Ratios are of tokens per pass, which no other
program on the machine can disturb.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.progress import track
from rich.table import Table

from decoder.assembly import draft_limits
from decoder.budget.budget import FixedBudget
from decoder.commands.bench import circumstances
from decoder.commands.prompts import Prompt, read_prompts
from decoder.commands.trace_command import print_table
from decoder.drafters.following import Verified
from decoder.drafters.fusion import FusedDrafter, FusedSequence
from decoder.drafters.kernels.siblings import Hints
from decoder.drafters.recycling import NO_HINTS, RecycledLogits
from decoder.loop import Decoder
from decoder.model.pretrained import LanguageModel, ModelOptions, Precision, load_model
from decoder.model.target import Target
from decoder.observation import Statistics
from indexer.tokenizer import DEFAULT_MODEL
from retriever.drafter import Drafter, TokenIds
from retriever.sessions.embedded import EmbeddedDrafter

OVERALL = "overall"
RETRIEVED, RECYCLED, FUSED = "retrieved", "recycled", "fused"


class UntaughtDrafter(FusedDrafter):
    """A fused drafter whose weights stay those that it began with."""

    def _learn_weights(self, sequence: FusedSequence, came: TokenIds) -> None:
        """Learn nothing."""


class UnhintedDrafter(FusedDrafter):
    """A fused drafter that makes nothing of what else was likely at the last token."""

    def take_in(self, sequence: FusedSequence, verified: Verified) -> Hints:
        """Learn, and give no hints."""
        super().take_in(sequence, verified)
        return NO_HINTS


Way = Callable[[Drafter, LanguageModel], Drafter]


def _fusing(kind: type[FusedDrafter], *, retrieves: bool, recycles: bool) -> Way:
    def made(retrieval: Drafter, language_model: LanguageModel) -> Drafter:
        return kind(
            [retrieval] if retrieves else [],
            draft_limits(language_model),
            recycled=RecycledLogits() if recycles else None,
        )

    return made


WAYS: dict[str, Way] = {
    RETRIEVED: lambda retrieval, _: retrieval,
    RECYCLED: _fusing(FusedDrafter, retrieves=False, recycles=True),
    FUSED: _fusing(FusedDrafter, retrieves=True, recycles=True),
    "retrieved, weighed anew": _fusing(FusedDrafter, retrieves=True, recycles=False),
    "fused, weights not learned": _fusing(UntaughtDrafter, retrieves=True, recycles=True),
    "fused, without hints": _fusing(UnhintedDrafter, retrieves=True, recycles=True),
}


@contextmanager
def retrieval_from(indexes: list[Path], language_model: LanguageModel) -> Iterator[Drafter]:
    """Have a cold retrieval drafter during the block."""
    drafter = EmbeddedDrafter.open_indexes(indexes, vocabulary=language_model.vocabulary)
    try:
        yield drafter
    finally:
        drafter.shut_down()


def measure(
    language_model: LanguageModel,
    decoder: Decoder,
    warm: list[Prompt],
    measured: list[Prompt],
    max_new_tokens: int,
) -> dict[str, float]:
    """Return tokens per pass for each category and overall, after warming."""
    totals: dict[str, Statistics] = {OVERALL: Statistics()}
    for number, prompt in enumerate([*warm, *measured]):
        generation = decoder.generate(language_model.encode(prompt.text), max_new_tokens)
        for _ in generation:
            pass
        if number >= len(warm):
            totals[OVERALL].add(generation.statistics)
            totals.setdefault(prompt.category, Statistics()).add(generation.statistics)
    return {name: statistics.tokens_per_pass for name, statistics in totals.items()}


def compare(
    language_model: LanguageModel,
    indexes: list[Path],
    prompts: tuple[list[Prompt], list[Prompt]],
    budget: int,
    max_new_tokens: int,
) -> dict[str, dict[str, float]]:
    """Return for each way of drafting what `measure` returns."""
    target = Target(language_model.model)
    found = {}
    for name, way in track(WAYS.items(), description=f"{budget} nodes"):
        with retrieval_from(indexes, language_model) as retrieval:
            drafter = way(retrieval, language_model)
            limit = FixedBudget(budget)
            decoder = Decoder(target, drafter, limit, stop_ids=language_model.stop_ids)
            found[name] = measure(language_model, decoder, *prompts, max_new_tokens)
    return found


def table_of(budget: int, found: dict[str, dict[str, float]]) -> Table:
    """Return tokens per pass, and what fusing is worth, for people."""
    table = Table(title=f"tokens per pass, {budget} nodes", box=SIMPLE_HEAD)
    table.add_column("category")
    for name in [*found, "fused over better"]:
        table.add_column(name, justify="right")
    for category in found[FUSED]:
        values = [f"{figures[category]:.2f}" for figures in found.values()]
        table.add_row(category, *values, f"{worth(found, category):.2f}")
    return table


def worth(found: dict[str, dict[str, float]], category: str) -> float:
    """Return tokens per pass of the fused drafts over those of the better part."""
    return found[FUSED][category] / max(found[RETRIEVED][category], found[RECYCLED][category])


def main(  # noqa: PLR0913, PLR0917  as many as a command has
    prompts: Annotated[Path, typer.Option(help="Spec-Bench's questions, or a prompt a line.")],
    output: Annotated[Path, typer.Option(help="Where the figures go (JSON).")],
    index: Annotated[list[Path] | None, typer.Option(help="Index to draft from.")] = None,
    model: Annotated[str, typer.Option(help="The model.")] = DEFAULT_MODEL,
    per_category: Annotated[int, typer.Option(help="Prompts measured of each category.")] = 3,
    warm_limit: Annotated[int, typer.Option(help="Other prompts decoded before.")] = 60,
    budget: Annotated[list[int] | None, typer.Option(help="Nodes. Default: 16 and 32.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens for each.")] = 64,
    dtype: Annotated[Precision, typer.Option(help="What to compute in.")] = Precision.BFLOAT16,
    category: Annotated[list[str] | None, typer.Option(help="Measured. Default: all.")] = None,
) -> None:
    """Measure what fusing is worth."""
    first = read_prompts(prompts, per_category=per_category)
    others = [prompt for prompt in read_prompts(prompts) if prompt not in first]
    measured = [prompt for prompt in first if not category or prompt.category in category]
    warm = others[:warm_limit]
    language_model = load_model(ModelOptions(model, precision=dtype))
    report: dict[str, Any] = {
        **circumstances(language_model),
        "num_prompts": len(measured),
        "num_warm": len(warm),
        "max_new_tokens": max_new_tokens,
        "indexes": [path.name for path in index or []],
        "tokens_per_pass": {},
    }
    for nodes in budget or [16, 32]:
        found = compare(language_model, index or [], (warm, measured), nodes, max_new_tokens)
        report["tokens_per_pass"][str(nodes)] = found
        print_table(table_of(nodes, found))
        output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
