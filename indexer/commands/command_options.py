"""Arguments and options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

from indexer import engines
from indexer.engines.memory import parse_size
from indexer.format.names import MAX_POSITIONS
from indexer.screening.exclusion import ExcludedPhrases
from indexer.screening.screen import ExcludeScope, ScreenOptions
from indexer.sources import Git as GitChoice
from indexer.sources import StdinFormat as StdinFormatChoice
from indexer.stages.build_options import ENGINES, engine_of

IndexPath = Annotated[Path, typer.Argument(metavar="DIR", help="The index's folder.")]
Json = Annotated[bool, typer.Option("--json", help="Print the report as JSON, on standard output.")]

SOURCE_HELP = (
    "Folders (searched for text and code; of a git repository the tracked files), files of text, "
    ".jsonl files with one document a line, .parquet files, datasets saved to disk, the same as "
    ".gz or .zst where they are text, and - for standard input. What is closest to what the model "
    "will write helps most."
)
Field = Annotated[
    str,
    typer.Option(metavar="KEY", help="The text's key in JSON lines, or its column in tables."),
]
Include = Annotated[
    list[str] | None,
    typer.Option(
        metavar="GLOB",
        help="In folders, take only what matches, whatever its suffix: a pattern as in "
        ".gitignore, against the path below the folder. May be given several times.",
    ),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(
        metavar="GLOB",
        help="In folders, leave out what matches. May be given several times.",
    ),
]
Git = Annotated[
    GitChoice,
    typer.Option(help="Whether of a git repository only the tracked files are taken."),
]
Licence = Annotated[
    str,
    typer.Option(
        metavar="TEXT",
        help="The licence of every document. Without it: the field, the file's "
        "SPDX-License-Identifier, or the nearest licence file of its folder.",
    ),
]
LicenceField = Annotated[
    str, typer.Option(metavar="KEY", help="A document's licence: its key or column.")
]
Encoding = Annotated[
    str, typer.Option(metavar="NAME", help="Of text that does not begin with a byte order mark.")
]
StdinFormat = Annotated[
    StdinFormatChoice,
    typer.Option(help="What standard input holds: JSON lines, or one document of text."),
]
MaxDocumentBytes = Annotated[
    int, typer.Option(min=1, help="Skip longer documents; they are counted.")
]
SegmentTokens = Annotated[
    int,
    typer.Option(
        min=1,
        max=MAX_POSITIONS,
        help="Begin a new segment rather than exceed this. Sorting one takes some twenty bytes "
        "of memory per token; look-ups take longer with more segments.",
    ),
]
Engine = Annotated[
    str,
    typer.Option(
        metavar="|".join(ENGINES),
        help="Where to work: in several processes, on Ray (folders must be shared by all its "
        "machines), or in this process alone. The index is the same.",
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(min=1, help="Processes at once, at most.", show_default="one per processor"),
]
Memory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Memory for all processes together, like 4G. Fewer work at once, and segments are "
        "smaller, if it would not do otherwise.",
        show_default="half of what is available",
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
ExcludePhrases = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Leave out every document that holds a phrase of this list: UTF-8, one a line; "
        "blank lines and lines that begin with # are comments, and \\# begins a phrase with #. "
        "The report names phrases by line, never by text.",
    ),
]
Scope = Annotated[
    ExcludeScope,
    typer.Option(
        help="Leave out the whole document, or only the lines that hold a phrase. A document "
        "whose name holds one is left out in either case."
    ),
]
ExcludeIgnoreCase = Annotated[
    bool,
    typer.Option("--exclude-ignore-case", help="Find phrases in upper and lower case alike."),
]
Redact = Annotated[
    bool,
    typer.Option(
        "--redact",
        help="Replace keys, tokens, private keys, passwords in URLs and e-mail addresses by "
        "[REDACTED], in texts and names, before anything is indexed. Nothing is sent anywhere. "
        "Needs: pip install 'foredraft\\[redact]'.",
    ),
]


def screen_options(
    phrases: Path | None, scope: ExcludeScope, *, ignore_case: bool, redact: bool
) -> ScreenOptions:
    """Return what is screened for, with the phrases of a file."""
    excluded = ExcludedPhrases.load(phrases) if phrases is not None else None
    return ScreenOptions(excluded, scope, ignore_case, redact)


def chosen_engine(engine: str, workers: int | None, memory: str | None) -> engines.Engine:
    """Return where to run."""
    return engine_of(engine, workers, None if memory is None else parse_size(memory))
