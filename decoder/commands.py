"""The commands: generate an answer, or measure against transformers' own decoding."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from decoder.assembly import DrafterOptions, accept_rule, assemble
from decoder.bench import BenchOptions, run_benchmark
from decoder.bench_table import table_of
from decoder.budget.store import store_at
from decoder.errors import DecoderError
from decoder.generate import answer
from decoder.loop import DEFAULT_MAX_NEW_TOKENS
from decoder.models import Attention, ModelOptions, Precision, prepare_model
from decoder.prompts import checked_text, read_prompts, read_text
from indexer.errors import IndexerError
from indexer.tokenizer import DEFAULT_MODEL
from retriever.errors import RetrieverError
from retriever.options import Indexes, Phrases, Servers

app = typer.Typer(
    help="Decode with a model and drafts, or measure against transformers' own decoding.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ModelName = Annotated[
    str,
    typer.Option("--model", metavar="MODEL", help="The model: a hub id, a folder or a .gguf file."),
]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Most tokens to generate.")]
Dtype = Annotated[Precision, typer.Option(help="What the model computes in.")]
Device = Annotated[
    str, typer.Option(metavar="DEVICE", help="Where the model runs, such as cpu or cuda:0.")
]
AttentionKind = Annotated[
    Attention, typer.Option("--attention", help="Implementation of attention.")
]
NoChatTemplate = Annotated[
    bool, typer.Option("--no-chat-template", help="Take prompts as plain text to go on from.")
]
CostCache = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="Where measured costs of passes are kept for the next start, none to measure always. "
        "Default: FOREDRAFT_CACHE, or the user's directory for caches.",
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print the report as JSON, on standard output.")
]


@app.command()
def generate(
    *,
    model: ModelName = DEFAULT_MODEL,
    index: Indexes = None,
    server: Servers = None,
    phrases: Phrases = None,
    prompt: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="The prompt. Default: standard input, to its end."),
    ] = None,
    max_new_tokens: MaxNewTokens = DEFAULT_MAX_NEW_TOKENS,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 decodes greedily.")] = 0.0,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0, max=2**64 - 1, help="Makes sampling repeatable; no effect at temperature 0."
        ),
    ] = None,
    forget: Annotated[
        bool,
        typer.Option(
            "--forget",
            help="With --server: keep the answer out of the service's later drafts. Without it, "
            "nothing outlives this command anyway.",
        ),
    ] = False,
    dtype: Dtype = Precision.FLOAT32,
    device: Device = "cpu",
    attention: AttentionKind = Attention.SDPA,
    no_chat_template: NoChatTemplate = False,
    cost_cache: CostCache = None,
    as_json: AsJson = False,
) -> None:
    """Answer one prompt; the text streams to standard output, figures go to standard error."""
    drafter_options = DrafterOptions(index or (), server or (), phrases or ())
    drafter_options.check()
    text = checked_text(read_text(sys.stdin.buffer) if prompt is None else prompt)
    prepared = prepare_model(_model_options(model, device, dtype, attention, no_chat_template))
    drafter_options.check(prepared.vocabulary)
    prepared.check_prompt(text)
    language_model = prepared.load()
    rule = accept_rule(temperature, seed)
    with drafter_options.connect(language_model) as drafter:
        result = answer(
            assemble(language_model, drafter, rule, costs=store_at(cost_cache)),
            language_model,
            text,
            max_new_tokens=max_new_tokens,
            remember=not forget,
            on_text=(lambda _: None) if as_json else _print_piece,
        )
    typer.echo(json.dumps(result.report()) if as_json else "")
    typer.echo(result.statistics.summary(), err=True)


@app.command()
def bench(
    *,
    prompts: Annotated[
        Path,
        typer.Option(metavar="FILE", help="Spec-Bench's questions (.gz too), or a prompt a line."),
    ],
    model: ModelName = DEFAULT_MODEL,
    index: Indexes = None,
    server: Servers = None,
    phrases: Phrases = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Most prompts, spread evenly over categories.")
    ] = None,
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
    drafter_options = DrafterOptions(index or (), server or (), phrases or ())
    drafter_options.check()
    selected = read_prompts(prompts, limit, per_category)
    others = [] if warm is None else read_prompts(warm)
    options = BenchOptions(max_new_tokens, repeat, others, warm_limit)
    prepared = prepare_model(_model_options(model, device, dtype, attention, no_chat_template))
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
        Console().print(table_of(report))


def main() -> None:
    """Run the command line; what goes wrong is said in one line."""
    try:
        app(prog_name="python -m decoder")
    except (DecoderError, RetrieverError, IndexerError) as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)


def _model_options(
    name: str, device: str, precision: Precision, attention: Attention, no_chat_template: bool
) -> ModelOptions:
    return ModelOptions(name, device, precision, attention, not no_chat_template)


def _print_piece(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
