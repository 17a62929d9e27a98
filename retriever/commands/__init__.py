"""The commands: serve drafts, show settings, replay outputs, explain a draft, export an index."""

import json
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from indexer.reader import Index
from indexer.tokenizer import DEFAULT_MODEL
from retriever.commands.access_command import app as access_app
from retriever.commands.explain_command import explain
from retriever.commands.export_command import export
from retriever.commands.health_command import health
from retriever.commands.options import (
    CredentialsFile,
    Indexes,
    Phrases,
    Servers,
    clear_errors,
    credentials_of,
    listed_phrases,
    progress,
)
from retriever.commands.serve_command import serve, show_settings
from retriever.errors import InvalidRequestError
from retriever.replay.factories import OWN, find_factory, own_drafter, remote_drafter
from retriever.replay.replay import ReplayReport, replay, tables
from retriever.replay.traces import ChatEncoder, read_outputs, read_traces
from retriever.sessions.options import DEFAULT_LIMITS, check_files

app = typer.Typer(
    help="Serve draft trees from indexes, replay recorded outputs through a drafter, explain a "
    "draft, or export an index.",
    no_args_is_help=True,
    epilog="--version, in place of a command, prints the version.",
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.command()(serve)
app.command("config")(show_settings)
app.command()(explain)
app.command()(health)
app.command()(export)
app.add_typer(access_app, name="access")


@app.command("replay")
def replay_traces(
    traces: Annotated[
        Path,
        typer.Argument(
            metavar="TRACES",
            help="JSON lines (.gz too): `prompt` and `output`, or `prompt_ids` and `output_ids`.",
        ),
    ],
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="The tokenizer of texts: a hub id, a folder or a .gguf file. "
            f"Default: {DEFAULT_MODEL}.",
        ),
    ] = None,
    index: Indexes = None,
    phrases: Phrases = None,
    warm: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Outputs that count as recent generations: files as TRACES. Repeatable.",
        ),
    ] = None,
    server: Servers = None,
    credentials: CredentialsFile = None,
    drafter: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="Whose rule drafts: our own, or a name that --drafters knows."
        ),
    ] = OWN,
    drafters: Annotated[
        str,
        typer.Option(
            metavar="MODULE", help="Module with a mapping DRAFTERS of names to factories."
        ),
    ] = "benchmarks.peers",
    budget: Annotated[
        int,
        typer.Option(
            min=0,
            max=DEFAULT_LIMITS.max_budget_nodes,
            help=f"Nodes in each draft tree, at most {DEFAULT_LIMITS.max_budget_nodes}.",
        ),
    ] = 32,
    limit: Annotated[int | None, typer.Option(min=1, help="Replay only the first traces.")] = None,
    calibration: Annotated[
        bool, typer.Option(help="Report too how often nodes of each probability were accepted.")
    ] = False,
    calibration_after: Annotated[
        int, typer.Option(min=0, help="With --calibration: leave out the first so many traces.")
    ] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report as JSON, on standard output.")
    ] = False,
) -> None:
    """Replay recorded outputs and report how many tokens each decoding step would have committed.

    No model is run: a draft changes no output, so what would have been accepted is known.
    """
    with clear_errors():
        make_drafter = find_factory(drafter, drafters)
        if phrases and drafter != OWN:
            raise InvalidRequestError("--phrases are for our own drafter: leave out --drafter")
        if server and (index or phrases or drafter != OWN):
            raise InvalidRequestError(
                "--server drafts by itself: leave out --index, --phrases and --drafter"
            )
        encoder = ChatEncoder(tokenizer)
        check_files(index or [], phrases or [])
        read = read_traces(traces, encoder, limit)
        warming = [read_outputs(path, encoder) for path in warm or []]
        recorded = list(progress(read, "tokenising"))
        outputs = list(chain.from_iterable(warming))
        if server:
            make_drafter = partial(
                remote_drafter,
                server,
                vocabulary=encoder.vocabulary,
                credentials=credentials_of(credentials),
            )
        elif drafter == OWN:
            listed = listed_phrases(phrases, encoder, index)
            make_drafter = partial(own_drafter, vocabulary=encoder.vocabulary, phrases=listed)
        indexes = [Index.open(path, vocabulary=encoder.vocabulary) for path in index or []]
        made = make_drafter(indexes, outputs, budget)
        after = calibration_after if calibration else None
        report = replay(made, progress(recorded, "replaying"), budget, after)
        _print(report, as_json=as_json)


def main() -> None:
    """Run the command line; an error of ours ends it with one line on stderr and status 1."""
    app(prog_name="foredraft")


def _print(report: ReplayReport, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(report.as_json()))
    else:
        Console().print(*tables(report))
