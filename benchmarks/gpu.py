"""What is claimed of speed and exactness, on a machine with CUDA: one command, one file.

    python -m benchmarks.gpu --prompts questions.jsonl.gz --index chat.index --warm others.jsonl.gz

Four parts, each kept as soon as it is there: greedy float32 output against `model.generate`; what
verifying and committing cost as the context grows; what passes cost by width and context; and
tokens per second in bfloat16. There, "undrafted" is the same loop with the same captured graphs
and no drafts: the ratio to it credits drafting alone. Without CUDA it says so, and that is all.
"""

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import typer
from rich.console import Console
from rich.progress import track

from benchmarks.decoding import greedy_exactness
from benchmarks.decoding.commit_cost import commit_costs
from benchmarks.decoding.devices import describe_device, device_state
from decoder.assembly import DrafterSettings, assemble
from decoder.budget.cost_store import describe_machine, device_name, versions
from decoder.budget.costs import measure_costs
from decoder.commands.bench import BenchOptions, fitting, run_benchmark
from decoder.commands.bench_report import table_of
from decoder.commands.prompts import Prompt, read_prompts
from decoder.commands.terminal import watching
from decoder.contenders.contender import FOREDRAFT, PLAIN, contenders
from decoder.contenders.registry import DEFAULT, Contest
from decoder.errors import DecoderError
from decoder.model.pretrained import LanguageModel, ModelOptions, Precision, load_model
from decoder.model.target import Target
from indexer.errors import IndexerError
from indexer.tokenizer import DEFAULT_MODEL
from retriever.errors import RetrieverError

RESULTS: Final = Path(__file__).parent / "results" / "decoding"
WIDTHS: Final = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXTS: Final = (64, 512, 2048, 8192)
_CURVE_SECONDS: Final = 60.0

_console: Final = Console(stderr=True)
_track: Final = partial(track, console=_console)


class Part(StrEnum):
    """What can be measured."""

    EXACTNESS = "exactness"
    COMMIT_COST = "commit-cost"
    COST_CURVE = "cost-curve"
    BENCH = "bench"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured, and with what.

    Attributes:
        model: its name.
        device: where it runs.
        prompts: what is decoded.
        drafter: where drafts come from.
        bench: how tokens per second are measured; its limit of tokens counts everywhere.
        rounds: passes of each kind, for what commits cost.
    """

    model: str
    device: str
    prompts: Sequence[Prompt]
    drafter: DrafterSettings
    bench: BenchOptions
    rounds: int

    def load(self, precision: Precision) -> LanguageModel:
        """Load the model."""
        return load_model(ModelOptions(self.model, self.device, precision))


def exactness(plan: Plan) -> dict[str, Any]:
    """Compare greedy outputs with those of `model.generate`, in float32."""
    torch.set_float32_matmul_precision("highest")
    language_model = plan.load(Precision.FLOAT32)
    with plan.drafter.connect(language_model) as drafter:
        decoder = assemble(language_model, drafter)
        all_ways = contenders(language_model, decoder, plan.bench.max_new_tokens)
        ways = {name: all_ways[name] for name in (PLAIN, FOREDRAFT)}
        cases = fitting(language_model, decoder.target, plan.prompts)
        rows = [
            greedy_exactness.compare(language_model, ways, case, number)
            for number, case in enumerate(_track(cases, Part.EXACTNESS))
        ]
    return greedy_exactness.summary(rows)


def commit_cost(plan: Plan) -> dict[str, Any]:
    """Time passes and commits at growing contexts, compared with a stock cache."""
    return {"rounds": plan.rounds, "rows": [*map(asdict, commit_costs(plan.device, plan.rounds))]}


def cost_curve(plan: Plan) -> dict[str, Any]:
    """Time passes of the model in bfloat16 by width and context, in milliseconds."""
    target = Target(plan.load(Precision.BFLOAT16).model)
    surface = measure_costs(target, WIDTHS, CONTEXTS, _CURVE_SECONDS)
    rows = [[round(1e3 * seconds, 4) for seconds in row] for row in surface.seconds]
    return {"widths": surface.widths, "contexts": surface.contexts, "milliseconds": rows}


def bench(plan: Plan) -> dict[str, Any]:
    """Measure tokens per second of every way of decoding in bfloat16, in turn."""
    language_model = plan.load(Precision.BFLOAT16)
    contest = Contest(language_model, DEFAULT, plan.drafter, plan.bench.max_new_tokens)
    with watching() as watcher:
        report = run_benchmark(language_model, contest.opened, plan.prompts, plan.bench, watcher)
    report["drafter"] = plan.drafter.describe()
    _console.print(table_of(report))
    return report


MEASURES: Final[dict[Part, Callable[[Plan], dict[str, Any]]]] = {
    Part.EXACTNESS: exactness,
    Part.COMMIT_COST: commit_cost,
    Part.COST_CURVE: cost_curve,
    Part.BENCH: bench,
}


def measure(plan: Plan, parts: Sequence[Part], output: Path) -> dict[str, Any]:
    """Measure some parts and keep each in a file as soon as it is there.

    Returns:
        What the file holds: the circumstances, and what each part returns under its name, with
        the device's state (clocks among it) before and after.
    """
    device = torch.device(plan.device)
    result: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "model": plan.model,
        "num_prompts": len(plan.prompts),
        "max_new_tokens": plan.bench.max_new_tokens,
        "drafter": plan.drafter.describe(),
        "device": describe_device(device),
        "machine": describe_machine(),
        "versions": versions(),
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    for part in parts:
        before = device_state(device)
        result[part] = {**MEASURES[part](plan), "device_before": before}
        result[part]["device_after"] = device_state(device)
        output.write_text(json.dumps(result, indent=1) + "\n")
    return result


def command(  # noqa: PLR0913  options
    *,
    prompts: Annotated[
        Path | None, typer.Option(help="Spec-Bench's questions, or a prompt a line.")
    ] = None,
    model: Annotated[str, typer.Option(help="The model.")] = DEFAULT_MODEL,
    index: Annotated[list[Path] | None, typer.Option(help="Indexes to draft from.")] = None,
    warm: Annotated[
        Path | None, typer.Option(help="Prompts to answer before the bench, to draft from.")
    ] = None,
    warm_limit: Annotated[int | None, typer.Option(min=1, help="Most of them.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Most prompts.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of each.")] = 64,
    repeat: Annotated[int, typer.Option(min=1, help="Runs of each, the fastest counts.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Passes of each kind.")] = 9,
    only: Annotated[list[Part] | None, typer.Option(help="Parts to measure, not all.")] = None,
    device: Annotated[str, typer.Option(help="Another device, to try the command.")] = "cuda",
    output: Annotated[
        Path | None,
        typer.Option(help="JSON. Default: named for day and device, in results."),
    ] = None,
) -> None:
    """Measure on a CUDA device what is claimed of speed and exactness, and keep it."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        print("skipped: no CUDA device here, nothing was measured")
        return
    if prompts is None:
        raise typer.BadParameter("name a file of prompts", param_hint="--prompts")
    drafter = DrafterSettings(index=index or [])
    drafter.check()
    others = [] if warm is None else read_prompts(warm)
    options = BenchOptions(max_new_tokens, repeat, others, warm_limit)
    plan = Plan(model, device, read_prompts(prompts, limit), drafter, options, rounds)
    path = output or _default_output(torch.device(device))
    result = measure(plan, only or list(Part), path)
    print(path)
    different = result.get(Part.EXACTNESS, {}).get("different", [])
    if not all(found["is_tie"] for found in different):
        raise typer.Exit(1)


def _default_output(device: torch.device) -> Path:
    name = re.sub(r"[^a-z0-9]+", "-", device_name(device).lower()).strip("-")
    return RESULTS / f"{datetime.now(UTC).date().isoformat()}-{name}.json"


def main() -> None:
    """Run the command; what goes wrong is said in one line."""
    try:
        typer.run(command)
    except (DecoderError, IndexerError, RetrieverError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
