"""Slow and obvious twins of the phrase tables: dictionaries of n-grams."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cache
from itertools import cycle

from indexer.format.phrase_tables import COUNT_SCALE, PhraseTables

Ngram = tuple[int, ...]
Levels = list[list[tuple[Ngram, int]]]
LEAST = {2: 1, 3: 2, 4: 2}


def count_all(documents: Sequence[Sequence[int]]) -> Counter[Ngram]:
    return Counter(
        tuple(document[begin : begin + order])
        for document in documents
        for order in (1, 2, 3, 4)
        for begin in range(len(document) - order + 1)
    )


@cache
def rounded(count: int) -> int:
    return min(map(int, COUNT_SCALE), key=lambda value: (abs(value - count), value))


@cache
def code_of(rounded_count: int) -> int:
    return list(map(int, COUNT_SCALE)).index(rounded_count)


def slow_levels(
    counts: Counter[Ngram],
    vocabulary_size: int,
    *,
    max_bytes: float = float("inf"),
    token_bytes: int = 2,
) -> Levels:
    """Return the entries of each level, as n-gram and rounded count, that the format asks for."""
    levels: Levels = [[((token,), rounded(counts[(token,)])) for token in range(vocabulary_size)]]
    for order in (2, 3, 4):
        children: dict[Ngram, list[tuple[Ngram, int]]] = defaultdict(list)
        for ngram, count in counts.items():
            if len(ngram) == order and count >= LEAST[order]:
                children[ngram[:-1]].append((ngram, rounded(count)))
        level = []
        for parent in (ngram for ngram, _ in levels[-1] if ngram in children):
            level += sorted(children[parent], key=lambda child: (-child[1], child[0][-1]))
        levels.append(level)
    least = dict(LEAST)
    for order in cycle((4, 2, 3)):
        if slow_num_bytes(levels, token_bytes) <= max_bytes or not any(levels[1:]):
            break
        least[order] += 1
        levels[order - 1] = [each for each in levels[order - 1] if code_of(each[1]) >= least[order]]
    return levels


def slow_num_bytes(levels: Levels, token_bytes: int) -> int:
    num_starts = (len(levels[1]) + 1) + (len(levels[2]) + 1)
    return 4 * num_starts + (token_bytes + 1) * sum(map(len, levels[1:]))


def levels_in(tables: PhraseTables) -> Levels:
    """Read tables back, entry by entry."""
    counts = COUNT_SCALE[tables.counts[0]].tolist()
    levels: Levels = [[((token,), count) for token, count in enumerate(counts)]]
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
