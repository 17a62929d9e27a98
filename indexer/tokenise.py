"""Texts to tokens, in batches that the tokenizer spreads over its threads."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import zstandard

from indexer.errors import TokenizerError
from indexer.parts import TokenisedDocument
from indexer.sources import NOT_TEXT, TOO_LARGE
from indexer.tally import Tally

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EMPTY: Final = "empty"

_BATCH_BYTES: Final = 1 << 20
"""Of texts that are tokenised together: enough to keep many cores busy."""

_BYTES_PER_BYTE: Final = 200
"""Of memory for a byte of text: measured are up to 191, for texts of a token a byte."""

_FIXED_BYTES: Final = 96 << 20
"""For the tokenizer itself: measured are 45 MB for a vocabulary of 49,152."""


@dataclass(frozen=True, slots=True)
class UsableText:
    """A document that can be tokenised: its name, licence and text, and its size in UTF-8."""

    name: str
    licence: str
    text: str
    num_bytes: int


def usable_texts(
    documents: Iterable[tuple[str, str, str]], max_document_bytes: int, tally: Tally
) -> Iterator[UsableText]:
    """Yield the documents that hold text and are not too long; count the others.

    Args:
        documents: names, licences and texts.
        max_document_bytes: longer ones are left out.
        tally: counts them.
    """
    for name, licence, text in documents:
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
        else:
            yield UsableText(name, licence, text, num_bytes)


def tokenising_bytes(largest_document_bytes: int) -> int:
    """Return how much memory reading and `tokenise` take at most.

    Args:
        largest_document_bytes: size of the longest text in UTF-8.
    """
    return _FIXED_BYTES + _BYTES_PER_BYTE * max(largest_document_bytes, _BATCH_BYTES)


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
    return zstandard.ZstdCompressor(level=6).compress(backend.to_str().encode("utf-8"))


@lru_cache(maxsize=1)
def stored_encoder(path: Path) -> Any:
    """Return the stored tokenizer's core, which neither cuts nor pads.

    Raises:
        TokenizerError: the file is not what `stored_form` made.
    """
    from tokenizers import Tokenizer  # noqa: PLC0415  (a reader of an index needs none)

    try:
        content = zstandard.ZstdDecompressor().decompress(path.read_bytes())
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
        if batch and size + document.num_bytes > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(document)
        size += document.num_bytes
    if batch:
        yield batch
