"""Slow and obvious twins of the phrase tables: dictionaries of n-grams."""

from collections import Counter
from collections.abc import Sequence

from indexer.counts import COUNT_SCALE
from indexer.phrases import PhraseTables

Ngram = tuple[int, ...]


def count_all(documents: Sequence[Sequence[int]]) -> Counter[Ngram]:
    return Counter(
        tuple(document[begin : begin + order])
        for document in documents
        for order in (1, 2, 3, 4)
        for begin in range(len(document) - order + 1)
    )


def rounded(count: int) -> int:
    return min(COUNT_SCALE.tolist(), key=lambda value: (abs(value - count), value))


def slow_levels(
    counts: Counter[Ngram],
    vocabulary_size: int,
    *,
    max_bytes: float = float("inf"),
    token_bytes: int = 2,
) -> list[list[tuple[Ngram, int]]]:
    """Return the entries of each level, as n-gram and rounded count, that the format asks for."""
    levels = [[((token,), rounded(counts[(token,)])) for token in range(vocabulary_size)]]
    for order in (2, 3, 4):
        frequent = [ngram for ngram in counts if len(ngram) == order and counts[ngram] >= 2]
        level = []
        for parent, _ in levels[-1]:
            children = [
                (ngram, rounded(counts[ngram])) for ngram in frequent if ngram[:-1] == parent
            ]
            level += sorted(children, key=lambda child: (-child[1], child[0][-1]))[:32]
        levels.append(level)
    while slow_num_bytes(levels, token_bytes) > max_bytes and any(levels[1:]):
        longest = max(number for number in (1, 2, 3) if levels[number])
        least = min(count for _, count in levels[longest])
        levels[longest] = [entry for entry in levels[longest] if entry[1] > least]
    return levels


def slow_num_bytes(levels: Sequence[Sequence[tuple[Ngram, int]]], token_bytes: int) -> int:
    num_starts = (len(levels[1]) + 1) + (len(levels[2]) + 1)
    return 4 * num_starts + (token_bytes + 1) * sum(map(len, levels[1:]))


def levels_in(tables: PhraseTables) -> list[list[tuple[Ngram, int]]]:
    """Read tables back, entry by entry."""
    levels = [[((token,), int(COUNT_SCALE[code])) for token, code in enumerate(tables.counts[0])]]
    for level in (1, 2, 3):
        starts = tables.starts[level - 1].tolist()
        parents = [
            parent
            for (parent, _), begin, end in zip(levels[-1], starts[:-1], starts[1:], strict=True)
            for _ in range(begin, end)
        ]
        tokens, codes = tables.tokens[level].tolist(), tables.counts[level]
        counts = COUNT_SCALE[codes].tolist()
        entries = zip(parents, tokens, counts, strict=True)
        levels.append([((*parent, token), count) for parent, token, count in entries])
    return levels
