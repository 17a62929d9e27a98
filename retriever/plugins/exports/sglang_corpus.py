"""A corpus that SGLang's own NGRAM drafts from: JSON lines, a string for each document.

SGLang reads it with `POST /add_external_corpus` (`corpus_id`, `file_path`) or at its start. It
takes texts, not tokens: it tokenises each line by itself, without special tokens, puts a separator
between two, and refuses a file of more tokens than it was told to hold
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
"""What SGLang takes at most if it is not told otherwise."""

_BATCH_TOKENS: Final = 1 << 17  # fast to encode, and half a megabyte


@dataclass(slots=True)
class CorpusReport:
    """What was written.

    Attributes:
        documents: lines.
        tokens: as SGLang will count them: of the texts, and of the separators between them.
        retokenised_documents: those whose text has other tokens than the index has of them; to
            decode and encode again does not always lead back.
        left_out_documents: for which there was no room.
        bytes: of the file.
    """

    documents: int = 0
    tokens: int = 0
    retokenised_documents: int = 0
    left_out_documents: int = 0
    bytes: int = 0

    def as_json(self) -> dict[str, int]:
        """Return the report for machines to read."""
        return asdict(self)


def export_sglang_corpus(
    documents: Iterable[TokenIds],
    tokenizer: "PreTrainedTokenizerBase",
    output: Path,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    *,
    overwrite: bool = False,
) -> CorpusReport:
    """Write documents as a corpus, in order, up to the first that has no room.

    Args:
        documents: int32[n] each; a batch of them is in memory at a time.
        tokenizer: whose tokens they are.
        output: the file.
        max_tokens: as SGLang counts them.
        overwrite: replace a file that is there.

    Raises:
        ExportError: the file is there already, or cannot be written.
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
    """Yield documents by some 100,000 tokens: fast to encode, and little to hold."""
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
