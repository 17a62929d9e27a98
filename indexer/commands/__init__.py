"""The commands: build an index, change it, say what it holds, check that it is whole."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from indexer.build import build_index
from indexer.change.choosing import list_documents
from indexer.change.rebuilding import build_from_index
from indexer.change.verify import DEFAULT_SAMPLES, verify_index
from indexer.commands.change_commands import add_command, compact_command, remove_command
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
from indexer.commands.summary import summarise
from indexer.errors import IndexerError
from indexer.screening.screen import ExcludeScope
from indexer.sources import DEFAULT_FIELD, DEFAULT_MAX_DOCUMENT_BYTES, SourceOptions
from indexer.sources import Git as GitChoice
from indexer.sources import StdinFormat as StdinFormatChoice
from indexer.stages.build_options import BuildOptions
from indexer.stages.segments import MAX_SEGMENT_TOKENS
from indexer.tokenizer import DEFAULT_MODEL

app = typer.Typer(
    help="Turn text into an index that drafts are looked up in, and look after such indexes.",
    no_args_is_help=True,
    epilog="--version, in place of a command, prints the version.",
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def build(
    sources: Annotated[list[str] | None, typer.Argument(metavar="SOURCE", help=SOURCE_HELP)] = None,
    *,
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="Where the index goes. It appears when it is whole; a build that fails or is "
            "killed leaves nothing there.",
        ),
    ],
    tokenizer: Annotated[
        str,
        typer.Option(
            metavar="MODEL",
            help="The tokenizer of the model that will decode: a hub id, a folder or a .gguf "
            "file. An index serves models of this tokenizer only.",
        ),
    ] = DEFAULT_MODEL,
    from_index: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="INDEX",
            help="Instead of sources: the documents of an index that was built with --keep-texts, "
            "as they are, for another tokenizer.",
        ),
    ] = None,
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
    keep_texts: Annotated[
        bool,
        typer.Option(
            "--keep-texts",
            help="Keep the texts in the index, compressed, so that it can be built for another "
            "tokenizer without its sources.",
        ),
    ] = False,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Replace the index at DIR once the new one is whole."),
    ] = False,
    engine: Engine = "processes",
    workers: Workers = None,
    memory: Memory = None,
    as_json: Json = False,
) -> None:
    """Build an index from folders, repositories, files, JSON lines and tables.

    For example: foredraft build src docs answers.jsonl.gz --output my.index
    """
    if bool(sources) == (from_index is not None):
        raise typer.BadParameter("name sources, or an index with --from")
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
        overwrite,
        deduplicate=not keep_duplicates,
        keep_texts=keep_texts,
        screen=screen,
        engine=chosen_engine(engine, workers, memory),
    )
    with BuildProgress() as progress:
        if from_index is not None:
            report = build_from_index(from_index, output, tokenizer, options, progress)
        else:
            report = build_index(sources or [], output, tokenizer, options, progress)
    typer.echo(json.dumps(report.to_json()) if as_json else report.describe())


app.command("add")(add_command)
app.command("remove")(remove_command)
app.command("compact")(compact_command)


@app.command()
def documents(
    path: IndexPath,
    *,
    matching: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GLOB",
            help="Only those whose whole name matches: * stands for any characters, slashes too, "
            "? for one. May be given several times.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print an object of JSON a line for each document.")
    ] = False,
) -> None:
    """List the documents of an index: tokens, licence and name of each, in order."""
    for document in list_documents(path, matching or []):
        typer.echo(json.dumps(document.to_json()) if as_json else document.describe())


@app.command()
def inspect(path: IndexPath, *, as_json: Json = False) -> None:
    """Say what an index holds and which tokenizer it is for."""
    summary = summarise(path)
    typer.echo(json.dumps(summary.to_json()) if as_json else summary.describe())


@app.command()
def verify(
    path: IndexPath,
    *,
    samples: Annotated[
        int, typer.Option(min=0, help="Neighbouring suffixes whose order is checked, per segment.")
    ] = DEFAULT_SAMPLES,
    as_json: Json = False,
) -> None:
    """Check that an index is whole: every byte by checksum, and what the bytes say.

    Ends with status 1 if anything is wrong.
    """
    verification = verify_index(path, samples)
    typer.echo(json.dumps(verification.to_json()) if as_json else verification.describe())
    if verification.findings:
        raise typer.Exit(1)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; an error of ours ends it with one line on stderr and status 1."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        app(arguments, prog_name="foredraft")
    except IndexerError as error:
        sys.exit("error: " + " ".join(str(error).split()))
