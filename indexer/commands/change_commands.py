"""The commands that change an index that is there: add, remove, compact."""

import json
from typing import Annotated

import typer

from indexer.build_report import ChangeReport
from indexer.change.changes import add_documents, compact, remove_documents
from indexer.change.choosing import ListedDocument, chosen_documents
from indexer.commands.command_options import (
    SOURCE_HELP,
    Encoding,
    Engine,
    Exclude,
    ExcludeIgnoreCase,
    ExcludePhrases,
    Field,
    Git,
    Include,
    IndexPath,
    Json,
    KeepDuplicates,
    Licence,
    LicenceField,
    MaxDocumentBytes,
    Memory,
    Redact,
    Scope,
    SegmentTokens,
    StdinFormat,
    Workers,
    chosen_engine,
    screen_options,
)
from indexer.commands.progress import BuildProgress
from indexer.screening.screen import ExcludeScope
from indexer.sources import DEFAULT_FIELD, DEFAULT_MAX_DOCUMENT_BYTES, SourceOptions
from indexer.sources import Git as GitChoice
from indexer.sources import StdinFormat as StdinFormatChoice
from indexer.stages.build_options import BuildOptions
from indexer.stages.segments import MAX_SEGMENT_TOKENS


def add_command(
    path: IndexPath,
    sources: Annotated[list[str], typer.Argument(metavar="SOURCE", help=SOURCE_HELP)],
    *,
    field: Field = DEFAULT_FIELD,
    include: Include = None,
    exclude: Exclude = None,
    git: Git = GitChoice.AUTO,
    licence: Licence = "",
    licence_field: LicenceField = "",
    encoding: Encoding = "utf-8",
    stdin_format: StdinFormat = StdinFormatChoice.JSONL,
    max_document_bytes: MaxDocumentBytes = DEFAULT_MAX_DOCUMENT_BYTES,
    exclude_phrases: ExcludePhrases = None,
    exclude_scope: Scope = ExcludeScope.DOCUMENT,
    exclude_ignore_case: ExcludeIgnoreCase = False,
    redact: Redact = False,
    segment_tokens: SegmentTokens = MAX_SEGMENT_TOKENS,
    keep_duplicates: KeepDuplicates = False,
    engine: Engine = "processes",
    workers: Workers = None,
    memory: Memory = None,
    as_json: Json = False,
) -> None:
    """Add documents to an index, while it is read.

    What it holds already is left out, so that the same sources may be named again; a text that has
    changed is added beside the one before, unless that is removed first. The tokenizer
    is the one that the index was built with. Readers find the new documents when they open the
    index again; until then they keep what they opened.

    For example: foredraft add my.index answers-of-today.jsonl
    """
    found = SourceOptions(
        field=field,
        include=tuple(include or ()),
        exclude=tuple(exclude or ()),
        git=git,
        licence=licence,
        licence_field=licence_field,
        encoding=encoding,
        stdin_format=stdin_format,
        max_document_bytes=max_document_bytes,
    )
    screen = screen_options(
        exclude_phrases, exclude_scope, ignore_case=exclude_ignore_case, redact=redact
    )
    options = BuildOptions(
        found,
        segment_tokens,
        deduplicate=not keep_duplicates,
        screen=screen,
        engine=chosen_engine(engine, workers, memory),
    )
    with BuildProgress() as progress:
        report = add_documents(path, sources, options, progress)
    _show(report, as_json=as_json)


def remove_command(
    path: IndexPath,
    *,
    document: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Of a document, as `documents` lists it. May be given several times.",
        ),
    ] = None,
    matching: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GLOB",
            help="Every document whose whole name matches: * stands for any characters, slashes "
            "too, ? for one. May be given several times.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List what would go, and change nothing.")
    ] = False,
    engine: Engine = "processes",
    workers: Workers = None,
    memory: Memory = None,
    as_json: Json = False,
) -> None:
    """Remove documents from an index, while it is read.

    Nothing of them stays in its files, once nobody has the index open as it was before; the report
    says if somebody has. Segments that hold them are written anew, and so are the phrase tables.

    For example: foredraft remove my.index --matching 'src/vendor/*'
    """
    names, patterns = document or [], matching or []
    if not names and not patterns:
        raise typer.BadParameter("name documents with --document or --matching")
    if dry_run:
        _show_documents(chosen_documents(path, names, patterns), as_json=as_json)
    else:
        options = BuildOptions(engine=chosen_engine(engine, workers, memory))
        _show(remove_documents(path, names, patterns, options), as_json=as_json)


def compact_command(
    path: IndexPath,
    *,
    segment_tokens: SegmentTokens = MAX_SEGMENT_TOKENS,
    engine: Engine = "processes",
    workers: Workers = None,
    memory: Memory = None,
    as_json: Json = False,
) -> None:
    """Merge small segments, and count what was added in the phrase tables, while it is read.

    Every `add` makes a segment at least, and look-ups take longer with more of them. Also removes
    the files of snapshots that nobody reads any longer.
    """
    options = BuildOptions(
        max_segment_tokens=segment_tokens, engine=chosen_engine(engine, workers, memory)
    )
    _show(compact(path, options), as_json=as_json)


def _show(report: ChangeReport, *, as_json: bool) -> None:
    typer.echo(json.dumps(report.to_json()) if as_json else report.describe())


def _show_documents(documents: list[ListedDocument], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"documents": [document.to_json() for document in documents]}))
        return
    for document in documents:
        typer.echo(document.describe())
    num_tokens = sum(document.num_tokens for document in documents)
    typer.echo(f"{len(documents):,} documents, {num_tokens:,} tokens would be removed")
