"""A corpus for SGLang's NGRAM speculator: JSON lines, one string per document.

SGLang reads it with `POST /add_external_corpus` (`corpus_id`, `file_path`) or at its start. It
takes texts, not tokens. It tokenises each line separately, without special tokens, and puts a
separator between lines. It refuses a file with more tokens than its limit
(`--speculative-ngram-external-corpus-max-tokens`).

Source: sglang 0.5.23, `sglang.srt.speculative.cpp_ngram.external_corpus`.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from retriever.drafter import TokenIds
from retriever.plugins.exports.exported_documents import whole_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_MAX_TOKENS: Final = 10_000_000
"""SGLang's default limit, in tokens."""

_BATCH_TOKENS: Final = 1 << 17  # fast to encode, and only half a megabyte


@dataclass(slots=True)
class CorpusReport:
    """Counts of the written data.

    Attributes:
        documents: number of lines.
        tokens: number of tokens as SGLang will count them: in the texts, and the separators between
            them.
        retokenised_documents: number of documents whose text has other tokens than the index,
            because decoding and encoding does not always round-trip.
        left_out_documents: number of documents that did not fit.
        bytes: size of the file.
    """

    documents: int = 0
    tokens: int = 0
    retokenised_documents: int = 0
    left_out_documents: int = 0
    bytes: int = 0

    def as_json(self) -> dict[str, int]:
        """Return the report as JSON values."""
        return asdict(self)


def export_sglang_corpus(
    documents: Iterable[TokenIds],
    tokenizer: "PreTrainedTokenizerBase",
    output: Path,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    *,
    overwrite: bool = False,
) -> CorpusReport:
    """Write documents as a corpus, in order, until one does not fit.

    Args:
        documents: int32[n] for each document; one batch at a time is in memory.
        tokenizer: tokenizer of the documents.
        output: file to write.
        max_tokens: most tokens, as SGLang counts them.
        overwrite: whether to replace an existing file.

    Raises:
        ExportError: the file exists, or cannot be written.
        DamagedIndexError: a document cannot be read.
    """
    report = CorpusReport()
    with whole_file(output, overwrite=overwrite) as file:
        for batch in _batches(documents):
            if report.left_out_documents:
                report.left_out_documents += len(batch)
            else:
                _write(batch, tokenizer, file, max_tokens, report)
        report.bytes = file.tell()
    return report


def _write(
    batch: list[TokenIds],
    tokenizer: Any,
    file: BinaryIO,
    max_tokens: int,
    report: CorpusReport,
) -> None:
    texts = [tokenizer.decode(tokens.tolist(), skip_special_tokens=False) for tokens in batch]
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    for at, (tokens, text, found) in enumerate(zip(batch, texts, encoded, strict=True)):
        if not found:
            continue
        num_tokens = len(found) + (1 if report.documents else 0)
        if report.tokens + num_tokens > max_tokens:
            report.left_out_documents = len(batch) - at
            return
        file.write(json.dumps(text, ensure_ascii=False).encode() + b"\n")
        report.documents += 1
        report.tokens += num_tokens
        report.retokenised_documents += found != tokens.tolist()


def _batches(documents: Iterable[TokenIds]) -> Iterator[list[TokenIds]]:
    """Yield documents in batches of some 100,000 tokens, which are fast to encode and small."""
    batch: list[TokenIds] = []
    num_tokens = 0
    for tokens in documents:
        batch.append(tokens)
        num_tokens += len(tokens)
        if num_tokens >= _BATCH_TOKENS:
            yield batch
            batch, num_tokens = [], 0
    if batch:
        yield batch
