"""The documents of an index as token ids."""

from collections.abc import Iterator

import numpy as np

from indexer.errors import DamagedIndexError
from indexer.reader import Index
from retriever.drafter import TokenIds


def token_documents(index: Index) -> Iterator[TokenIds]:
    """Yield int32[n] for each document, in order; one at a time is in memory.

    Raises:
        DamagedIndexError: the index lists a document where it cannot be, or holds a token that
            its vocabulary does not have.
    """
    documents = index.documents()
    for segment in index.segments:
        for start in segment.documents.starts.tolist():
            _document, num_tokens = next(documents)
            tokens = np.array(segment.tokens[start : start + num_tokens], np.int32)
            if len(tokens) != num_tokens or not _is_of(tokens, index.vocabulary.size):
                raise DamagedIndexError(
                    f"{index.path} holds a document that is none at {start} of segment "
                    f"{segment.name}: copy or build the index again"
                )
            yield tokens


def _is_of(tokens: TokenIds, vocabulary_size: int) -> bool:
    return len(tokens) > 0 and bool(tokens.min() >= 0 and tokens.max() < vocabulary_size)
