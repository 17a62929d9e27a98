"""Whether `foredraft estimate` projects what `foredraft bench` measures, on this machine.

    python -m benchmarks.decoding.estimate_check --prompts FILE --output FILE

The model answers prompts without drafts and with them, as `bench` does, its drafter remembering
earlier answers. The answers without drafts are the log of an estimate, whose passes cost what this
machine measured before. What the estimate projects for drafts that are cut to what pays is
compared with the speed-up that was measured, both without the passes over prompts. Recycled logits
are left out, as a log holds none.
"""

import json
import os
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import typer
from rich.progress import track

from decoder.assembly import assemble
from decoder.budget.budget import MeasuredBudget
from decoder.commands.prompts import read_prompts
from decoder.loop import Decoder
from decoder.model.pretrained import LanguageModel, ModelOptions, Precision, load_model
from decoder.observation import Statistics
from decoder.plugins.bench.bench import (
    WARM_UP_TEXT,
    BenchPrompt,
    circumstances,
    fastest,
    fitting,
    in_turn,
)
from decoder.plugins.contenders.contender import FOREDRAFT, UNDRAFTED, contenders, total_of
from decoder.plugins.contenders.drafting_rules import drafting_rules
from decoder.plugins.contenders.standings import Comparison
from decoder.plugins.estimate.cost_curve import CostCurve
from decoder.plugins.estimate.projection import PAYING, ProjectedOutcome, project
from decoder.plugins.estimate.token_log import LoggedRecord
from indexer.tokenizer import DEFAULT_MODEL
from retriever.commands.factories import OWN
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.traces.traces import Trace

ALLOWED: Final = 0.15
"""Most that projection and measurement may differ by, as a share of the measurement."""


def measure(
    language_model: LanguageModel,
    decoder: Decoder,
    cases: list[BenchPrompt],
    max_new_tokens: int,
    repeat: int,
) -> list[Comparison]:
    """Decode every prompt with drafts and without, and keep the fastest run of each.

    Answers are remembered in the last round alone, so that no way drafts from an answer to the same
    prompt; what a target's logits taught is kept all the same.
    """
    ways = contenders(language_model, decoder, max_new_tokens)
    own = {name: ways[name] for name in (UNDRAFTED, FOREDRAFT)}
    for way in own.values():
        way([language_model.encode(WARM_UP_TEXT)], remember=False)
    comparisons = []
    for number, case in enumerate(track(cases, "prompts")):
        rounds = []
        for turn in range(repeat):
            keep = turn == repeat - 1
            decoding = {
                name: partial(way, [case.token_ids], remember=keep) for name, way in own.items()
            }
            rounds.append(Comparison(case.category, in_turn(decoding, number * repeat + turn)))
        comparisons.append(fastest(rounds))
    return comparisons


def measured_figures(comparisons: list[Comparison]) -> dict[str, float]:
    """Return speed-up and tokens per step as measured, prompts' passes left out."""
    totals = {
        name: total_of(comparison.runs[name] for comparison in comparisons)
        for name in (UNDRAFTED, FOREDRAFT)
    }
    drafted = totals[FOREDRAFT]
    return {
        "speedup": _token_s(totals[UNDRAFTED], len(comparisons))
        / _token_s(drafted, len(comparisons)),
        "tokens_per_step": (drafted.num_tokens - len(comparisons)) / drafted.widths.total(),
    }


def projected_figures(
    cases: list[BenchPrompt], comparisons: list[Comparison], curve: CostCurve
) -> dict[str, float]:
    """Return what the estimate says of the answers that were given without drafts."""
    log = [
        LoggedRecord(
            case.category,
            Trace(
                np.array(case.token_ids, np.int32),
                np.array(comparison.runs[UNDRAFTED].token_ids, np.int32),
            ),
        )
        for case, comparison in zip(cases, comparisons, strict=True)
    ]
    rules = [rule for rule in drafting_rules() if rule.name == OWN]
    plain, paying = project(log, rules, [PAYING], curve)
    return _figures(plain, paying)


def main(  # noqa: PLR0913  as many as a command has
    *,
    prompts: Annotated[Path, typer.Option(help="Spec-Bench's questions, or a prompt a line.")],
    output: Annotated[Path, typer.Option(help="Where the figures go (JSON).")],
    model: Annotated[str, typer.Option(help="The model.")] = DEFAULT_MODEL,
    dtype: Annotated[Precision, typer.Option(help="What to compute in.")] = Precision.BFLOAT16,
    per_category: Annotated[int | None, typer.Option(help="Most prompts of each category.")] = None,
    limit: Annotated[int | None, typer.Option(help="Most prompts.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens for each.")] = 64,
    repeat: Annotated[int, typer.Option(help="Runs of each, the fastest of which counts.")] = 1,
) -> None:
    """Compare a projection with a measurement; ends with 1 where they differ by more than 15%."""
    language_model = load_model(ModelOptions(model, precision=dtype))
    drafter = EmbeddedDrafter(vocabulary=language_model.vocabulary)
    drafter.warm()
    decoder = assemble(language_model, drafter)
    assert isinstance(decoder.budget, MeasuredBudget)  # noqa: S101  as `assemble` makes it
    curve = CostCurve(decoder.budget.costs.surface, "measured")
    read = read_prompts(prompts, limit, per_category)
    cases = fitting(language_model, decoder.target, read)
    comparisons = measure(language_model, decoder, cases, max_new_tokens, repeat)
    drafter.shut_down()
    measured, projected = (
        measured_figures(comparisons),
        projected_figures(cases, comparisons, curve),
    )
    error = projected["speedup"] / measured["speedup"] - 1
    report: dict[str, Any] = {
        **circumstances(language_model),
        "prompts": prompts.name,
        "num_prompts": len(cases),
        "max_new_tokens": max_new_tokens,
        "repeat": repeat,
        "load": round(os.getloadavg()[0], 1),
        "measured": measured,
        "projected": projected,
        "error": error,
        "allowed": ALLOWED,
    }
    output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(
        f"measured {measured['speedup']:.2f}, projected {projected['speedup']:.2f} times decoding "
        f"without drafts: {error:+.1%}"
    )
    raise SystemExit(abs(error) > ALLOWED)


def _token_s(statistics: Statistics, num_prompts: int) -> float:
    """Return seconds for each token but the first of each prompt."""
    seconds = statistics.total_s - statistics.prompt_s
    return seconds / (statistics.num_tokens - num_prompts)


def _figures(plain: ProjectedOutcome, drafted: ProjectedOutcome) -> dict[str, float]:
    tally = drafted.tally()
    return {
        "speedup": drafted.speedup(plain),
        "tokens_per_step": tally.tokens_per_step,
        "nodes_per_step": tally.nodes_per_step,
        "draft_us": tally.draft_s / tally.steps * 1e6,
    }


if __name__ == "__main__":
    typer.run(main)
