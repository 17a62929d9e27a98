"""Options that several commands take, the decoder's as well."""

from pathlib import Path
from typing import Annotated

import typer

from retriever.remote.credentials import VARIABLES, Credentials

Indexes = Annotated[
    list[Path] | None,
    typer.Option(
        "--index",
        metavar="DIR",
        help="An index to draft from, as `python -m indexer build` made it. Repeatable.",
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
