"""The command that writes an index in the corpus format of an engine."""

import json
import sys
from contextlib import closing
from pathlib import Path

import typer

from indexer.reader import Index
from indexer.tokenizer import DEFAULT_MODEL, load_tokenizer, vocabulary_of
from retriever.commands.options import progress
from retriever.errors import ExportError, VocabularyMismatchError
from retriever.plugins.exports.exllamav3 import AutomatonReport, export_exllamav3, tokenizer_digests
from retriever.plugins.exports.exported_documents import ExportForm, token_documents
from retriever.plugins.exports.sglang_corpus import CorpusReport, export_sglang_corpus


def write_corpus(
    index: Path,
    to: ExportForm,
    output: Path,
    tokenizer: str | None,
    max_tokens: int,
    *,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Write an index as the corpus of an engine; see `foredraft export --help`."""
    files = _tokenizer_files(tokenizer) if to is ExportForm.EXLLAMAV3 else {}
    with closing(Index.open(index)) as opened:
        named = load_tokenizer(tokenizer or DEFAULT_MODEL)
        if vocabulary_of(named) != opened.vocabulary:
            raise VocabularyMismatchError(
                f"index {index} was built for another tokenizer: name its own with --tokenizer"
            )
        documents = progress(token_documents(opened), "writing", opened.num_documents)
        report: CorpusReport | AutomatonReport
        if to is ExportForm.SGLANG_CORPUS:
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
            f"left out: {report.left_out_documents:,} documents; they exceed --max-tokens",
            file=sys.stderr,
        )
