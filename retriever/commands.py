"""The commands: serve drafts, replay recorded outputs, or explain a draft."""

import asyncio
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.progress import track

from indexer.reader import Index
from indexer.tokenizer import DEFAULT_MODEL
from retriever.clear_errors import clear_errors
from retriever.embedded import DEFAULT_LIMITS, EmbeddedDrafter
from retriever.encoding import ChatEncoder
from retriever.errors import InvalidRequestError
from retriever.explain_command import explain
from retriever.factories import OWN, find_factory, own_drafter, remote_drafter
from retriever.files import check_files
from retriever.log_store import Durability
from retriever.options import Indexes, Phrases, Servers
from retriever.phrases import ListedPhrases
from retriever.replay import ReplayReport, replay
from retriever.report_tables import tables
from retriever.service.serving import serve as serve_forever
from retriever.traces import read_outputs, read_traces
from retriever.warmth.options import WarmthOptions

DEFAULT_REFRESH_S: Final = 5.0

app = typer.Typer(
    help="Serve draft trees from indexes, replay recorded outputs through a drafter, or explain a "
    "draft.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.command()(explain)


@app.command()
def serve(
    index: Indexes = None,
    phrases: Phrases = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="The tokenizer of phrases in text: a hub id, a folder or a .gguf file. "
            f"Default: {DEFAULT_MODEL}.",
        ),
    ] = None,
    address: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            help="Where to listen: HOST:PORT (port 0: a free one) or unix:PATH.",
        ),
    ] = "127.0.0.1:50051",
    generations_tokens: Annotated[
        int,
        typer.Option(
            min=1024,
            max=1 << 30,
            help="Recent outputs to keep, in tokens of 24 bytes; rounded up to a power of two.",
        ),
    ] = DEFAULT_LIMITS.generations_tokens,
    generations_age_s: Annotated[
        float,
        typer.Option(min=1, help="Forget outputs that are older than this, in seconds."),
    ] = DEFAULT_LIMITS.generations_age_s,
    state: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="A folder that keeps recent outputs, so that a restarted service drafts as "
            "well as before. For one service and one tokenizer. Default: memory only.",
        ),
    ] = None,
    durability: Annotated[
        Durability,
        typer.Option(
            help="What outputs in --state survive: the end of this process, even by kill -9 "
            "(process), or a power failure too, at the cost of a disk write for each (disk)."
        ),
    ] = "process",
    refresh: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0,
            help="How often to look whether an index has changed, and to draft from what it has "
            "become; 0: never.",
        ),
    ] = DEFAULT_REFRESH_S,
    redis: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            envvar="FOREDRAFT_REDIS",
            show_envvar=True,
            help="Share outputs with the other services of the same tokenizer through this Redis "
            "server: redis://HOST:PORT/DATABASE, or rediss:// for TLS. A password is better given "
            "in FOREDRAFT_REDIS_PASSWORD. Default: share nothing.",
        ),
    ] = None,
) -> None:
    """Serve drafts over gRPC until interrupted.

    Prints `serving on ADDRESS` once it is ready. There is no authentication yet: listen on
    loopback or a unix socket.
    """
    limits = replace(
        DEFAULT_LIMITS, generations_tokens=generations_tokens, generations_age_s=generations_age_s
    )
    with clear_errors():
        check_files(index or [], phrases or [])
        encoder = ChatEncoder(tokenizer)
        drafter = EmbeddedDrafter.open_indexes(
            index or [],
            vocabulary=encoder.vocabulary,
            limits=limits,
            state=state,
            durability=durability,
            phrases=_listed(phrases, encoder, index),
            refresh_s=refresh,
            warmth=WarmthOptions(redis) if redis else None,
        )
        try:
            asyncio.run(serve_forever(drafter, address))
        finally:
            drafter.shut_down()


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
        recorded = list(_progress(read, "tokenising"))
        outputs = list(chain.from_iterable(warming))
        if server:
            make_drafter = partial(remote_drafter, server, vocabulary=encoder.vocabulary)
        elif drafter == OWN:
            listed = _listed(phrases, encoder, index)
            make_drafter = partial(own_drafter, vocabulary=encoder.vocabulary, phrases=listed)
        indexes = [Index.open(path, vocabulary=encoder.vocabulary) for path in index or []]
        made = make_drafter(indexes, outputs, budget)
        after = calibration_after if calibration else None
        report = replay(made, _progress(recorded, "replaying"), budget, after)
        _print(report, as_json=as_json)


def main() -> None:
    """Run the command line; an error of ours ends it with one line on stderr and status 1."""
    app(prog_name="python -m retriever")


def _listed(
    paths: list[Path] | None, encoder: ChatEncoder, index: list[Path] | None
) -> ListedPhrases | None:
    """Load listed phrases and say on standard error what was loaded."""
    if not paths:
        return None
    vocabulary = encoder.vocabulary
    if vocabulary is None and index:
        with closing(Index.open(index[0])) as opened:
            vocabulary = opened.vocabulary
    size = vocabulary.size if vocabulary is not None else None
    listed = ListedPhrases.load(paths, encoder.encode_output, size, track=_progress)
    for line in listed.summary():
        print(line, file=sys.stderr)
    return listed


def _print(report: ReplayReport, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(report.as_json()))
    else:
        Console().print(*tables(report))


def _progress(items: Iterable[Any], doing: str) -> Iterator[Any]:
    """Show progress on a terminal's standard error."""
    console = Console(stderr=True)
    yield from track(items, doing, console=console, disable=not console.is_terminal)
