"""The command `export`: its options and their help.

Its code is imported when it runs, so that its help appears immediately.
"""

from pathlib import Path
from typing import Annotated

import typer

from indexer.flags import AsJson, command_line
from indexer.tokenizer import DEFAULT_MODEL
from retriever.commands.options import clear_errors
from retriever.plugins.exports.exported_documents import ExportForm
from retriever.plugins.exports.sglang_corpus import DEFAULT_MAX_TOKENS


@clear_errors()
def export(
    index: Annotated[Path, typer.Argument(metavar="INDEX", help="The index.")],
    *,
    to: Annotated[
        ExportForm,
        typer.Option(
            help="sglang-corpus: texts for SGLang's NGRAM, for its endpoint "
            "/add_external_corpus or its start. exllamav3: its frozen automaton, for "
            "--ngram_corpus."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where it goes.")],
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="The tokenizer that the index was built with: a hub id, a folder or a .gguf "
            "file; for exllamav3 the folder of the model that it runs. "
            f"Default: {DEFAULT_MODEL}.",
        ),
    ] = None,
    max_tokens: Annotated[
        int,
        typer.Option(
            min=1,
            help="Most tokens to write; SGLang's own limit is "
            "--speculative-ngram-external-corpus-max-tokens, for all its corpora together.",
        ),
    ] = DEFAULT_MAX_TOKENS,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing file.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write an index as a corpus that an engine drafts from on its own, without this project.

    Documents are written in order, up to the first that does not fit.
    """
    from retriever.plugins.exports.export_command import write_corpus  # noqa: PLC0415  (loads numba)

    write_corpus(index, to, output, tokenizer, max_tokens, overwrite=overwrite, as_json=as_json)


app = command_line("The command `export`: its options and their help.", {"export": export})


def main() -> None:
    """Run the command line; errors are printed on one line."""
    app(prog_name="foredraft")
