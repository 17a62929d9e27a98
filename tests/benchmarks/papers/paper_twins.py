"""Slow, obvious twins of the kernels of published rules."""

from collections import Counter
from fractions import Fraction

Path = tuple[int, ...]


def prefix_counts(rows: list[list[int]]) -> Counter[Path]:
    """How many rows begin with each path."""
    return Counter(tuple(row[:depth]) for row in rows for depth in range(1, len(row) + 1))


def substring_counts(documents: list[list[int]], max_depth: int) -> Counter[Path]:
    """How often each substring of up to `max_depth` tokens occurs."""
    return Counter(
        tuple(document[begin:end])
        for document in documents
        for begin in range(len(document))
        for end in range(begin + 1, min(begin + max_depth, len(document)) + 1)
    )


def best_tree_score(
    counts: Counter[Path], context: list[int], budget: int, min_probability: Fraction
) -> Fraction:
    """The highest sum of probabilities of a tree over all lengths of match.

    A path of the highest count first is a best tree, since no child is more probable than its
    parent: the sum of the `budget` most probable continuations.
    """
    best = Fraction(0)
    for length in range(1, len(context)):
        match = tuple(context[-length:])
        if match not in counts:
            break
        following = sorted(
            (
                Fraction(count, counts[match])
                for path, count in counts.items()
                if len(path) > length and path[:length] == match
            ),
            reverse=True,
        )
        likely = [p for p in following if p >= min_probability]
        best = max(best, sum(likely[:budget], Fraction(0)))
    return best
