"""The command that measures against decoding without drafts."""

import json
from functools import partial

import typer
from rich.console import Console
from rich.progress import Progress

from decoder.assembly import DrafterSettings, assemble
from decoder.budget.cost_store import store_at
from decoder.commands.answers import FORESEEN
from decoder.commands.bench import BenchOptions, run_benchmark
from decoder.commands.bench_report import table_of
from decoder.commands.options import MeasuredOutput, MeasuredPrompts, ModelSettings
from decoder.commands.prompts import read_prompts
from decoder.commands.trace_command import print_table
from decoder.model.pretrained import prepare_model
from indexer.flags import AsJson, with_flags
from indexer.launch import errors_in_one_line
from indexer.sources.recordings import RecordingTally


@errors_in_one_line(*FORESEEN)
@with_flags
def run_bench(
    *,
    given: MeasuredPrompts,
    chosen: ModelSettings,
    drafts: DrafterSettings,
    output: MeasuredOutput,
    as_json: AsJson = False,
) -> None:
    """Measure against plain generation and prompt lookup, on the same prompts in one run."""
    drafts.check()
    found = RecordingTally()
    selected = read_prompts(given.prompts, given.limit, given.per_category, found)
    others = [] if given.warm is None else read_prompts(given.warm, skipped=found)
    for line in found.describe():
        typer.echo(line, err=True)
    options = BenchOptions(output.max_new_tokens, output.repeat, others, given.warm_limit)
    prepared = prepare_model(chosen.options(given, drafts.index))
    drafts.check(prepared.vocabulary)
    language_model = prepared.load()
    progress = Progress(console=Console(stderr=True))
    with drafts.connect(language_model) as drafter, progress:
        report = run_benchmark(
            language_model,
            assemble(language_model, drafter, costs=store_at(chosen.cost_cache)),
            selected,
            options,
            partial(progress.track, description="prompts"),
        )
    report["drafter"] = drafts.describe()
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        print_table(table_of(report))
