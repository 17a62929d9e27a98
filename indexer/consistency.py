"""What must hold between the arrays of a segment; each rule here is one of docs/format.md."""

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from indexer.documents import DocumentTable
from indexer.errors import DamagedIndexError
from indexer.format import Tokens, separator_of
from indexer.reader import Segment
from indexer.suffixes import first_token_starts

_STRIDE: Final = 1 << 22
_FIRST_COMPARED: Final = 64
_SAMPLING_SEED: Final = 0


def find_inconsistencies(segment: Segment, vocabulary_size: int, num_samples: int) -> Iterator[str]:
    """Yield what is wrong with a segment, in words; nothing if it is sound.

    Args:
        segment: whose files have the sizes that the catalog states.
        vocabulary_size: largest token id plus one.
        num_samples: neighbours among the suffixes whose whole order is checked.
    """
    tokens, suffixes = segment.tokens, segment.suffixes
    is_separator = tokens == separator_of(tokens.dtype)
    if np.any((tokens >= vocabulary_size) & ~is_separator):
        yield "a token is outside the vocabulary"
        return
    if not _parts_documents(is_separator, segment.documents.starts):
        yield "the document table does not list the documents that separators end"
    if not np.array_equal(segment.starts, first_token_starts(tokens, vocabulary_size)):
        yield "the starts are not the counts of the tokens"
    if not _covers_tokens(suffixes, is_separator):
        yield "the suffixes are not every position of a token once"
    elif not _first_tokens_rise(tokens, suffixes):
        yield "the suffixes are not in the order of their first tokens"
    elif not _neighbours_rise(tokens, suffixes, num_samples):
        yield "the suffixes are not in the order of their tokens"


def find_wrong_documents(documents: DocumentTable) -> Iterator[str]:
    """Yield what is wrong with the names and licences of documents; nothing if all can be read."""
    for number in range(len(documents)):
        try:
            documents.document(number)
        except DamagedIndexError as error:
            yield str(error)
            return
    if len(documents) and int(documents.name_ends[-1]) != len(documents.names):
        yield "the names of documents are followed by others"


def _parts_documents(is_separator: NDArray[np.bool_], document_starts: NDArray[np.uint32]) -> bool:
    ends = np.flatnonzero(is_separator)
    if len(ends) == 0 or ends[-1] != len(is_separator) - 1:
        return False
    return np.array_equal(document_starts, np.concatenate([[0], ends[:-1] + 1]))


def _covers_tokens(suffixes: NDArray[np.uint32], is_separator: NDArray[np.bool_]) -> bool:
    """Tell whether suffixes, which are as many as tokens, name each of them."""
    seen = is_separator.copy()
    for piece in _pieces(suffixes):
        if np.any(piece >= len(seen)) or np.any(is_separator[piece]):
            return False
        seen[piece] = True
    return bool(seen.all())


def _first_tokens_rise(tokens: Tokens, suffixes: NDArray[np.uint32]) -> bool:
    last = 0
    for piece in _pieces(suffixes):
        firsts = tokens[piece]
        if firsts[0] < last or np.any(firsts[1:] < firsts[:-1]):
            return False
        last = int(firsts[-1])
    return True


def _neighbours_rise(tokens: Tokens, suffixes: NDArray[np.uint32], num_samples: int) -> bool:
    num_pairs = len(suffixes) - 1
    pairs = np.arange(num_pairs)
    if num_samples < num_pairs:
        random = np.random.default_rng(_SAMPLING_SEED)
        pairs = np.sort(random.integers(num_pairs, size=num_samples))
    return all(
        _precedes(tokens, int(suffixes[pair]), int(suffixes[pair + 1])) for pair in pairs.tolist()
    )


def _precedes(tokens: Tokens, first: int, second: int) -> bool:
    """Tell whether the suffix at `first` sorts before the one at `second`."""
    length = _FIRST_COMPARED
    while max(first, second) < len(tokens):
        left, right = tokens[first : first + length], tokens[second : second + length]
        common = min(len(left), len(right))
        differing = np.flatnonzero(left[:common] != right[:common])
        if len(differing):
            return bool(left[differing[0]] < right[differing[0]])
        first, second, length = first + common, second + common, 2 * length
    return first > second


def _pieces(array: NDArray[Any]) -> Iterator[NDArray[Any]]:
    for begin in range(0, len(array), _STRIDE):
        yield array[begin : begin + _STRIDE]
