"""Suffix arrays over tokens, by way of a suffix array over bytes."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from indexer.format import POSITION_DTYPE, Tokens, separator_of, token_dtype

_STRIDE: Final = 1 << 20
_FIXED_BYTES: Final = 64 << 20
"""For what is looked at in strides, and the library."""


def sort_suffixes(tokens: Tokens) -> NDArray[np.uint32]:
    """Return the positions that hold no separator, in the order of the tokens that follow.

    The order is lexicographic, of unsigned integers, over the tokens from the position to the end
    of the array; a suffix that is a prefix of another comes first. The big-endian bytes of
    integers compare as the integers do, so libdivsufsort sorts the bytes, and what it says of the
    positions between two tokens is dropped. It needs, per byte that it sorts, four bytes of memory
    (eight from 2**31 bytes on).

    Args:
        tokens: uint16[n] or uint32[n], n < 2**32, little-endian; the largest value of the dtype is
            the separator.

    Returns:
        uint32[m], m being the number of tokens that are not separators.
    """
    from pydivsufsort import divsufsort  # noqa: PLC0415  (readers of an index do not need it)

    separator = separator_of(tokens.dtype)
    num_suffixes = len(tokens) - int(np.count_nonzero(tokens == separator))
    if num_suffixes == 0:
        return np.empty(0, POSITION_DTYPE)
    keys, width = _sort_keys(tokens, separator)
    return _aligned(divsufsort(keys), width, num_suffixes)


def sorting_bytes(num_tokens: int, vocabulary_size: int) -> int:
    """Return how much memory `sort_suffixes` takes at most, its argument and its result included.

    Args:
        num_tokens: of the argument, separators included.
        vocabulary_size: largest token id plus one.
    """
    width = (vocabulary_size.bit_length() + 7) // 8
    order_bytes = 4 if num_tokens * width < 2**31 else 8
    own = token_dtype(vocabulary_size).itemsize + POSITION_DTYPE.itemsize
    return _FIXED_BYTES + num_tokens * (width * (1 + order_bytes) + own)


def first_token_starts(tokens: Tokens, vocabulary_size: int) -> NDArray[np.uint32]:
    """Return where in the suffix array the suffixes begin that start with each token.

    Args:
        tokens: uint16[n] or uint32[n], as `sort_suffixes` takes it.
        vocabulary_size: largest token id plus one.

    Returns:
        uint32[vocabulary_size + 1], the last being the number of suffixes.
    """
    counts = np.zeros(vocabulary_size + 1, np.int64)
    separator = separator_of(tokens.dtype)
    for begin in range(0, len(tokens), _STRIDE):
        piece = tokens[begin : begin + _STRIDE]
        counts[1:] += np.bincount(piece[piece != separator], minlength=vocabulary_size)
    return np.cumsum(counts).astype(POSITION_DTYPE)


def _sort_keys(tokens: Tokens, separator: int) -> tuple[NDArray[np.uint8], int]:
    """Return big-endian keys of the fewest bytes that hold all ids, and their width.

    Fewer bytes are faster to sort. The separator becomes the largest key, and the largest id must
    stay below it.
    """
    is_separator = tokens == separator
    largest = int(tokens.max(where=~is_separator, initial=0))
    width = (int(largest + 1).bit_length() + 7) // 8
    keys = np.empty((len(tokens), width), np.uint8)
    for byte in range(width):
        keys[:, byte] = tokens >> 8 * (width - 1 - byte)
    keys[is_separator] = 0xFF
    return keys.reshape(-1), width


def _aligned(order: NDArray[Any], width: int, num_suffixes: int) -> NDArray[np.uint32]:
    """Keep the byte positions at which a token begins, as token positions, separators dropped.

    Separators are the largest keys, so the suffixes that start with one stand last.
    """
    positions = np.empty(num_suffixes, POSITION_DTYPE)
    filled = 0
    for begin in range(0, len(order), _STRIDE):
        piece = order[begin : begin + _STRIDE]
        token, between = np.divmod(piece, width)
        kept = token[between == 0][: num_suffixes - filled]
        positions[filled : filled + len(kept)] = kept
        filled += len(kept)
    return positions
