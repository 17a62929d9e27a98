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
