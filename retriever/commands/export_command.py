"""The command that writes an index in the form of an engine's own corpus."""

import json
import sys
from contextlib import closing
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from indexer.flags import AsJson
from indexer.reader import Index
from indexer.tokenizer import DEFAULT_MODEL, load_tokenizer, vocabulary_of
from retriever.commands.options import clear_errors, progress
from retriever.errors import ExportError, VocabularyMismatchError
from retriever.exports.exllamav3 import AutomatonReport, export_exllamav3, tokenizer_digests
from retriever.exports.exported_documents import token_documents
from retriever.exports.sglang_corpus import (
    DEFAULT_MAX_TOKENS,
    CorpusReport,
    export_sglang_corpus,
)


class Form(StrEnum):
    """What an index can be written as."""

    SGLANG_CORPUS = "sglang-corpus"
    EXLLAMAV3 = "exllamav3"


@clear_errors()
def export(
    index: Annotated[Path, typer.Argument(metavar="INDEX", help="The index.")],
    *,
    to: Annotated[
        Form,
        typer.Option(
            help="sglang-corpus: texts for SGLang's own NGRAM, by its endpoint "
            "/add_external_corpus or at its start. exllamav3: its frozen automaton, for "
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
            help="Write no more; SGLang's own limit is "
            "--speculative-ngram-external-corpus-max-tokens, for all its corpora together.",
        ),
    ] = DEFAULT_MAX_TOKENS,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a file that is there.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write an index as a corpus that an engine drafts from by itself, without this project.

    Documents are written in order, up to the first that has no room.
    """
    files = _tokenizer_files(tokenizer) if to is Form.EXLLAMAV3 else {}
    with closing(Index.open(index)) as opened:
        named = load_tokenizer(tokenizer or DEFAULT_MODEL)
        if vocabulary_of(named) != opened.vocabulary:
            raise VocabularyMismatchError(
                f"index {index} was built for another tokenizer: name its own with --tokenizer"
            )
        documents = progress(token_documents(opened), "writing", opened.num_documents)
        report: CorpusReport | AutomatonReport
        if to is Form.SGLANG_CORPUS:
            report = export_sglang_corpus(documents, named, output, max_tokens, overwrite=overwrite)
        else:
            report = export_exllamav3(
                documents,
                output,
                tokenizer_files=files,
                vocabulary_size=opened.vocabulary.size,
                max_tokens=max_tokens,
                overwrite=overwrite,
            )
    _print(report, output, as_json=as_json)


def _tokenizer_files(tokenizer: str | None) -> dict[str, str]:
    if tokenizer is None:
        raise ExportError("name the folder of the model that exllamav3 runs with --tokenizer")
    return tokenizer_digests(Path(tokenizer))


def _print(report: CorpusReport | AutomatonReport, output: Path, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(report.as_json()))
        return
    counts = f"{report.documents:,} documents, {report.tokens:,} tokens, {report.bytes:,} bytes"
    typer.echo(f"{output}: {counts}")
    if report.left_out_documents:
        print(
            f"left out: {report.left_out_documents:,} documents; --max-tokens has no room for them",
            file=sys.stderr,
        )
