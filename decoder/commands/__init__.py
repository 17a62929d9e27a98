"""The commands: generate answers, read traces, or measure against transformers' own decoding."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from decoder.assembly import DrafterOptions, assemble, draft_model_options
from decoder.budget.cost_store import store_at
from decoder.commands.answers import FORESEEN
from decoder.commands.bench import BenchOptions, run_benchmark
from decoder.commands.bench_report import table_of
from decoder.commands.generate_command import run_generate
from decoder.commands.options import (
    AsJson,
    AttentionKind,
    CostCache,
    Device,
    DraftModel,
    DraftVocabulary,
    Dtype,
    GroupedCommand,
    Limit,
    MaxNewTokens,
    ModelName,
    NoChatTemplate,
    PromptFile,
    Recycle,
    model_options,
)
from decoder.commands.prompts import read_prompts
from decoder.commands.trace_command import print_table, run_trace
from decoder.loop import DEFAULT_MAX_NEW_TOKENS
from decoder.model.pretrained import Attention, Precision, prepare_model
from indexer.tokenizer import DEFAULT_MODEL
from retriever.commands.options import CredentialsFile, Indexes, Phrases, Servers, credentials_of

app = typer.Typer(
    help="Decode with a model and drafts, or measure against transformers' own decoding.",
    no_args_is_help=True,
    epilog="--version, in place of a command, prints the version.",
    add_completion=False,
    pretty_exceptions_enable=False,
)


app.command("generate", cls=GroupedCommand)(run_generate)
app.command("trace")(run_trace)


@app.command(cls=GroupedCommand)
def bench(
    *,
    prompts: PromptFile,
    model: ModelName = DEFAULT_MODEL,
    index: Indexes = None,
    server: Servers = None,
    credentials: CredentialsFile = None,
    phrases: Phrases = None,
    draft_model: DraftModel = None,
    draft_vocabulary: DraftVocabulary = None,
    recycle: Recycle = True,
    limit: Limit = None,
    per_category: Annotated[
        int | None, typer.Option(min=1, help="Most prompts of each category.")
    ] = None,
    warm: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Prompts to answer beforehand, so that there are answers to draft from. Those "
            "that are measured are left out.",
        ),
    ] = None,
    warm_limit: Annotated[
        int | None, typer.Option(min=1, help="With --warm: most prompts of it.")
    ] = None,
    repeat: Annotated[
        int, typer.Option(min=1, help="Runs of each prompt, the fastest of which counts.")
    ] = 1,
    max_new_tokens: MaxNewTokens = DEFAULT_MAX_NEW_TOKENS,
    dtype: Dtype = Precision.FLOAT32,
    device: Device = "cpu",
    attention: AttentionKind = Attention.SDPA,
    no_chat_template: NoChatTemplate = False,
    cost_cache: CostCache = None,
    as_json: AsJson = False,
) -> None:
    """Measure against plain generation and prompt lookup, on the same prompts in one run."""
    modelled = draft_model_options(draft_model, draft_vocabulary)
    drafter_options = DrafterOptions(
        index or (), server or (), phrases or (), modelled, recycle, credentials_of(credentials)
    )
    drafter_options.check()
    selected = read_prompts(prompts, limit, per_category)
    others = [] if warm is None else read_prompts(warm)
    options = BenchOptions(max_new_tokens, repeat, others, warm_limit)
    prepared = prepare_model(
        model_options(model, device, dtype, attention, no_chat_template=no_chat_template)
    )
    drafter_options.check(prepared.vocabulary)
    language_model = prepared.load()
    progress = Progress(console=Console(stderr=True))
    with drafter_options.connect(language_model) as drafter, progress:
        report = run_benchmark(
            language_model,
            assemble(language_model, drafter, costs=store_at(cost_cache)),
            selected,
            options,
            partial(progress.track, description="prompts"),
        )
    report["drafter"] = drafter_options.describe()
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        print_table(table_of(report))


def main() -> None:
    """Run the command line; what goes wrong is said in one line."""
    try:
        app(prog_name="foredraft")
    except FORESEEN as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)
