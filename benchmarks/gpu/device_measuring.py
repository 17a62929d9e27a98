"""What is claimed of speed and exactness, on a machine with CUDA: one command, one file.

    python -m benchmarks.gpu --prompts questions.jsonl.gz --index chat.index --warm others.jsonl.gz

Five parts, each kept as soon as it is there: greedy float32 output against `model.generate`, of
prompts alone and in parallel; what verifying and committing cost as the context grows; what passes
cost by width and context; and in bfloat16 tokens per second of one prompt at a time, and of 1, 4,
16 and 32 in parallel beside transformers' padded batches. There, "undrafted" is the same loop with
the same captured graphs and no drafts: the ratio to it credits drafting alone. Beside the JSON a
report in Markdown says first where drafts lose, with plots. Without CUDA it says so, and that is
all.
"""

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
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
from benchmarks.gpu.device_report import write_report
from benchmarks.gpu.missing import missing_files
from decoder.assembly import assemble, check_drafts, connect_drafter
from decoder.budget.cost_store import describe_machine, device_name, versions
from decoder.budget.pass_timing import measure_costs
from decoder.commands.prompts import Prompt, read_prompts
from decoder.commands.terminal import watching
from decoder.drafters.options import DraftOptions
from decoder.errors import DecoderError, ModelLoadError
from decoder.model.pretrained import LanguageModel, ModelOptions, Precision, load_model
from decoder.model.target import Target
from decoder.plugins.bench.bench import Benchmark, BenchOptions, fitting
from decoder.plugins.bench.bench_report import conclusions_of, table_of
from decoder.plugins.bench.exactness import wrong_outputs
from decoder.plugins.contenders.contender import FOREDRAFT, PLAIN, contenders
from decoder.plugins.contenders.registry import DEFAULT, Contest, parallel_default
from indexer.errors import IndexerError
from indexer.flags import with_flags
from indexer.tokenizer import DEFAULT_MODEL
from retriever.errors import RetrieverError

RESULTS: Final = Path(__file__).parents[1] / "results" / "decoding"
WIDTHS: Final = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXTS: Final = (64, 512, 2048, 8192)
PARALLEL: Final = (1, 4, 16, 32)
_CURVE_SECONDS: Final = 60.0

_console: Final = Console(stderr=True)
_track: Final = partial(track, console=_console)


class OtherRunError(Exception):
    """A file is of another run; the message says what differs."""


class Part(StrEnum):
    """What can be measured."""

    EXACTNESS = "exactness"
    COMMIT_COST = "commit-cost"
    COST_CURVE = "cost-curve"
    BENCH = "bench"
    PARALLEL = "parallel"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured, and with what.

    Attributes:
        model: its name.
        device: where it runs.
        prompts: what is decoded.
        drafter: where drafts come from.
        bench: how tokens per second are measured, and at how many prompts in parallel; its limit
            of tokens counts everywhere.
        rounds: passes of each kind, for what commits cost.
    """

    model: str
    device: str
    prompts: Sequence[Prompt]
    drafter: DraftOptions
    bench: BenchOptions
    rounds: int

    def load(self, precision: Precision) -> LanguageModel:
        """Load the model."""
        return load_model(ModelOptions(self.model, self.device, precision))


def exactness(plan: Plan) -> dict[str, Any]:
    """Compare greedy outputs with those of `model.generate`, in float32."""
    torch.set_float32_matmul_precision("highest")
    language_model = plan.load(Precision.FLOAT32)
    with connect_drafter(plan.drafter, language_model) as drafter:
        decoder = assemble(language_model, drafter)
        all_ways = contenders(language_model, decoder, plan.bench.max_new_tokens)
        ways = {name: all_ways[name] for name in (PLAIN, FOREDRAFT)}
        cases = fitting(language_model, decoder.target, plan.prompts)
        rows = [
            greedy_exactness.compare(language_model, ways, case, number)
            for number, case in enumerate(_track(cases, Part.EXACTNESS))
        ]
    alone = {tuple(c.token_ids): row["output_ids"] for c, row in zip(cases, rows, strict=True)}
    names = [name for name in parallel_default(plan.drafter) if name != PLAIN]
    contest = Contest(language_model, names, plan.drafter, plan.bench.max_new_tokens)
    options = replace(plan.bench, repeat=1, warm=())
    with watching() as watcher:
        benchmark = Benchmark(language_model, contest.opened, plan.prompts, options, watcher, alone)
        benchmark.run()
    return {**greedy_exactness.summary(rows), "parallel": _outputs(benchmark.report())}


def _outputs(report: dict[str, Any]) -> dict[str, Any]:
    """Return what a report says of outputs in parallel, without the speed."""
    (setting,) = report["settings"]
    identical = {
        str(width["parallel"]): {
            name: figures["identical"] for name, figures in width["contenders"].items()
        }
        for width in setting["widths"]
    }
    answers = {str(width["parallel"]): width["num_answers"] for width in setting["widths"]}
    return {**report["exactness"], "answers": answers, "identical": identical}


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
    report = _speeds(plan, DEFAULT, replace(plan.bench, widths=(1,), is_judged=False))
    _console.print(table_of(report))
    return report


def parallel(plan: Plan) -> dict[str, Any]:
    """Measure tokens per second in bfloat16 by how many prompts are decoded in parallel."""
    report = _speeds(plan, parallel_default(plan.drafter), plan.bench)
    for line in conclusions_of(report):
        _console.print(line)
    return report


def _speeds(plan: Plan, names: Sequence[str], options: BenchOptions) -> dict[str, Any]:
    language_model = plan.load(Precision.BFLOAT16)
    contest = Contest(language_model, names, plan.drafter, options.max_new_tokens)
    with watching() as watcher:
        benchmark = Benchmark(language_model, contest.opened, plan.prompts, options, watcher)
        benchmark.run()
    return {**benchmark.report(), "drafter": plan.drafter.describe()}


MEASURES: Final[dict[Part, Callable[[Plan], dict[str, Any]]]] = {
    Part.EXACTNESS: exactness,
    Part.COMMIT_COST: commit_cost,
    Part.COST_CURVE: cost_curve,
    Part.BENCH: bench,
    Part.PARALLEL: parallel,
}


def measure(
    plan: Plan, parts: Sequence[Part], output: Path, *, add: bool = False
) -> dict[str, Any]:
    """Measure some parts and keep each in a file as soon as it is there, and in a report beside it.

    Args:
        plan: what is measured.
        parts: in this order.
        output: the file.
        add: keep the parts that the file has already.

    Returns:
        What the file holds: the circumstances, and what each part returns under its name, with
        the device's state (clocks among it) before and after.

    Raises:
        OtherRunError: what the file has is of other circumstances.
    """
    device = torch.device(plan.device)
    about: dict[str, Any] = {
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
    result = {**about, **(_kept_parts(output, about) if add and output.exists() else {})}
    for part in parts:
        before = device_state(device)
        result[part] = {**MEASURES[part](plan), "device_before": before}
        result[part]["device_after"] = device_state(device)
        output.write_text(json.dumps(result, indent=1) + "\n")
        write_report(result, output)
    return result


def _kept_parts(output: Path, about: dict[str, Any]) -> dict[str, Any]:
    """Return the parts that a file has already.

    Raises:
        OtherRunError: they were measured in other circumstances; the day may be another one.
    """
    kept = json.loads(output.read_text())
    for name, value in about.items():
        if name != "date" and kept.get(name) != value:
            raise OtherRunError(
                f"{output} has another {name}, {kept.get(name)!r}: name another file with --output"
            )
    return {part: kept[part] for part in Part if part in kept}


@with_flags
def command(  # noqa: PLR0913  options
    *,
    drafts: DraftOptions,
    prompts: Annotated[
        Path | None, typer.Option(help="Spec-Bench's questions, or a prompt a line.")
    ] = None,
    model: Annotated[str, typer.Option(help="The model: a folder, or as for bench.")] = (
        DEFAULT_MODEL
    ),
    warm: Annotated[
        Path | None, typer.Option(help="Prompts to answer before the bench, to draft from.")
    ] = None,
    warm_limit: Annotated[int | None, typer.Option(min=1, help="Most of them.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Most prompts.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of each.")] = 64,
    parallel: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Prompts at a time. Repeatable. Default: 1, 4, 16 and 32."),
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Runs of each, the fastest counts.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Passes of each kind.")] = 9,
    only: Annotated[list[Part] | None, typer.Option(help="Parts to measure, not all.")] = None,
    add: Annotated[
        bool, typer.Option("--add", help="Keep the parts that the file has already.")
    ] = False,
    device: Annotated[str, typer.Option(help="Another device, to try the command.")] = "cuda",
    output: Annotated[
        Path | None,
        typer.Option(help="JSON. Default: named for day and device, in results."),
    ] = None,
) -> None:
    """Measure on a CUDA device what is claimed of speed and exactness, and keep it.

    A report (.md) and plots (.svg) lie beside the JSON.
    """
    if device.startswith("cuda") and not torch.cuda.is_available():
        print("skipped: no CUDA device here, nothing was measured")
        return
    if prompts is None:
        raise typer.BadParameter("name a file of prompts", param_hint="--prompts")
    for name in filter(None, (model, drafts.draft_model)):
        if missing := missing_files(name):
            raise ModelLoadError(
                f"{name} lacks {', '.join(missing)}: bring them to that folder first"
            )
    check_drafts(drafts)
    others = [] if warm is None else read_prompts(warm)
    widths = list(dict.fromkeys(parallel or PARALLEL))
    options = BenchOptions(
        max_new_tokens, repeat, others, warm_limit, widths=widths, is_judged=True
    )
    plan = Plan(model, device, read_prompts(prompts, limit), drafts, options, rounds)
    path = output or _default_output(torch.device(device))
    result = measure(plan, only or list(Part), path, add=add)
    print(path)
    if _has_wrong_outputs(result):
        raise typer.Exit(1)


def _has_wrong_outputs(result: dict[str, Any]) -> bool:
    """Return whether an output of ours is not that of `model.generate`, and no tie explains it."""
    exact = result.get(Part.EXACTNESS, {})
    together = wrong_outputs({"exactness": exact.get("parallel")})
    return bool(together) or not all(each["is_tie"] for each in exact.get("different", []))


def _default_output(device: torch.device) -> Path:
    name = re.sub(r"[^a-z0-9]+", "-", device_name(device).lower()).strip("-")
    return RESULTS / f"{datetime.now(UTC).date().isoformat()}-{name}.json"


def main() -> None:
    """Run the command; what goes wrong is said in one line."""
    try:
        typer.run(command)
    except (DecoderError, IndexerError, RetrieverError, OtherRunError, OSError) as error:
        sys.exit(f"error: {error}")
