"""Settings that several commands take, each set in one schema."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Protocol

import numpy as np
import typer
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from indexer import engines
from indexer.engines.memory import parse_size
from indexer.flags import Metavar
from indexer.format.names import MAX_POSITIONS
from indexer.reader import Index
from indexer.screening.exclusion import ExcludedPhrases
from indexer.screening.screen import NO_SCREENING, ExcludeScope, ScreenOptions
from indexer.sources import Git, SourceOptions, StdinFormat, Turns
from indexer.stages.build_options import DEFAULTS, ENGINES, BuildOptions, engine_of
from indexer.stages.preview import preview_of

IndexPath = Annotated[Path, typer.Argument(metavar="DIR", help="The index's folder.")]
SOURCE_HELP: Final = (
    "Folders (searched for text and code; of a git repository the tracked files), files of text, "
    "records in .jsonl, .json, .csv and .parquet files, datasets saved to disk, the same as .gz or "
    ".zst where they are text, and - for standard input. A record holds a text (--field) or a "
    "conversation (--turns): `messages` of OpenAI, `conversations` of ShareGPT, prompt and output, "
    "instruction and output, question and answer, request and response of a server. What is "
    "closest to what the model will write helps most."
)


class SourceSettings(BaseModel):
    """How sources are found and read; see `SourceOptions`."""

    model_config = ConfigDict(title="Sources", extra="forbid", frozen=True, defer_build=True)

    field: Annotated[
        str,
        Metavar("KEY"),
        Field(
            description="The text's key in JSON, or its column in tables; or that of a list of "
            "turns. Records without it are read as conversations."
        ),
    ] = DEFAULTS.sources.field
    turns: Annotated[
        Turns,
        Field(
            description="Of conversations, index each turn of the assistant, each of the user, or "
            "all turns of one together: as the tokenizer's chat template writes them, if it has "
            "one, else with empty lines between them."
        ),
    ] = DEFAULTS.sources.turns
    include: Annotated[
        tuple[str, ...],
        Metavar("GLOB"),
        Field(
            description="In folders, take only what matches, whatever its suffix: a pattern as in "
            ".gitignore, against the path below the folder. May be given several times."
        ),
    ] = DEFAULTS.sources.include
    exclude: Annotated[
        tuple[str, ...],
        Metavar("GLOB"),
        Field(description="In folders, leave out what matches. May be given several times."),
    ] = DEFAULTS.sources.exclude
    git: Annotated[
        Git,
        Field(description="Whether of a git repository only the tracked files are taken."),
    ] = DEFAULTS.sources.git
    licence: Annotated[
        str,
        Metavar("TEXT"),
        Field(
            description="The licence of every document. Without it: the field, the file's "
            "SPDX-License-Identifier, or the nearest licence file of its folder."
        ),
    ] = DEFAULTS.sources.licence
    licence_field: Annotated[
        str, Metavar("KEY"), Field(description="A document's licence: its key or column.")
    ] = DEFAULTS.sources.licence_field
    encoding: Annotated[
        str,
        Metavar("NAME"),
        Field(description="Of text that does not begin with a byte order mark."),
    ] = DEFAULTS.sources.encoding
    stdin_format: Annotated[
        StdinFormat,
        Field(description="What standard input holds: JSON lines, or one document of text."),
    ] = DEFAULTS.sources.stdin_format
    max_document_bytes: Annotated[
        int, Field(ge=1, description="Skip longer documents; they are counted.")
    ] = DEFAULTS.sources.max_document_bytes


class ScreenSettings(BaseModel):
    """Phrases and secrets to screen for; see `ScreenOptions`."""

    model_config = ConfigDict(title="Screening", extra="forbid", frozen=True, defer_build=True)

    exclude_phrases: Annotated[
        Path | None,
        Metavar("FILE"),
        Field(
            description="Leave out every document that holds a phrase of this list: UTF-8, one a "
            "line; blank lines and lines that begin with # are comments, and \\# begins a phrase "
            "with #. The report names phrases by line, never by text."
        ),
    ] = None
    exclude_scope: Annotated[
        ExcludeScope,
        Field(
            description="Leave out the whole document, or only the lines that hold a phrase. A "
            "document whose name holds one is left out in either case."
        ),
    ] = NO_SCREENING.scope
    exclude_ignore_case: Annotated[
        bool, Field(description="Find phrases in upper and lower case alike.")
    ] = NO_SCREENING.ignore_case
    redact: Annotated[
        bool,
        Field(
            description="Replace keys, tokens, private keys, passwords in URLs and e-mail "
            "addresses by [REDACTED], in texts and names, before anything is indexed. Nothing is "
            "sent anywhere. Needs: pip install 'foredraft[redact]'."
        ),
    ] = NO_SCREENING.redact

    def options(self) -> ScreenOptions:
        """Return the same with the phrases of the file."""
        path = self.exclude_phrases
        excluded = None if path is None else ExcludedPhrases.load(path)
        return ScreenOptions(excluded, self.exclude_scope, self.exclude_ignore_case, self.redact)


class SegmentSettings(BaseModel):
    """How an index is divided."""

    model_config = ConfigDict(title="Index", extra="forbid", frozen=True, defer_build=True)

    segment_tokens: Annotated[
        int,
        Field(
            ge=1,
            le=MAX_POSITIONS,
            description="Begin a new segment rather than exceed this. Sorting one takes some "
            "ten bytes of memory per token; look-ups take longer with more segments.",
        ),
    ] = DEFAULTS.max_segment_tokens


class AddedSettings(SegmentSettings):
    """Which documents of the sources an index takes."""

    keep_duplicates: Annotated[
        bool,
        Field(
            description="Index a text as often as it occurs. Without this, documents whose text "
            "is equal to that of one before are left out and counted."
        ),
    ] = not DEFAULTS.deduplicate
    strict: Annotated[
        float | None,
        Metavar("SHARE"),
        Field(
            ge=0,
            le=1,
            description="End with status 1, and change nothing, if more than this share of records "
            "and files could not be read: 0.01 tolerates one in a hundred, 0 none. Files passed "
            "over by their names, empty texts and duplicates do not count.",
        ),
    ] = DEFAULTS.max_dropped_share


class ReplacedSettings(AddedSettings):
    """What becomes of what an index holds already."""

    replace: Annotated[
        bool,
        Field(
            description="Put documents in the place of those that the index holds under the same "
            "names: new versions of files. Without it both are drafted from, and the report "
            "counts them."
        ),
    ] = DEFAULTS.replace


class BuiltSettings(AddedSettings):
    """Further settings of a new index."""

    keep_texts: Annotated[
        bool,
        Field(
            description="Keep the texts in the index, compressed, so that it can be built for "
            "another tokenizer without its sources."
        ),
    ] = DEFAULTS.keep_texts
    overwrite: Annotated[
        bool, Field(description="Replace the index at DIR once the new one is whole.")
    ] = DEFAULTS.overwrite
    resume: Annotated[
        bool,
        Field(
            description="Go on where an earlier build of DIR with --resume was killed or failed: "
            "what it had read and sorted is taken over if sources, tokenizer and options are the "
            "same. If this build fails, what it has done stays, next to DIR, for another."
        ),
    ] = DEFAULTS.resume


class WorkSettings(BaseModel):
    """Where the work is done."""

    model_config = ConfigDict(title="Engine", extra="forbid", frozen=True, defer_build=True)

    engine: Annotated[
        str,
        Metavar("|".join(ENGINES)),
        Field(
            description="Where to work: in several processes, on Ray (folders must be shared by "
            "all its machines), or in this process alone. The index is the same."
        ),
    ] = ENGINES[0]
    workers: Annotated[
        int | None,
        Field(ge=1, description="Processes at once, at most. Default: one per processor."),
    ] = None
    memory: Annotated[
        str | None,
        Metavar("SIZE"),
        Field(
            description="Memory for all processes together, like 4G. Fewer work at once, and "
            "segments are smaller, if it would not do otherwise. Default: half of what is "
            "available."
        ),
    ] = None

    def chosen(self) -> engines.Engine:
        """Return the engine."""
        memory = None if self.memory is None else parse_size(self.memory)
        return engine_of(self.engine, self.workers, memory)


def build_options(
    sources: SourceSettings, screen: ScreenSettings, index: AddedSettings, work: WorkSettings
) -> BuildOptions:
    """Return how documents get into an index.

    Raises:
        IndexerError: a value is none, or the file of phrases cannot be read.
    """
    return BuildOptions(
        SourceOptions(**sources.model_dump()),
        index.segment_tokens,
        deduplicate=not index.keep_duplicates,
        max_dropped_share=index.strict,
        screen=screen.options(),
        engine=work.chosen(),
    )


DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Read the sources and say what would be indexed: files, conversations, first words, "
        "and what would be skipped. Nothing is written.",
        rich_help_panel="Documents",
    ),
]


def show_preview(
    sources: Sequence[str], options: BuildOptions, *, into: Path | None = None, as_json: bool
) -> None:
    """Print what would be indexed; end with status 1 if nothing would be.

    Args:
        sources: to be read.
        options: how.
        into: an index that they would be added to: what it holds is left out.
        as_json: for machines to read.

    Raises:
        SourceError: a source does not exist, or more would be dropped than the options allow.
        IndexerError: the index cannot be opened.
    """
    known = list[NDArray[np.uint8]]()
    if into is not None:
        with Index.open(into) as index:
            known = [np.array(segment.documents.digests) for segment in index.segments]
    preview = preview_of(sources, options, known)
    show(preview, as_json=as_json)
    options.check_dropped(preview.tally)
    if not preview.tally.num_documents:
        raise typer.Exit(1)


class Report(Protocol):
    """What a command found or did."""

    def to_json(self) -> dict[str, Any]:
        """Return it for machines to read."""
        ...

    def describe(self) -> str:
        """Return it for people to read."""
        ...


def show(report: Report, *, as_json: bool) -> None:
    """Print a report in one of its two forms."""
    typer.echo(json.dumps(report.to_json()) if as_json else report.describe())
