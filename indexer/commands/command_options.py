"""Settings that several commands share, with one schema for each set."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Protocol

import numpy as np
import typer
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from indexer import engines
from indexer.engines.memory import parse_size
from indexer.flags import Metavar, Only
from indexer.launch import plugged
from indexer.reader import Index
from indexer.sources.record_samples import show_samples
from indexer.stages.build_options import ENGINES, BuildOptions, engine_of
from indexer.stages.preview import preview_of
from indexer.stages.screening import SCREENING, Screening

IndexPath = Annotated[Path, typer.Argument(metavar="DIR", help="The index's folder.")]
SOURCE_HELP: Final = (
    "Folders (searched for text and code; in a git repository, the tracked files), text files, "
    "records in .jsonl, .json, .csv and .parquet files, datasets saved to disk, and - for standard "
    "input. Text formats may be compressed (.gz, .zst). A record contains a text (--field) or a "
    "conversation (--turns): `messages` of OpenAI, `conversations` of ShareGPT, prompt and output, "
    "instruction and output, question and answer, request and response of a server. Texts that are "
    "most like the model's future output help most."
)


class ScreenSettings(BaseModel):
    """Phrases and secrets to screen for; see `ScreenOptions`."""

    model_config = ConfigDict(title="Screening", extra="forbid", frozen=True, defer_build=True)

    exclude_phrases: Annotated[
        Path | None,
        Metavar("FILE"),
        Field(
            description="Leave out documents that contain a phrase of this list: UTF-8, one phrase "
            "per line. Blank lines and lines that start with # are comments; \\# starts a phrase "
            "with #. The report identifies phrases by line, never by text."
        ),
    ] = None
    exclude_scope: Annotated[
        Literal["document", "line"],
        Field(
            description="Leave out the whole document, or only the lines that contain a phrase. A "
            "document whose name contains a phrase is left out in either case."
        ),
    ] = "document"
    exclude_ignore_case: Annotated[
        bool, Field(description="Ignore upper and lower case of phrases.")
    ] = False
    redact: Annotated[
        bool,
        Field(
            description="Replace keys, tokens, private keys, passwords in URLs and e-mail "
            "addresses with [REDACTED], in texts and names, before anything is indexed. Nothing is "
            "sent anywhere. Needs: pip install 'foredraft[redact]'."
        ),
    ] = False

    def options(self) -> Screening | None:
        """Return the screening, with the phrases of the file; None if there is nothing to screen.

        Raises:
            MissingPluginError: the screening plugin is not installed.
            IndexerError: the phrase file cannot be read.
        """
        path = self.exclude_phrases
        if path is None and not self.redact:
            return None
        screening = plugged(SCREENING, "--redact" if path is None else "--exclude-phrases")
        found: Screening = screening.screening_of(
            path, self.exclude_scope, ignore_case=self.exclude_ignore_case, redact=self.redact
        )
        return found


BuiltFlags = Annotated[
    BuildOptions,
    Only(("segment_tokens", "keep_duplicates", "strict", "keep_texts", "overwrite", "resume")),
]
AddedFlags = Annotated[
    BuildOptions, Only(("segment_tokens", "keep_duplicates", "strict", "replace"))
]
SegmentFlags = Annotated[BuildOptions, Only(("segment_tokens",))]


class WorkSettings(BaseModel):
    """Where the work runs."""

    model_config = ConfigDict(title="Engine", extra="forbid", frozen=True, defer_build=True)

    engine: Annotated[
        str,
        Metavar("|".join(ENGINES)),
        Field(
            description="Where to work: in several processes, on Ray (all its machines must share "
            "the folders), or in this process alone. The index is the same."
        ),
    ] = ENGINES[0]
    workers: Annotated[
        int | None,
        Field(ge=1, description="Most concurrent processes. Default: one per processor."),
    ] = None
    memory: Annotated[
        str | None,
        Metavar("SIZE"),
        Field(
            description="Memory for all processes together, such as 4G. If it is short, fewer "
            "processes run at once, and segments are smaller. Default: half of the available "
            "memory."
        ),
    ] = None

    def chosen(self) -> engines.Engine:
        """Return the engine."""
        memory = None if self.memory is None else parse_size(self.memory)
        return engine_of(self.engine, self.workers, memory)


DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Read the sources and report what would be indexed: files, conversations, first "
        "words, and what would be skipped. Nothing is written.",
        rich_help_panel="Documents",
    ),
]


def show_preview(
    sources: Sequence[str], options: BuildOptions, *, into: Path | None = None, as_json: bool
) -> None:
    """Print what would be indexed; exit with status 1 if nothing would be.

    Args:
        sources: sources to read.
        options: how to read the sources.
        into: index to which documents would be added; its documents are left out.
        as_json: whether to print JSON.

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
    if not as_json:
        show_samples(preview.samples)
    options.check_dropped(preview.tally)
    if not preview.tally.num_documents:
        raise typer.Exit(1)


class Report(Protocol):
    """The report of a command."""

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        ...

    def describe(self) -> str:
        """Return the report as text."""
        ...


def show(report: Report, *, as_json: bool) -> None:
    """Print a report, as text or as JSON."""
    typer.echo(json.dumps(report.to_json()) if as_json else report.describe())
