"""Texts to tokens, in batches that the tokenizer spreads over its threads."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from indexer.compression import zstd
from indexer.errors import TokenizerError
from indexer.parts import TokenisedDocument
from indexer.screening.screen import EXCLUDED, NO_SCREENING, Screen, ScreenOptions
from indexer.sources import NOT_TEXT, TOO_LARGE, SourceDocument
from indexer.tally import Tally

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EMPTY: Final = "empty"

# Enough texts to keep many cores busy; the tokenizer needs some fifty times this in memory.
_BATCH_BYTES: Final = 4 << 20


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
    tally: Tally,
    screening: ScreenOptions = NO_SCREENING,
) -> Iterator[UsableText]:
    """Yield the documents that hold text and are not too long, screened; count the others.

    Args:
        documents: as they were read.
        max_document_bytes: longer ones are left out.
        tally: counts them.
        screening: what must not get into the index.
    """
    screen = _screen(screening) if screening.is_active else None
    for document in documents:
        name, text = document.name, document.text
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
            yield UsableText(name, document.licence, text, num_bytes)
        else:
            yield from _screened(document, screen, tally)
    if screen is not None:
        tally.screened = screen.take_tally()


def _screened(document: SourceDocument, screen: Screen, tally: Tally) -> Iterator[UsableText]:
    """Yield the document if anything of it may be indexed; count it otherwise."""
    screened = screen.screen(document.name, document.text, document.licence)
    if screened is None:
        tally.skipped[EXCLUDED] += 1
    elif not screened.text or screened.text.isspace():
        tally.skip(EMPTY, screened.name)
    else:
        num_bytes = len(screened.text.encode("utf-8"))
        yield UsableText(screened.name, screened.licence, screened.text, num_bytes)


@lru_cache(maxsize=1)
def _screen(options: ScreenOptions) -> Screen:
    """Return what screens in this process: making it takes seconds."""
    return Screen(options)


def tokenise(
    documents: Iterable[UsableText], encoder: Any, dtype: np.dtype[Any], tally: Tally
) -> Iterator[TokenisedDocument]:
    """Yield the tokens of every document that has any, in order; count them and the others.

    Args:
        documents: to be tokenised.
        encoder: of `stored_encoder`.
        dtype: of tokens.
        tally: counts.
    """
    for batch in _batches(documents):
        texts = [document.text for document in batch]
        encodings = encoder.encode_batch_fast(texts, add_special_tokens=False)
        for document, encoding in zip(batch, encodings, strict=True):
            tokens = np.array(encoding.ids, dtype)
            if len(tokens) == 0:
                tally.skip(EMPTY, document.name)
                continue
            tally.num_bytes += document.num_bytes
            yield TokenisedDocument(document.name, document.licence, tokens, document.text)


def stored_form(tokenizer: "PreTrainedTokenizerBase") -> bytes:
    """Return a tokenizer's core as an index stores it: its JSON, compressed.

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


@lru_cache(maxsize=1)
def stored_encoder(path: Path) -> Any:
    """Return the stored tokenizer's core, which neither cuts nor pads.

    Raises:
        TokenizerError: the file is not what `stored_form` made.
    """
    from tokenizers import Tokenizer  # noqa: PLC0415  (a reader of an index needs none)

    try:
        content = zstd.decompress(path.read_bytes())
        encoder = Tokenizer.from_str(content.decode("utf-8"))
    # The library raises bare exceptions.
    except Exception as error:
        raise TokenizerError(f"the stored tokenizer {path} cannot be read: {error}") from error
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
