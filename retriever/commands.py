"""The commands: serve drafts, or replay recorded outputs."""

import asyncio
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from indexer.errors import IndexerError
from indexer.reader import Index
from retriever.embedded import DEFAULT_LIMITS, EmbeddedDrafter
from retriever.encoding import ChatEncoder
from retriever.errors import RetrieverError
from retriever.factories import OWN, find_factory
from retriever.replay import ReplayReport, replay
from retriever.server import serve as serve_forever
from retriever.traces import Trace, read_outputs, read_traces

app = typer.Typer(
    help="Serve draft trees from indexes, or replay recorded outputs through a drafter.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

Indexes = Annotated[
    list[Path] | None,
    typer.Option(
        "--index", help="An index to draft from, as `python -m indexer build` made it. Repeatable."
    ),
]


@app.command()
def serve(
    index: Indexes = None,
    address: Annotated[
        str, typer.Option(help="Where to listen: HOST:PORT (port 0: a free one) or unix:/PATH.")
    ] = "127.0.0.1:50051",
    generations_tokens: Annotated[
        int, typer.Option(min=1024, help="Recent outputs to keep, in tokens (28 bytes each).")
    ] = DEFAULT_LIMITS.generations_tokens,
) -> None:
    """Serve drafts over gRPC until interrupted.

    Prints `serving on ADDRESS` once it is ready. There is no authentication yet: listen on
    loopback or a unix socket.
    """
    limits = replace(DEFAULT_LIMITS, generations_tokens=generations_tokens)
    with _clear_errors():
        drafter = EmbeddedDrafter.open_indexes(index or [], limits=limits)
        asyncio.run(serve_forever(drafter, address))


@app.command("replay")
def replay_traces(
    traces: Annotated[
        Path,
        typer.Argument(
            help="JSON lines (.gz too): `prompt` and `output`, or `prompt_ids` and `output_ids`."
        ),
    ],
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Tokenizer for text: hub id, directory or .gguf file. Default: SmolLM2's."
        ),
    ] = None,
    index: Indexes = None,
    warm: Annotated[
        list[Path] | None,
        typer.Option(help="Outputs that count as recent generations: files as TRACES. Repeatable."),
    ] = None,
    drafter: Annotated[
        str, typer.Option(help="Whose rule drafts: our own, or a name that --drafters knows.")
    ] = OWN,
    drafters: Annotated[
        str, typer.Option(help="Module with a mapping DRAFTERS of names to factories.")
    ] = "benchmarks.peers",
    budget: Annotated[int, typer.Option(min=0, help="Nodes in each draft tree.")] = 32,
    limit: Annotated[int | None, typer.Option(min=1, help="Replay only the first traces.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Replay recorded outputs and report how many tokens each decoding step would have committed.

    No model is run: a draft changes no output, so what would have been accepted is known.
    """
    with _clear_errors():
        make_drafter = find_factory(drafter, drafters)
        encoder = ChatEncoder(tokenizer)
        recorded = list(_progress(read_traces(traces, encoder, limit), "reading"))
        outputs = [output for path in warm or [] for output in read_outputs(path, encoder)]
        indexes = [Index.open(path, vocabulary=encoder.vocabulary) for path in index or []]
        made = make_drafter(indexes, outputs, budget)
        report = replay(made, _progress(recorded, "replaying"), budget)
        _print(report, as_json=as_json)


def _print(report: ReplayReport, *, as_json: bool) -> None:
    figures = report.as_json()
    if as_json:
        print(json.dumps(figures))
        return
    table = Table("figure", "value", title=f"{report.traces} traces replayed")
    for name, value in figures.items():
        parts = value.items() if isinstance(value, dict) else [("", value)]
        for part, number in parts:
            text = f"{number:.3f}" if isinstance(number, float) else str(number)
            table.add_row(f"{name} {part}".strip(), text)
    Console().print(table)


def _progress(traces: Iterable[Trace], doing: str) -> Iterator[Trace]:
    """Show progress on a terminal's standard error."""
    console = Console(stderr=True)
    yield from track(traces, doing, console=console, disable=not console.is_terminal)


@contextmanager
def _clear_errors() -> Iterator[None]:
    """Print an error of ours as one line and end with status 1."""
    try:
        yield
    except (RetrieverError, IndexerError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
