"""Options that several commands take, the decoder's as well."""

from pathlib import Path
from typing import Annotated

import typer

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
