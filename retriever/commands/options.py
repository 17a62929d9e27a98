"""What the commands share: options, errors in one line, and progress of what is loaded."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track

from indexer.errors import IndexerError
from indexer.reader import Index
from retriever.client.credentials import VARIABLES, Credentials
from retriever.errors import RetrieverError
from retriever.predict.phrases import ListedPhrases
from retriever.replay.traces import ChatEncoder


@contextmanager
def clear_errors() -> Iterator[None]:
    """Print an error of ours as one line and end with status 1."""
    try:
        yield
    except (RetrieverError, IndexerError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from error


Indexes = Annotated[
    list[Path] | None,
    typer.Option(
        "--index",
        metavar="DIR",
        help="An index to draft from, as `foredraft build` made it. Repeatable.",
    ),
]
Phrases = Annotated[
    list[Path] | None,
    typer.Option(
        "--phrases",
        metavar="FILE",
        help="Phrases to draft once they have begun: one a line, or (.jsonl) each line "
        '{"text": "..."} or {"ids": [...]}. Repeatable.',
    ),
]
Servers = Annotated[
    list[str] | None,
    typer.Option(
        "--server",
        metavar="ADDRESS",
        help="A draft service, HOST:PORT or unix:PATH, instead of --index and --phrases. "
        "Repeatable: services that each hold a part of a corpus draft together.",
    ),
]
CredentialsFile = Annotated[
    Path | None,
    typer.Option(
        "--credentials",
        metavar="FILE",
        help="For a service: a TOML file with what to show and whom to trust: ca, certificate, "
        "key, token or token_file, server_name, tls. Default: what the environment says "
        f"({', '.join(VARIABLES)}).",
    ),
]


def credentials_of(file: Path | None) -> Credentials | None:
    """Return the credentials of a file, or else of the environment; None where there are none.

    Raises:
        CredentialsError: they cannot be used.
    """
    return Credentials.from_environment() if file is None else Credentials.from_file(file)


def listed_phrases(
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
    listed = ListedPhrases.load(paths, encoder.encode_output, size, track=progress)
    for line in listed.summary():
        print(line, file=sys.stderr)
    return listed


def progress(items: Iterable[Any], doing: str) -> Iterator[Any]:
    """Show progress on a terminal's standard error."""
    console = Console(stderr=True)
    yield from track(items, doing, console=console, disable=not console.is_terminal)


def counted(items: Iterable[Any], total: int, doing: str) -> Iterator[Any]:
    """Show progress as `progress` does, for items that come one by one."""
    console = Console(stderr=True)
    yield from track(items, doing, total=total, console=console, disable=not console.is_terminal)
