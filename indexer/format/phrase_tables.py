"""Phrase tables: which tokens followed the frequent short n-grams of a corpus, and how often.

The tables are an n-gram trie of four levels in plain arrays. Each count is one byte: exact for
small counts, and on a logarithmic scale above. The trie and the scale are part of the on-disk
format, which docs/reference/format.md specifies.
"""

from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from indexer.format.names import COUNT_DTYPE, MAX_ORDER, PHRASE_FILES, POSITION_DTYPE, Tokens

_EXACT: Final = 16
_CODES_PER_DOUBLING: Final = 8
"""With this value, 256 codes reach 1.6e10 occurrences with an error of at most 6%. Small counts,
which most n-grams have, are exact."""


def _scale() -> NDArray[np.int64]:
    ratios = np.exp2(np.arange(1, 256 - _EXACT) / _CODES_PER_DOUBLING)
    return np.concatenate([np.arange(_EXACT + 1), np.rint(_EXACT * ratios)]).astype(np.int64)


COUNT_SCALE: Final = _scale()
"""int64[256]: the count that each code stands for.

A code c up to 16 stands for c. A higher code stands for 16 * 2**((c - 16) / 8), rounded to an
integer; 255 is about 1.6e10. Neighbouring counts differ by at most 12%, so a code is at most 6%
off.
"""

COUNT_VALUES: Final = COUNT_SCALE.astype(np.float32)
"""float32[256]: `COUNT_SCALE` for kernels."""

COUNT_SCALE.flags.writeable = False
COUNT_VALUES.flags.writeable = False
_MIDDLES: Final = (COUNT_SCALE[:-1] + COUNT_SCALE[1:]) / 2


def encode_counts(counts: NDArray[np.integer[Any]]) -> NDArray[np.uint8]:
    """Return, for each count, the nearest code; on a tie, the smaller one.

    Counts beyond the scale get the last code. A count on the scale gets its exact code, and a
    larger count never gets a smaller code.

    Args:
        counts: integers from 0 up, of any shape.
    """
    return np.searchsorted(_MIDDLES, counts, side="left").astype(COUNT_DTYPE)


@dataclass(frozen=True, slots=True, eq=False)
class PhraseTables:
    """The phrase tables of an index. They are immutable, and their arrays are read-only.

    Level k, at index k - 1 of each tuple, has the n-grams of k tokens. N-grams with the same first
    k - 1 tokens are adjacent, most frequent first. These groups are in the order of their common
    prefix, the *parent*, in its own level. So an entry is the state of an automaton that has read
    its n-gram: the successors of entry e of level k are the entries `starts[k - 1][e]` to
    `starts[k - 1][e + 1]` of level k + 1.

    Opening an index makes only fast checks: the sizes of all arrays, and the first and last
    elements of `starts`. On a damaged disk, all other elements of `starts` may have any value, so
    kernels must clamp them to the next level. Tokens may be outside the vocabulary.

    Attributes:
        starts: uint32[entries + 1] for each of levels 1, 2 and 3.
        tokens: uint16[entries] or uint32[entries], as in segments: the last token of each entry.
            Empty for level 1, where the entry's number is the token.
        counts: uint8[entries], codes of `COUNT_VALUES`: how often the n-gram occurs, also at the
            end of a document. The counts of an entry's successors may sum to less than the entry's
            count. Then the other occurrences were followed by the end of a document or by n-grams
            without an entry. With rounded counts, the sum may also be larger.
    """

    starts: tuple[NDArray[np.uint32], ...]
    tokens: tuple[Tokens, ...]
    counts: tuple[NDArray[np.uint8], ...]

    def __post_init__(self) -> None:
        # Compiled code treats read-only and writable arrays as different types.
        for array in (*self.starts, *self.tokens, *self.counts):
            array.flags.writeable = False

    @classmethod
    def empty(cls, vocabulary_size: int, dtype: np.dtype[Any]) -> Self:
        """Return tables without any n-gram.

        Args:
            vocabulary_size: largest token id plus one.
            dtype: dtype of tokens, from `token_dtype`.
        """
        sizes = (vocabulary_size, 0, 0, 0)
        return cls(
            tuple(np.zeros(size + 1, POSITION_DTYPE) for size in sizes[:-1]),
            tuple(np.empty(0, dtype) for _ in sizes),
            tuple(np.zeros(size, COUNT_DTYPE) for size in sizes),
        )

    @property
    def vocabulary_size(self) -> int:
        """Largest token id plus one."""
        return len(self.counts[0])

    @property
    def num_entries(self) -> tuple[int, ...]:
        """Number of entries in each of levels 1 to 4; level 1 has one entry for every token id."""
        return tuple(len(counts) for counts in self.counts)

    @property
    def num_bytes(self) -> int:
        """Size of all arrays, which is the same in memory and on disk."""
        return sum(array.nbytes for array in self.files().values())

    def files(self) -> dict[str, NDArray[Any]]:
        """Return the array of each of `PHRASE_FILES`, in order."""
        (starts1, starts2, starts3), (_, tokens2, tokens3, tokens4) = self.starts, self.tokens
        counts1, counts2, counts3, counts4 = self.counts
        arrays = (
            *(counts1, starts1),
            *(tokens2, counts2, starts2),
            *(tokens3, counts3, starts3),
            *(tokens4, counts4),
        )
        return dict(zip(PHRASE_FILES, arrays, strict=True))

    @classmethod
    def of_files(cls, arrays: dict[str, NDArray[Any]]) -> Self:
        """Return the tables of arrays that `files` returned."""
        levels = range(1, MAX_ORDER + 1)
        return cls(
            tuple(arrays[f"starts{level}"] for level in levels[:-1]),
            (arrays["tokens2"][:0], *(arrays[f"tokens{level}"] for level in levels[1:])),
            tuple(arrays[f"counts{level}"] for level in levels),
        )
