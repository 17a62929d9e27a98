"""Slow, obvious twins of the contenders' rules and kernels."""

from collections import Counter
from fractions import Fraction

Path = tuple[int, ...]


def longest_repeat(tokens: list[int], max_length: int) -> tuple[int, int]:
    """The longest end that occurred before, and the position after its first occurrence."""
    for length in range(min(max_length, len(tokens) - 1), 0, -1):
        for end in range(length, len(tokens)):
            if tokens[end - length : end] == tokens[-length:]:
                return length, end
    return 0, len(tokens)


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
