"""The commands: serve drafts, show settings, replay outputs, explain a draft, export an index.

What the larger ones do is imported when they do it, so that their help comes at once.
"""

from pathlib import Path
from typing import Annotated, Final

import typer

from indexer.flags import AsJson, Given, command_line, with_flags
from indexer.tokenizer import DEFAULT_MODEL
from retriever.commands.config_command import ConfigFile
from retriever.commands.options import ExportForm, clear_errors
from retriever.exports.sglang_corpus import DEFAULT_MAX_TOKENS
from retriever.limits import DEFAULT_DOCUMENTS, MAX_DOCUMENTS, Limits
from retriever.operations.settings import DraftSettings, Settings, TokenizerSettings

_MAX_BUDGET: Final = Limits().max_budget_nodes


@clear_errors()
@with_flags
def serve(config: ConfigFile = None, *, flags: Given[Settings]) -> None:
    """Serve drafts over gRPC until interrupted.

    Prints `serving on ADDRESS` once it is ready. Where other machines reach the address, it takes
    --certificate and --key, and --access or --client-ca. Each flag can be set in the file of
    --config, too, and in the environment (FOREDRAFT_ADDRESS for --address); `config` shows what is
    in force.
    """
    from retriever.commands.serve_command import serve_drafts  # noqa: PLC0415  (loads numba)

    serve_drafts(config, flags)


@clear_errors()
@with_flags
def replay(
    traces: Annotated[
        Path,
        typer.Argument(
            metavar="TRACES",
            help="Conversations, of which each turn of the assistant is replayed: .jsonl (.gz "
            "too), .json, .csv or .parquet with `messages`, `conversations`, `prompt` and "
            "`output`, `request` and `response` and the like; or `prompt_ids` and `output_ids`.",
        ),
    ],
    *,
    source: DraftSettings,
    texts: TokenizerSettings,
    warm: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Outputs that count as recent generations: files as TRACES. Repeatable.",
            rich_help_panel="Drafts",
        ),
    ] = None,
    drafter: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Whose rule drafts: our own, prompt-lookup, in a checkout a rule of "
            "benchmarks/papers, or MODULE:NAME of a factory in a module's mapping DRAFTERS.",
            rich_help_panel="Drafts",
        ),
    ] = "foredraft",
    budget: Annotated[
        int,
        typer.Option(
            min=0,
            max=_MAX_BUDGET,
            help=f"Nodes in each draft tree, at most {_MAX_BUDGET}.",
            rich_help_panel="Drafts",
        ),
    ] = 32,
    lanes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Replay the traces of a group together, so many at once, step by step: records "
            "that state the same `group`; of these, those that state the same `lane` follow one "
            "another. Our own drafter drafts for each from the others. Without it, traces follow "
            "one another as they are read.",
            rich_help_panel="Drafts",
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Replay only the first traces.", rich_help_panel="Report"),
    ] = None,
    calibration: Annotated[
        bool,
        typer.Option(
            help="Report too how often nodes of each probability were accepted.",
            rich_help_panel="Report",
        ),
    ] = False,
    calibration_after: Annotated[
        int,
        typer.Option(
            min=0,
            help="With --calibration: leave out the first so many traces.",
            rich_help_panel="Report",
        ),
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Replay recorded outputs and report how many tokens each decoding step would have committed.

    No model is run: a draft changes no output, so what would have been accepted is known. Our own
    drafter also drafts from what a record says that its output was expected to contain: a
    `prediction`, as a text or as OpenAI's API takes it, or a list of `predictions`. What of
    TRACES cannot be read is skipped, and standard error says how much, where and why.
    """
    from retriever.commands.replay_command import replay_traces  # noqa: PLC0415  (loads numba)

    replay_traces(
        traces,
        source,
        texts,
        warm or [],
        drafter,
        budget,
        lanes,
        limit,
        calibration_after if calibration else None,
        as_json=as_json,
    )


@clear_errors()
@with_flags
def explain(
    *,
    source: DraftSettings,
    texts: TokenizerSettings,
    context: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="What comes before the draft, as text.", rich_help_panel="Context"
        ),
    ] = None,
    context_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The same, in a file of UTF-8.", rich_help_panel="Context"
        ),
    ] = None,
    context_ids: Annotated[
        str | None,
        typer.Option(
            metavar="IDS", help="The same, as token ids: 12,7,401.", rich_help_panel="Context"
        ),
    ] = None,
    prediction: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="A text that is expected to follow, in UTF-8: drafts come from it, too. "
            "Repeatable.",
            rich_help_panel="Context",
        ),
    ] = None,
    budget: Annotated[
        int,
        typer.Option(
            min=0,
            max=_MAX_BUDGET,
            help="Nodes in the tree.",
            rich_help_panel="Context",
        ),
    ] = 32,
    documents: Annotated[
        int,
        typer.Option(
            min=0,
            max=MAX_DOCUMENTS,
            help="Most documents to name for a node.",
            rich_help_panel="Output",
        ),
    ] = DEFAULT_DOCUMENTS,
    full: Annotated[
        bool,
        typer.Option("--full", help="Show the whole tree, node by node.", rich_help_panel="Output"),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the draft for a context, and where it comes from.

    First come the paths that bring most tokens, as text, with their databases and the documents
    that they stand in, licences included. With --full each token is shown by itself: its database,
    after how many equal tokens, how often and where it was found.
    """
    from retriever.commands.explain_command import explain_draft  # noqa: PLC0415  (loads numba)

    explain_draft(
        source,
        texts,
        context,
        context_file,
        context_ids,
        prediction or [],
        budget,
        documents,
        full=full,
        as_json=as_json,
    )


@clear_errors()
def export(
    index: Annotated[Path, typer.Argument(metavar="INDEX", help="The index.")],
    *,
    to: Annotated[
        ExportForm,
        typer.Option(
            help="sglang-corpus: texts for SGLang's own NGRAM, by its endpoint "
            "/add_external_corpus or at its start. exllamav3: its frozen automaton, for "
            "--ngram_corpus."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where it goes.")],
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="The tokenizer that the index was built with: a hub id, a folder or a .gguf "
            "file; for exllamav3 the folder of the model that it runs. "
            f"Default: {DEFAULT_MODEL}.",
        ),
    ] = None,
    max_tokens: Annotated[
        int,
        typer.Option(
            min=1,
            help="Write no more; SGLang's own limit is "
            "--speculative-ngram-external-corpus-max-tokens, for all its corpora together.",
        ),
    ] = DEFAULT_MAX_TOKENS,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a file that is there.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write an index as a corpus that an engine drafts from by itself, without this project.

    Documents are written in order, up to the first that has no room.
    """
    from retriever.commands.export_command import write_corpus  # noqa: PLC0415  (loads numba)

    write_corpus(index, to, output, tokenizer, max_tokens, overwrite=overwrite, as_json=as_json)


app = command_line(
    "Serve draft trees from indexes, replay recorded outputs through a drafter, explain a "
    "draft, or export an index.",
    {
        "serve": serve,
        "config": "retriever.commands.config_command:show_settings",
        "replay": replay,
        "explain": explain,
        "health": "retriever.commands.health_command:health",
        "info": "retriever.commands.info_command:info",
        "proto": "retriever.commands.proto_command:proto",
        "export": export,
        "access": "retriever.commands.access_command:app",
        "admin": "retriever.commands.admin_command:app",
    },
)


def main() -> None:
    """Run the command line; an error of ours ends it with one line on stderr and status 1."""
    app(prog_name="foredraft")
