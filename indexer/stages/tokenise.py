"""Tokenises texts in batches, which the tokenizer spreads over its threads."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from indexer.build_report import BuildTally
from indexer.errors import TokenizerError, reason_of
from indexer.format.compression import zstd
from indexer.format.names import Tokens
from indexer.sources import (
    HALF_CHARACTER,
    NAME_ENCODING,
    NOT_TEXT,
    RAISE_LIMIT,
    TOO_LARGE,
    SourceDocument,
    whole_characters,
)
from indexer.stages.parts import TokenisedDocument
from indexer.stages.screening import EXCLUDED, Screener, Screening

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from indexer.tokenizer import CoreTokenizer

EMPTY: Final = "empty"

_BATCH_BYTES: Final = 1 << 20
"""Bytes of text per batch, enough to keep many cores busy."""

_PIECE_CHARACTERS: Final = 1 << 18
"""Characters of a piece of a long text. At four bytes each, a piece is at most one batch."""

_BYTES_PER_BYTE: Final = 200
"""Bytes of memory per byte of text that is tokenised. Up to 191 were measured, for texts with one
token per byte."""

_COPIES: Final = 12
"""Bytes of memory per byte of the longest document: its raw, decoded and cut text, its tokens."""

_FIXED_BYTES: Final = 96 << 20
"""Memory of the tokenizer itself; 45 MB were measured for a vocabulary of 49,152 tokens."""


@dataclass(frozen=True, slots=True)
class UsableText:
    """A document that can be tokenised: its name, licence and text, and its size in UTF-8."""

    name: str
    licence: str
    text: str
    num_bytes: int


def usable_texts(
    documents: Iterable[SourceDocument],
    max_document_bytes: int,
    tally: BuildTally,
    screening: Screening | None = None,
) -> Iterator[UsableText]:
    """Yield the screened documents that have text and are not too long; count the others.

    Args:
        documents: documents as read.
        max_document_bytes: size limit; longer documents are left out.
        tally: tally to update.
        screening: what to exclude from the index.
    """
    screen = None if screening is None else screening.screener()
    for document in documents:
        name, text = document.name, document.text
        try:
            num_bytes = len(text.encode("utf-8"))
        except UnicodeEncodeError:  # a lone surrogate, which JSON allows
            text = whole_characters(text)
            num_bytes = len(text.encode("utf-8"))
            tally.skip(HALF_CHARACTER, name)
        if num_bytes > max_document_bytes:
            tally.drop(TOO_LARGE, name, RAISE_LIMIT)
        elif "\0" in text:
            tally.drop(NOT_TEXT, name, f"it holds NUL: {NAME_ENCODING}")
        elif not text or text.isspace():
            tally.skip(EMPTY, name)
        elif screen is None:
            yield UsableText(name, document.licence, text, num_bytes)
        else:
            yield from _screened(replace(document, text=text), screen, tally)
    if screen is not None:
        tally.screened = screen.take_tally()


def _screened(
    document: SourceDocument, screen: Screener, tally: BuildTally
) -> Iterator[UsableText]:
    """Yield the document if any of it may be indexed; otherwise count it."""
    screened = screen.screen(document.name, document.text, document.licence)
    if screened is None:
        tally.skipped[EXCLUDED] += 1
        return
    name, text, licence = screened
    if not text or text.isspace():
        tally.skip(EMPTY, name)
    else:
        yield UsableText(name, licence, text, len(text.encode("utf-8")))


def tokenising_bytes(largest_document_bytes: int) -> int:
    """Return the most memory that reading and `tokenise` take.

    Args:
        largest_document_bytes: size of the longest text in UTF-8.
    """
    return _FIXED_BYTES + _BYTES_PER_BYTE * _BATCH_BYTES + _COPIES * largest_document_bytes


def tokenise(
    documents: Iterable[UsableText], encoder: Any, dtype: np.dtype[Any], tally: BuildTally
) -> Iterator[TokenisedDocument]:
    """Yield the tokens of every document that has any, in order; count tokens and empty documents.

    Args:
        documents: documents to tokenise.
        encoder: encoder from `stored_encoder`.
        dtype: dtype of tokens.
        tally: tally to update.
    """
    for batch in _batches(documents):
        for document, tokens in zip(batch, _tokens(batch, encoder, dtype), strict=True):
            if len(tokens) == 0:
                tally.skip(EMPTY, document.name)
                continue
            tally.num_bytes += document.num_bytes
            yield TokenisedDocument(document.name, document.licence, tokens, document.text)


def _tokens(batch: Sequence[UsableText], encoder: Any, dtype: np.dtype[Any]) -> Iterator[Tokens]:
    """Yield the tokens of each text. A long text, alone in its batch, is tokenised in pieces."""
    if batch[0].num_bytes > _BATCH_BYTES:
        pieces = [_encoded([piece], encoder, dtype)[0] for piece in _pieces(batch[0].text)]
        yield np.concatenate(pieces).astype(dtype, copy=False)
    else:
        yield from _encoded([document.text for document in batch], encoder, dtype)


def _encoded(texts: list[str], encoder: Any, dtype: np.dtype[Any]) -> list[Tokens]:
    encodings = encoder.encode_batch_fast(texts, add_special_tokens=False)
    return [np.array(encoding.ids, dtype) for encoding in encodings]


def _pieces(text: str) -> Iterator[str]:
    """Cut a long text after line breaks if possible, otherwise after spaces, otherwise anywhere.

    A tokenizer takes about two hundred times the memory of a text. A cut may change the tokens next
    to it, which costs the drafts there a token or two.
    """
    begin = 0
    while begin < len(text):
        end = begin + _PIECE_CHARACTERS
        if end < len(text):
            end = text.rfind("\n", begin, end) + 1 or text.rfind(" ", begin, end) + 1 or end
        yield text[begin:end]
        begin = end


def stored_form(tokenizer: "CoreTokenizer | PreTrainedTokenizerBase") -> bytes:
    """Return a tokenizer's core as an index stores it, which is compressed JSON.

    Raises:
        TokenizerError: the tokenizer is of a kind that cannot tokenise in parallel.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise TokenizerError(
            f"{type(tokenizer).__name__} is not backed by the tokenizers library: "
            "name a model that has a tokenizer.json"
        )
    return zstd.compress(backend.to_str().encode("utf-8"), level=6)


def stored_encoder(path: Path) -> Any:
    """Return the core of the stored tokenizer, which neither truncates nor pads.

    Raises:
        TokenizerError: the file was not written from `stored_form`.
    """
    try:
        return _encoder_of(path.read_bytes())
    # The library raises errors without a type of its own.
    except Exception as error:
        raise TokenizerError(
            f"the stored tokenizer {path} cannot be read: {reason_of(error)}"
        ) from error


@lru_cache(maxsize=1)
def _encoder_of(stored: bytes) -> Any:
    from tokenizers import Tokenizer  # noqa: PLC0415  (readers of an index do not need it)

    content = zstd.decompress(stored)
    encoder = Tokenizer.from_str(content.decode("utf-8"))
    encoder.no_truncation()
    encoder.no_padding()
    return encoder


def _batches(documents: Iterable[UsableText]) -> Iterator[list[UsableText]]:
    batch: list[UsableText] = []
    size = 0
    for document in documents:
        if batch and size + document.num_bytes > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(document)
        size += document.num_bytes
    if batch:
        yield batch
