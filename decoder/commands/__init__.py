"""The commands: generate answers, read traces, measure, or estimate from recorded outputs.

What they do is imported when they do it, so that their help comes at once.
"""

from pathlib import Path
from typing import Annotated

import typer

from decoder.commands.options import (
    AnsweredPrompts,
    ChatSettings,
    ChoiceSettings,
    ContestOptions,
    CostSettings,
    EstimatedDrafts,
    GainSettings,
    LogSettings,
    MeasuredOutput,
    MeasuredPrompts,
    ModelChoice,
    ModelSettings,
    ShownSettings,
    TaughtTexts,
    TrainingSettings,
)
from decoder.drafters.options import DraftOptions
from decoder.errors import DecoderError
from indexer.errors import IndexerError
from indexer.flags import AsJson, CommandLine, with_flags
from indexer.launch import errors_in_one_line
from retriever.errors import RetrieverError

app = CommandLine("Decode with a model and drafts, or measure against transformers' own decoding.")


@app.command("generate")
@with_flags
def run_generate(
    *,
    chosen: ModelSettings,
    drafts: DraftOptions,
    given: AnsweredPrompts,
    output: ShownSettings,
    choice: ChoiceSettings,
    as_json: AsJson = False,
) -> None:
    """Answer a prompt, or each of a file; text goes to standard output, figures to standard error.

    The text of one prompt streams. Those of a file are blocks, or (--json) an object a line, as
    each is done; a prompt that fails is reported, the others go on, and the status is 1.
    """
    from decoder.commands.generate_command import answer_prompts  # noqa: PLC0415  (loads torch)

    answer_prompts(chosen, drafts, given, output, choice, as_json=as_json)


@app.command("chat")
@with_flags
def run_chat(
    *,
    chosen: ModelSettings,
    drafts: DraftOptions,
    output: ChatSettings,
    choice: ChoiceSettings,
) -> None:
    """Talk with a model: answers stream in the colours of the sources that drafted them.

    Earlier answers are drafted from. Ctrl-C ends an answer, Ctrl-D or /exit the conversation, and
    /clear begins a new one. Without a terminal each line of standard input is a message, and each
    answer goes to standard output.
    """
    from decoder.commands.chat_command import hold_conversation  # noqa: PLC0415  (loads torch)

    hold_conversation(chosen, drafts, output, choice)


def _list_contenders(value: bool) -> None:
    """Print all contenders and end."""
    if value:
        from decoder.commands.bench_command import list_contenders  # noqa: PLC0415  (loads torch)

        list_contenders()
        raise typer.Exit


@app.command("bench")
@with_flags
def run_bench(
    *,
    given: MeasuredPrompts,
    contest: ContestOptions,
    chosen: ModelSettings,
    drafts: DraftOptions,
    output: MeasuredOutput,
    as_json: AsJson = False,
    contenders: Annotated[  # noqa: ARG001  its callback answers
        bool,
        typer.Option(
            "--contenders",
            help="List the contenders that have names, and end: in a checkout published rules too.",
            is_eager=True,
            callback=_list_contenders,
            rich_help_panel="Contenders",
        ),
    ] = False,
) -> None:
    """Measure against plain generation, prompt lookup and published rules, in one run.

    With --parallel, by how many prompts share the passes; in float32 every output is compared with
    that of its prompt alone then, and the status is 1 if one of ours is wrong. Ctrl-C ends it with
    a report of what was measured until then.
    """
    from decoder.commands.bench_command import measure  # noqa: PLC0415  (loads torch)

    measure(given, contest, chosen, drafts, output, as_json=as_json)


@app.command("train")
@with_flags
def run_train(
    *,
    chosen: ModelChoice,
    texts: TaughtTexts,
    given: TrainingSettings,
    compared: GainSettings,
    as_json: AsJson = False,
) -> None:
    """Have a model teach a speculator: a small head that drafts from the model's own states.

    The model answers the prompts itself and its states are recorded; then a
    head of EAGLE-3's layout is trained on them, and judged on prompts that it
    was not taught: what it predicts, what it adds to fused drafts, and what a
    draft costs. Draft with it by --speculator.

    It drafts for this model and its revision alone, and best for texts like
    those that it was taught. An interrupted training goes on where it was.
    """
    from decoder.commands.train_command import teach  # noqa: PLC0415  (loads torch)

    teach(chosen, texts, given, compared, as_json=as_json)


@app.command("estimate")
@with_flags
def run_estimate(
    log: Annotated[
        Path,
        typer.Argument(
            metavar="LOG",
            help="Recorded traffic, of which each turn of the assistant is an output: .jsonl (.gz "
            "too), .json, .csv or .parquet with `messages`, `conversations`, `prompt` and "
            "`output`, `request` and `response` and the like; or `prompt_ids` and `output_ids`.",
        ),
    ],
    *,
    chosen: LogSettings,
    drafts: EstimatedDrafts,
    costs: CostSettings,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw it, too (.png or .svg).", rich_help_panel="Output"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say from recorded prompts and outputs whether drafts would help, and how much.

    The log is replayed without a model: a draft changes no output, so the
    tokens that each pass would have brought are known. Each record drafts
    from its own prompt and from the outputs before it, as in service. Prompt
    lookup is replayed next to it, or what --drafter names.

    Time follows from what a pass costs by the nodes that it verifies, and from
    how long drafting takes here. Measure passes with --model where you would
    run it. By default they are those of an 8B model on one H100, computed from
    its data sheet.

    What of the log cannot be read is skipped, and standard error says how much,
    where and why. The last line is the answer. The status is 0 whatever it is.
    """
    from decoder.commands.estimate_command import estimate  # noqa: PLC0415  (loads torch)

    estimate(log, chosen, drafts, costs, plot, is_json=as_json)


@app.command("trace")
def run_trace(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="What `generate --trace` wrote (.gz too).")
    ],
    *,
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="PAGE",
            help="Write a page for a browser instead: the text by source, and each pass's tree.",
            rich_help_panel="Output",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the passes of a trace and what they come to; --json gives the totals alone.

    A trace that was cut in the middle of a line is shown as far as it goes.
    """
    from decoder.commands.trace_command import show_trace  # noqa: PLC0415  (loads numba)

    show_trace(file, html, as_json=as_json)


def main() -> None:
    """Run the command line; errors are printed in one line."""
    with errors_in_one_line(DecoderError, RetrieverError, IndexerError, MemoryError):
        app(prog_name="foredraft")
