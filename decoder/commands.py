"""The commands: generate answers, read traces, or measure against transformers' own decoding."""

import json
import sys
from functools import partial
from typing import Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from decoder.answers import FORESEEN
from decoder.assembly import DrafterOptions, assemble, draft_model_options
from decoder.bench import run_benchmark
from decoder.generate_command import generate_command
from decoder.loop import DEFAULT_MAX_NEW_TOKENS
from decoder.models import Attention, Precision, prepare_model
from decoder.options import (
    AsJson,
    AttentionKind,
    Device,
    DraftModel,
    DraftVocabulary,
    Dtype,
    Limit,
    MaxNewTokens,
    ModelName,
    NoChatTemplate,
    PromptFile,
    model_options,
)
from decoder.prompts import read_prompts
from decoder.trace_command import trace_command
from indexer.tokenizer import DEFAULT_MODEL
from retriever.options import Indexes, Phrases, Servers

app = typer.Typer(
    help="Decode with a model and drafts, or measure against transformers' own decoding.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_HEADINGS = ("prompts", "tokens/s", "x plain", "x lookup", "tokens", "lookup", "equal")

app.command("generate")(generate_command)
app.command("trace")(trace_command)


@app.command()
def bench(
    *,
    prompts: PromptFile,
    model: ModelName = DEFAULT_MODEL,
    index: Indexes = None,
    server: Servers = None,
    phrases: Phrases = None,
    draft_model: DraftModel = None,
    draft_vocabulary: DraftVocabulary = None,
    limit: Limit = None,
    max_new_tokens: MaxNewTokens = DEFAULT_MAX_NEW_TOKENS,
    dtype: Dtype = Precision.FLOAT32,
    device: Device = "cpu",
    attention: AttentionKind = Attention.SDPA,
    no_chat_template: NoChatTemplate = False,
    as_json: AsJson = False,
) -> None:
    """Measure against plain generation and prompt lookup, on the same prompts in one run."""
    modelled = draft_model_options(draft_model, draft_vocabulary)
    drafter_options = DrafterOptions(index or (), server or (), phrases or (), modelled)
    drafter_options.check()
    selected = read_prompts(prompts, limit)
    options = model_options(model, device, dtype, attention, no_chat_template=no_chat_template)
    prepared = prepare_model(options)
    drafter_options.check(prepared.vocabulary)
    language_model = prepared.load()
    progress = Progress(console=Console(stderr=True))
    with drafter_options.connect(language_model) as drafter, progress:
        report = run_benchmark(
            language_model,
            assemble(language_model, drafter),
            selected,
            max_new_tokens=max_new_tokens,
            track=partial(progress.track, description="prompts"),
        )
    report["drafter"] = drafter_options.describe()
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        _print_table(report)


def main() -> None:
    """Run the command line; what goes wrong is said in one line."""
    try:
        app(prog_name="python -m decoder")
    except FORESEEN as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)


def _print_table(report: dict[str, Any]) -> None:
    title = f"{report['model']}, {report['dtype']} on {report['device']}; {report['drafter']}"
    caption = "x: in time per token; tokens: per pass of the model; lookup: prompt lookup"
    if report["skipped"]:
        caption += f"\nprompts skipped, as the model cannot take them: {report['skipped']}"
    table = Table(title=title, caption=caption, box=SIMPLE_HEAD)
    table.add_column("category", no_wrap=True)
    for heading in _HEADINGS:
        table.add_column(heading, justify="right")
    for name, figures in [*report["categories"].items(), ("overall", report["overall"])]:
        table.add_row(name, *_cells(figures))
    Console().print(table)


def _cells(figures: dict[str, Any]) -> list[str]:
    return [
        str(figures["num_prompts"]),
        f"{figures['tokens_per_second']['foredraft']:.1f}",
        f"{figures['speedup_over_plain']:.2f}",
        f"{figures['speedup_over_prompt_lookup']:.2f}",
        f"{figures['mean_accepted_tokens']:.2f}",
        f"{figures['prompt_lookup_mean_accepted_tokens']:.2f}",
        f"{figures['identical']}/{figures['num_prompts']}",
    ]
