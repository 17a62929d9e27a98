"""The commands: build an index, say what it holds, check that it is whole."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from indexer.build import build_index
from indexer.errors import IndexerError
from indexer.format import MAX_POSITIONS
from indexer.memory import default_limit, parse_size
from indexer.options import ENGINES, BuildOptions, engine_of
from indexer.progress import BuildProgress
from indexer.segments import MAX_SEGMENT_TOKENS
from indexer.sources import DEFAULT_FIELD, DEFAULT_MAX_DOCUMENT_BYTES
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
_Engine = Annotated[
    str,
    typer.Option(
        metavar="|".join(ENGINES),
        help="Where to work: in several processes, on Ray (folders must be shared by all its "
        "machines), or in this process alone. The index is the same.",
    ),
]
_Workers = Annotated[
    int | None,
    typer.Option(min=1, help="Processes at once, at most.", show_default="one per processor"),
]
_Memory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Memory for all processes together, like 4G. Fewer work at once, and segments are "
        "smaller, if it would not do otherwise.",
        show_default="half of what is available",
    ),
]


@app.command()
def build(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="SOURCE",
            help="Folders (searched for text and code), files of text, and .jsonl or .jsonl.gz "
            "files with one document a line. What is closest to what the model will write helps "
            "most.",
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
        str, typer.Option(metavar="KEY", help="In JSON lines, the key of the text.")
    ] = DEFAULT_FIELD,
    max_document_bytes: Annotated[
        int, typer.Option(min=1, help="Skip longer documents; they are counted.")
    ] = DEFAULT_MAX_DOCUMENT_BYTES,
    segment_tokens: Annotated[
        int,
        typer.Option(
            min=1,
            max=MAX_POSITIONS,
            help="Begin a new segment rather than exceed this. Sorting one takes some twenty bytes "
            "of memory per token; look-ups take longer with more segments.",
        ),
    ] = MAX_SEGMENT_TOKENS,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Replace the index at DIR once the new one is whole."),
    ] = False,
    engine: _Engine = "processes",
    workers: _Workers = None,
    memory: _Memory = None,
    as_json: _Json = False,
) -> None:
    """Build an index from folders, files and JSON lines.

    For example: python -m indexer build src docs answers.jsonl.gz --output my.index
    """
    limit = default_limit() if memory is None else parse_size(memory)
    options = BuildOptions(
        field,
        max_document_bytes,
        segment_tokens,
        overwrite,
        engine=engine_of(engine, workers, limit),
        memory_bytes=limit,
    )
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
