"""A slow, obvious twin of the counting of continuations."""

from collections import Counter

Path = tuple[int, ...]


def prefix_counts(rows: list[list[int]]) -> Counter[Path]:
    """How many rows begin with each path."""
    return Counter(tuple(row[:depth]) for row in rows for depth in range(1, len(row) + 1))
