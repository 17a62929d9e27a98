"""The commands: build an index, say what it holds, check that it is whole."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from indexer.build import BuildOptions, build_index
from indexer.errors import IndexerError
from indexer.format import MAX_POSITIONS
from indexer.progress import BuildProgress
from indexer.screening.phrases import ExcludedPhrases
from indexer.screening.screen import ExcludeScope, ScreenOptions
from indexer.segments import MAX_SEGMENT_TOKENS
from indexer.sources import (
    DEFAULT_FIELD,
    DEFAULT_MAX_DOCUMENT_BYTES,
    Git,
    SourceOptions,
    StdinFormat,
)
from indexer.summary import summarise
from indexer.tokenizer import DEFAULT_MODEL
from indexer.verify import DEFAULT_SAMPLES, verify_index

app = typer.Typer(
    help="Turn text into an index that drafts are looked up in, and look after such indexes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_IndexPath = Annotated[Path, typer.Argument(metavar="DIR", help="The index's folder.")]
_Json = Annotated[
    bool, typer.Option("--json", help="Print the report as JSON, on standard output.")
]


@app.command()
def build(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE",
            help="Folders (searched for text and code; of a git repository the tracked files), "
            "files of text, .jsonl files with one document a line, .parquet files, datasets saved "
            "to disk, the same as .gz or .zst where they are text, and - for standard input. What "
            "is closest to what the model will write helps most.",
        ),
    ],
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
    field: Annotated[
        str,
        typer.Option(metavar="KEY", help="The text's key in JSON lines, or its column in tables."),
    ] = DEFAULT_FIELD,
    include: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GLOB",
            help="In folders, take only what matches, whatever its suffix: a pattern as in "
            ".gitignore, against the path below the folder. May be given several times.",
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GLOB",
            help="In folders, leave out what matches. May be given several times.",
        ),
    ] = None,
    git: Annotated[
        Git,
        typer.Option(help="Whether of a git repository only the tracked files are taken."),
    ] = Git.AUTO,
    licence: Annotated[
        str,
        typer.Option(
            metavar="TEXT",
            help="The licence of every document. Without it: the field, the file's "
            "SPDX-License-Identifier, or the nearest licence file of its folder.",
        ),
    ] = "",
    licence_field: Annotated[
        str,
        typer.Option(metavar="KEY", help="A document's licence: its key or column."),
    ] = "",
    encoding: Annotated[
        str,
        typer.Option(metavar="NAME", help="Of text that does not begin with a byte order mark."),
    ] = "utf-8",
    stdin_format: Annotated[
        StdinFormat,
        typer.Option(help="What standard input holds: JSON lines, or one document of text."),
    ] = StdinFormat.JSONL,
    max_document_bytes: Annotated[
        int, typer.Option(min=1, help="Skip longer documents; they are counted.")
    ] = DEFAULT_MAX_DOCUMENT_BYTES,
    segment_tokens: Annotated[
        int,
        typer.Option(
            min=1,
            max=MAX_POSITIONS,
            help="Begin a new segment rather than exceed this. A build takes some thirty bytes of "
            "memory per token of a full segment; look-ups take longer with more segments.",
        ),
    ] = MAX_SEGMENT_TOKENS,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Replace the index at DIR once the new one is whole."),
    ] = False,
    exclude_phrases: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Leave out every document that holds a phrase of this list: UTF-8, one a line; "
            "blank lines and lines that begin with # are comments, and \\# begins a phrase with #. "
            "The report names phrases by line, never by text.",
        ),
    ] = None,
    exclude_scope: Annotated[
        ExcludeScope,
        typer.Option(
            help="Leave out the whole document, or only the lines that hold a phrase. A document "
            "whose name holds one is left out in either case."
        ),
    ] = ExcludeScope.DOCUMENT,
    exclude_ignore_case: Annotated[
        bool,
        typer.Option("--exclude-ignore-case", help="Find phrases in upper and lower case alike."),
    ] = False,
    redact: Annotated[
        bool,
        typer.Option(
            "--redact",
            help="Replace keys, tokens, private keys, passwords in URLs and e-mail addresses by "
            "[REDACTED], in texts and names, before anything is indexed. Nothing is sent anywhere. "
            "Needs: pip install 'foredraft[redact]'.",
        ),
    ] = False,
    as_json: _Json = False,
) -> None:
    """Build an index from folders, repositories, files, JSON lines and tables.

    For example: python -m indexer build src docs answers.jsonl.gz --output my.index
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
    phrases = ExcludedPhrases.load(exclude_phrases) if exclude_phrases is not None else None
    screen = ScreenOptions(phrases, exclude_scope, exclude_ignore_case, redact)
    options = BuildOptions(found, segment_tokens, overwrite, screen=screen)
    with BuildProgress() as progress:
        report = build_index(sources, output, tokenizer, options, progress)
    typer.echo(json.dumps(report.to_json()) if as_json else report.describe())


@app.command()
def inspect(path: _IndexPath, *, as_json: _Json = False) -> None:
    """Say what an index holds and which tokenizer it is for."""
    summary = summarise(path)
    typer.echo(json.dumps(summary.to_json()) if as_json else summary.describe())


@app.command()
def verify(
    path: _IndexPath,
    *,
    samples: Annotated[
        int, typer.Option(min=0, help="Neighbouring suffixes whose order is checked, per segment.")
    ] = DEFAULT_SAMPLES,
    as_json: _Json = False,
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
        app(arguments, prog_name="python -m indexer")
    except IndexerError as error:
        sys.exit("error: " + " ".join(str(error).split()))
