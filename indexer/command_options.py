"""Arguments and options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

from indexer.format import MAX_POSITIONS

IndexPath = Annotated[Path, typer.Argument(metavar="DIR", help="The index's folder.")]
Json = Annotated[bool, typer.Option("--json", help="Print the report as JSON, on standard output.")]
Field = Annotated[str, typer.Option(metavar="KEY", help="In JSON lines, the key of the text.")]
MaxDocumentBytes = Annotated[
    int, typer.Option(min=1, help="Skip longer documents; they are counted.")
]
SegmentTokens = Annotated[
    int,
    typer.Option(
        min=1,
        max=MAX_POSITIONS,
        help="Begin a new segment rather than exceed this. A build takes some thirty bytes of "
        "memory per token of a full segment; look-ups take longer with more segments.",
    ),
]
KeepDuplicates = Annotated[
    bool,
    typer.Option(
        "--keep-duplicates",
        help="Index a text as often as it occurs. Without this, documents whose text is equal to "
        "that of one before are left out and counted.",
    ),
]

SOURCE_HELP = (
    "Folders (searched for text and code), files of text, and .jsonl or .jsonl.gz files with one "
    "document a line. What is closest to what the model will write helps most."
)
