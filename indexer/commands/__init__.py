"""The commands that build, list, inspect and verify an index."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from indexer.build import as_replaced, build_from_index, build_index
from indexer.change.choosing import list_documents
from indexer.change.verifying import DEFAULT_SAMPLES, verify_index
from indexer.commands.change_commands import add_command, compact_command, remove_command
from indexer.commands.command_options import (
    SOURCE_HELP,
    BuiltFlags,
    DryRun,
    IndexPath,
    ScreenSettings,
    WorkSettings,
    show,
    show_preview,
)
from indexer.commands.progress import BuildProgress, interrupted
from indexer.commands.summary import summarise
from indexer.errors import IndexerError
from indexer.flags import AsJson, CommandLine, with_flags
from indexer.launch import errors_in_one_line
from indexer.sources import SourceOptions
from indexer.stages.build_options import BuildOptions
from indexer.tokenizer import DEFAULT_MODEL, load_core

app = CommandLine("Build and maintain indexes of texts, from which drafts come.")


@app.command()
@with_flags
def build(
    sources: Annotated[list[str] | None, typer.Argument(metavar="SOURCE", help=SOURCE_HELP)] = None,
    *,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            rich_help_panel="Index",
            help="Folder of the index. It appears when it is complete; a build that fails or is "
            "killed leaves nothing there. Required, except with --dry-run.",
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            rich_help_panel="Index",
            help="The tokenizer of the target model: a hub id, a folder or a .gguf file. An index "
            "works only for models with this tokenizer. Default: the tokenizer of the index that "
            f"is replaced, otherwise {DEFAULT_MODEL}.",
        ),
    ] = None,
    from_index: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="INDEX",
            rich_help_panel="Index",
            help="Instead of sources, use the documents of an index that was built with "
            "--keep-texts, for instance to rebuild it for another tokenizer.",
        ),
    ] = None,
    found: SourceOptions,
    screen: ScreenSettings,
    built: BuiltFlags,
    work: WorkSettings,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Build an index from folders, repositories, files, logs of conversations and tables.

    For example: foredraft build src docs answers.jsonl.gz --output my.index
    """
    if bool(sources) == (from_index is not None):
        raise typer.BadParameter("name sources, or an index with --from")
    if from_index is not None and built.resume:
        raise typer.BadParameter("--resume is for sources: leave it out with --from")
    options = replace(built, sources=found, screen=screen.options(), engine=work.chosen())
    if dry_run:
        if sources is None:
            raise typer.BadParameter("--dry-run is for sources: leave out --from")
        named: Any = tokenizer or DEFAULT_MODEL
        if output is not None:
            named, options = as_replaced(output, tokenizer, options)
        if options.needs_template:
            options = options.with_template_of(load_core(named))
        show_preview(sources, options, as_json=as_json)
        return
    if output is None:
        raise typer.BadParameter("give the folder of the index", param_hint="'--output' / '-o'")
    with interrupted(_kept_of(output, options)), BuildProgress() as progress:
        if from_index is not None:
            report = build_from_index(from_index, output, tokenizer, options, progress)
        else:
            report = build_index(sources or [], output, tokenizer, options, progress)
    show(report, as_json=as_json)


def _kept_of(output: Path, options: BuildOptions) -> str:
    """Describe what a build leaves behind if it is interrupted."""
    index = f"{output} is unchanged" if output.exists() else f"there is no index at {output}"
    if not options.resume:
        return f"{index}; with --resume, what was read and sorted would have been saved"
    return f"{index}; what was read and sorted is saved next to it: the same command goes on"


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
            help="Only documents whose whole name matches. * matches any characters, including "
            "slashes; ? matches one. May be given several times.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per line for each document.")
    ] = False,
) -> None:
    """List the documents of an index in order, with tokens, licence and name."""
    for document in list_documents(path, matching or []):
        show(document, as_json=as_json)


@app.command()
def inspect(path: IndexPath, *, as_json: AsJson = False) -> None:
    """Show what an index contains and which tokenizer it is for."""
    show(summarise(path), as_json=as_json)


@app.command()
def verify(
    path: IndexPath,
    *,
    samples: Annotated[
        int, typer.Option(min=0, help="Adjacent suffix pairs per segment whose order is checked.")
    ] = DEFAULT_SAMPLES,
    as_json: AsJson = False,
) -> None:
    """Check that an index is intact: every byte by checksum, and the order and counts of tokens.

    Exits with status 1 if anything is wrong.
    """
    verification = verify_index(path, samples)
    show(verification, as_json=as_json)
    if verification.findings:
        raise typer.Exit(1)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line. An IndexerError prints one line on stderr and exits with status 1."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    with errors_in_one_line(IndexerError):
        app(arguments, prog_name="foredraft")
