"""Options that protect a service."""

from pathlib import Path
from typing import Annotated

import typer

CertificateFile = Annotated[
    Path | None,
    typer.Option(
        "--certificate",
        metavar="FILE",
        help="The server's certificate, PEM: connections are encrypted. Read again when it "
        "changes, as is every file of these.",
    ),
]
KeyFile = Annotated[
    Path | None,
    typer.Option("--key", metavar="FILE", help="The certificate's key, PEM, mode 0600."),
]
ClientCa = Annotated[
    Path | None,
    typer.Option(
        "--client-ca",
        metavar="FILE",
        help="Let in clients alone whose certificates these authorities have signed, PEM.",
    ),
]
AccessFile = Annotated[
    Path | None,
    typer.Option(
        "--access",
        metavar="FILE",
        help="Whose tokens and certificates act for which tenant; `access` writes it. Nobody else "
        "is let in.",
    ),
]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure",
        help="Listen where others reach the address without encryption, or without asking them "
        "who they are.",
    ),
]
PadReplies = Annotated[
    bool,
    typer.Option(
        "--pad-replies",
        help="Make all drafts of a budget equal in size on the wire, so that whoever watches the "
        "network does not learn from it how much was found.",
    ),
]
TenantIndexes = Annotated[
    list[str] | None,
    typer.Option(
        "--tenant-index",
        metavar="TENANT=DIR",
        help="An index that this tenant alone drafts from, beside those of --index. Repeatable.",
    ),
]
TenantPhrases = Annotated[
    list[str] | None,
    typer.Option(
        "--tenant-phrases",
        metavar="TENANT=FILE",
        help="Phrases for this tenant alone, beside those of --phrases. Repeatable.",
    ),
]
