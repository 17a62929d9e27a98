"""A slow and obvious twin of the live table of successors."""

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from retriever.kernels.chains import SEPARATOR
from retriever.kernels.live_table import WAYS, check_of, hash_context

MAX_COUNT = 32767

Place = tuple[int, int]
"""What the table knows of a context: its set, and its check."""


def place_of(context: Sequence[int], num_sets: int) -> Place:
    """The hash itself is taken as given; what the table makes of it is not."""
    tail = np.array([0, *context][-3:], np.int32)
    key = int(hash_context(tail, len(context)))
    return key % num_sets, int(check_of(key))


def successors(
    tokens: Sequence[int], begin: int, end: int
) -> Iterator[tuple[tuple[int, ...], int]]:
    """All contexts of two and three tokens, each with what followed, of a stretch of a store."""
    for position in range(begin, end):
        for order in (2, 3):
            context = tuple(tokens[max(0, position - order) : position])
            whole = len(context) == order and SEPARATOR not in context
            if whole and tokens[position] != SEPARATOR:
                yield context, tokens[position]


def true_counts(
    tokens: Sequence[int], begin: int, end: int, num_sets: int
) -> Counter[tuple[Place, int]]:
    """How often each token followed each context, as far as the table tells contexts apart."""
    return Counter(
        (place_of(context, num_sets), token) for context, token in successors(tokens, begin, end)
    )


def counts_in(table: NDArray[np.int64]) -> dict[tuple[Place, int], int]:
    """What a table holds, from the bits of its entries."""
    return {
        ((number, entry >> 48), entry & 0xFFFFFFFF): (entry >> 32) & 0x7FFF
        for number, ways in enumerate(table.tolist())
        for entry in ways
        if entry != 0
    }


class LiveTwin:
    """Sets of places, each free (None) or with a check, a token and a count."""

    def __init__(self, num_sets: int) -> None:
        self.sets: list[list[tuple[int, int, int] | None]] = [
            [None] * WAYS for _ in range(num_sets)
        ]

    def count(self, context: Sequence[int], token: int, step: int) -> None:
        """Count a token once more after a context, or once less."""
        number, check = place_of(context, len(self.sets))
        ways = self.sets[number]
        for way, entry in enumerate(ways):
            if entry is not None and entry[:2] == (check, token):
                count = min(entry[2] + step, MAX_COUNT)
                ways[way] = (check, token, count) if count > 0 else None
                return
        if step < 0:
            return
        counts = [0 if entry is None else entry[2] for entry in ways]
        least = counts.index(min(counts))
        loser = ways[least]
        if loser is None or loser[2] == 1:
            ways[least] = (check, token, 1)
        else:
            ways[least] = (*loser[:2], loser[2] - 1)

    def count_tokens(self, tokens: Sequence[int], begin: int, end: int, step: int) -> None:
        """Count all successors of a stretch of a store, shorter contexts first."""
        for context, token in successors(tokens, begin, end):
            self.count(context, token, step)

    def as_table(self) -> NDArray[np.int64]:
        """The same as the kernel lays it out."""
        table = np.zeros((len(self.sets), WAYS), np.int64)
        for number, ways in enumerate(self.sets):
            for way, entry in enumerate(ways):
                if entry is not None:
                    check, token, count = entry
                    table[number, way] = check << 48 | count << 32 | token
        return table
