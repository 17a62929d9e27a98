"""Listed phrases that continue the end of the context.

The phrases are concatenated in `tokens`, in lexicographic order, so that phrases with a common
beginning are adjacent. A *beginning* is a proper prefix of a phrase, of at least one token.
Beginnings are numbered. For each one, arrays hold the phrases that continue it, its length, and the
longest shorter beginning that is its suffix (`shorter`, `NO_BEGINNING` for none).
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from retriever.kernels.compiling import kernel
from retriever.kernels.layout import MAX_MATCH, Found, PhraseArrays

NO_BEGINNING: Final = -1
"""The number that means no beginning."""

MAX_BEGINNINGS: Final = 32
"""Most beginnings that one draft examines, longest first."""


@kernel()
def collect_phrases(
    phrases: PhraseArrays,
    source: int,
    longest: int,
    max_rows: int,
    depth: int,
    found: Found,
    row: int,
) -> int:
    """Write continuations of phrases whose beginnings end the context, longest beginnings first.

    Every phrase is written once, for its longest beginning. A beginning counts as one occurrence,
    and the phrases that share it divide this count. If there are too many phrases, we take an even
    sample.

    Args:
        phrases: the listed phrases.
        source: database that the rows are marked with.
        longest: the longest beginning at the end of the context, or `NO_BEGINNING`.
        max_rows: most rows to write.
        depth: most tokens to copy of each phrase.
        found: rows and continuations are written from index `row` on.
        row: first free row.

    Returns:
        The first free row afterwards.
    """
    tokens, starts, lengths = phrases.tokens, phrases.starts, phrases.lengths
    first_phrases, last_phrases, shorter = (
        phrases.first_phrases,
        phrases.last_phrases,
        phrases.shorter,
    )
    rows, continuations = found.rows, found.continuations
    end_row = min(row + max_rows, rows.shape[0])
    beginning = longest
    for _ in range(MAX_BEGINNINGS):
        if beginning == NO_BEGINNING or row == end_row:
            break
        num_phrases = last_phrases[beginning] + 1 - first_phrases[beginning]
        num_read = min(num_phrases, end_row - row)
        length = lengths[beginning]
        for sample in range(num_read):
            phrase = first_phrases[beginning] + num_phrases * sample // num_read
            if _is_known(first_phrases, last_phrases, shorter, longest, beginning, phrase):
                continue
            begin = starts[phrase] + length
            num_tokens = min(depth, starts[phrase + 1] - begin)
            for offset in range(num_tokens):
                continuations[row, offset] = tokens[begin + offset]
            rows[row].length = num_tokens
            rows[row].match = min(length, MAX_MATCH)
            rows[row].source = source
            rows[row].count = 1.0 / num_read
            rows[row].similarity = 1.0
            row += 1
        beginning = shorter[beginning]
    return row


@kernel(inline="always")
def _is_known(
    first_phrases: NDArray[np.int32],
    last_phrases: NDArray[np.int32],
    shorter: NDArray[np.int32],
    longest: int,
    beginning: int,
    phrase: int,
) -> bool:
    """Return whether a phrase continues an earlier, longer beginning."""
    while longest != beginning:
        if first_phrases[longest] <= phrase <= last_phrases[longest]:
            return True
        longest = shorter[longest]
    return False
