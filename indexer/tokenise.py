"""Texts to tokens, in batches that the tokenizer spreads over all cores."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from indexer.errors import TokenizerError
from indexer.format import token_dtype
from indexer.screening.screen import EXCLUDED, Screen
from indexer.segments import TokenisedDocument
from indexer.sources import NOT_TEXT, TOO_LARGE
from indexer.tally import Tally
from indexer.tokenizer import Vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EMPTY: Final = "empty"

# Enough texts to keep many cores busy; the tokenizer needs some fifty times this in memory.
_BATCH_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class UsableText:
    """A document that can be tokenised: its name, its text, and its size in UTF-8."""

    name: str
    text: str
    num_bytes: int


def usable_texts(
    documents: Iterable[tuple[str, str]],
    max_document_bytes: int,
    tally: Tally,
    screen: Screen | None = None,
) -> Iterator[UsableText]:
    """Yield the documents that hold text and are not too long, screened; count the others."""
    for name, text in documents:
        try:
            num_bytes = len(text.encode("utf-8"))
        except UnicodeEncodeError:  # half of a surrogate pair, which JSON can spell
            tally.skip(NOT_TEXT, name)
            continue
        if num_bytes > max_document_bytes:
            tally.skip(TOO_LARGE, name)
        elif "\0" in text:
            tally.skip(NOT_TEXT, name)
        elif not text or text.isspace():
            tally.skip(EMPTY, name)
        elif screen is None:
            yield UsableText(name, text, num_bytes)
        else:
            yield from _screened(name, text, screen, tally)


def _screened(name: str, text: str, screen: Screen, tally: Tally) -> Iterator[UsableText]:
    """Yield the document if anything of it may be indexed; count it otherwise."""
    screened = screen.screen(name, text)
    if screened is None:
        tally.skipped[EXCLUDED] += 1
    elif not screened.text or screened.text.isspace():
        tally.skip(EMPTY, screened.name)
    else:
        yield UsableText(screened.name, screened.text, len(screened.text.encode("utf-8")))


def tokenise(
    documents: Iterable[UsableText],
    tokenizer: "PreTrainedTokenizerBase",
    vocabulary: Vocabulary,
    tally: Tally,
) -> Iterator[TokenisedDocument]:
    """Yield the tokens of every document that has any, in order; count them and the others.

    Raises:
        TokenizerError: the tokenizer is of a kind that cannot tokenise in parallel.
    """
    encoder = _encoder_of(tokenizer)
    dtype = token_dtype(vocabulary.size)
    for batch in _batches(documents):
        texts = [document.text for document in batch]
        encodings = encoder.encode_batch_fast(texts, add_special_tokens=False)
        for document, encoding in zip(batch, encodings, strict=True):
            tokens = np.array(encoding.ids, dtype)
            if len(tokens) == 0:
                tally.skip(EMPTY, document.name)
                continue
            tally.num_documents += 1
            tally.num_tokens += len(tokens)
            tally.num_bytes += document.num_bytes
            yield TokenisedDocument(document.name, tokens)


def _encoder_of(tokenizer: "PreTrainedTokenizerBase") -> Any:
    """Return a copy of the tokenizer's core that neither cuts nor pads."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise TokenizerError(
            f"{type(tokenizer).__name__} is not backed by the tokenizers library: "
            "name a model that has a tokenizer.json"
        )
    encoder = type(backend).from_str(backend.to_str())
    encoder.no_truncation()
    encoder.no_padding()
    return encoder


def _batches(documents: Iterable[UsableText]) -> Iterator[list[UsableText]]:
    batch: list[UsableText] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += document.num_bytes
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
