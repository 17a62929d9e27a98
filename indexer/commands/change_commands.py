"""The commands that change an existing index: add, remove, compact."""

import json
from dataclasses import replace
from typing import Annotated

import typer

from indexer.build_report import counted_of
from indexer.change.changes import add_documents, compact, remove_documents
from indexer.change.choosing import ListedDocument, chosen_documents
from indexer.commands.command_options import (
    SOURCE_HELP,
    AddedFlags,
    DryRun,
    IndexPath,
    ScreenSettings,
    SegmentFlags,
    WorkSettings,
    show,
    show_preview,
)
from indexer.commands.progress import BuildProgress, interrupted
from indexer.flags import AsJson, with_flags
from indexer.sources import SourceOptions
from indexer.stages.build_options import BuildOptions


@with_flags
def add_command(
    path: IndexPath,
    sources: Annotated[list[str], typer.Argument(metavar="SOURCE", help=SOURCE_HELP)],
    *,
    found: SourceOptions,
    screen: ScreenSettings,
    added: AddedFlags,
    work: WorkSettings,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Add documents to an index. It can be read meanwhile.

    Documents that the index already has are left out, so the same sources may be named again. The
    earlier version of a changed text stays, unless --replace is given. The index's own tokenizer is
    used, and its screening (--redact, --exclude-phrases) applies again. Programs see the new
    documents when they reopen the index.

    For example: foredraft add my.index answers-of-today.jsonl
    """
    options = replace(added, sources=found, screen=screen.options(), engine=work.chosen())
    if dry_run:
        show_preview(sources, options, into=path, as_json=as_json)
        return
    kept = f"{path} is unchanged"
    with interrupted(kept), BuildProgress() as progress:
        report = add_documents(path, sources, options, progress)
    show(report, as_json=as_json)


@with_flags
def remove_command(
    path: IndexPath,
    *,
    document: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            rich_help_panel="Documents",
            help="Name of a document, as `documents` lists it. May be given several times.",
        ),
    ] = None,
    matching: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GLOB",
            rich_help_panel="Documents",
            help="Every document whose whole name matches. * matches any characters, including "
            "slashes; ? matches one. May be given several times.",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="List what would be removed, and change nothing.",
            rich_help_panel="Documents",
        ),
    ] = False,
    work: WorkSettings,
    as_json: AsJson = False,
) -> None:
    """Remove documents from an index. It can be read meanwhile.

    No trace of the documents stays in the index's files, once no program has the earlier snapshot
    open. The report says if one has. The phrase tables, and segments with such documents, are
    rewritten.

    For example: foredraft remove my.index --matching 'src/vendor/*'
    """
    names, patterns = document or [], matching or []
    if not names and not patterns:
        raise typer.BadParameter("name documents with --document or --matching")
    if dry_run:
        _show_documents(chosen_documents(path, names, patterns), as_json=as_json)
    else:
        options = BuildOptions(engine=work.chosen())
        show(remove_documents(path, names, patterns, options), as_json=as_json)


@with_flags
def compact_command(
    path: IndexPath,
    *,
    index: SegmentFlags,
    work: WorkSettings,
    as_json: AsJson = False,
) -> None:
    """Merge small segments, and count added documents in the phrase tables.

    The index can be read meanwhile. Every `add` creates at least one segment, and look-ups take
    longer with more segments. The command also removes files of snapshots that nobody reads.
    """
    show(compact(path, replace(index, engine=work.chosen())), as_json=as_json)


def _show_documents(documents: list[ListedDocument], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"documents": [document.to_json() for document in documents]}))
        return
    for document in documents:
        typer.echo(document.describe())
    num_tokens = sum(document.num_tokens for document in documents)
    counted = counted_of(len(documents), "document")
    typer.echo(f"{counted}, {counted_of(num_tokens, 'token')} would be removed")
