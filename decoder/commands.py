"""The commands: generate an answer, or measure against transformers' own decoding."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from decoder.assembly import DrafterOptions, assemble, own_rule
from decoder.bench import run_benchmark
from decoder.errors import DecoderError
from decoder.generate import answer
from decoder.loop import DEFAULT_MAX_NEW_TOKENS
from decoder.models import Attention, ModelOptions, Precision, prepare_model
from decoder.prompts import checked_text, read_prompts, read_text
from decoder.sampling.grammar import check_regex
from decoder.sampling.options import (
    FrequencyPenalty,
    MinP,
    PresencePenalty,
    Regex,
    RepetitionPenalty,
    Seed,
    Temperature,
    TopK,
    TopP,
)
from decoder.sampling.settings import SamplingSettings
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
_HEADINGS = ("prompts", "tokens/s", "x plain", "x lookup", "tokens", "lookup", "equal")
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
    temperature: Temperature = 0.0,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    presence_penalty: PresencePenalty = None,
    frequency_penalty: FrequencyPenalty = None,
    seed: Seed = None,
    regex: Regex = None,
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
    as_json: AsJson = False,
) -> None:
    """Answer one prompt; the text streams to standard output, figures go to standard error."""
    drafter_options = DrafterOptions(index or (), server or (), phrases or ())
    drafter_options.check()
    settings = SamplingSettings(
        temperature,
        top_k,
        top_p,
        min_p,
        repetition_penalty,
        presence_penalty,
        frequency_penalty,
        seed,
    )
    if regex is not None:
        check_regex(regex)
    text = checked_text(read_text(sys.stdin.buffer) if prompt is None else prompt)
    prepared = prepare_model(_model_options(model, device, dtype, attention, no_chat_template))
    drafter_options.check(prepared.vocabulary)
    prepared.check_prompt(text)
    language_model = prepared.load()
    rule = own_rule(language_model, settings, regex)
    with drafter_options.connect(language_model) as drafter:
        result = answer(
            assemble(language_model, drafter, rule),
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
    max_new_tokens: MaxNewTokens = DEFAULT_MAX_NEW_TOKENS,
    dtype: Dtype = Precision.FLOAT32,
    device: Device = "cpu",
    attention: AttentionKind = Attention.SDPA,
    no_chat_template: NoChatTemplate = False,
    as_json: AsJson = False,
) -> None:
    """Measure against plain generation and prompt lookup, on the same prompts in one run."""
    drafter_options = DrafterOptions(index or (), server or (), phrases or ())
    drafter_options.check()
    selected = read_prompts(prompts, limit)
    prepared = prepare_model(_model_options(model, device, dtype, attention, no_chat_template))
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
