"""Phrase tables as tests build and read them: by searching, where a drafter follows states."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from indexer.format.names import COUNT_DTYPE, MAX_ORDER, PHRASE_FILES, POSITION_DTYPE, token_dtype
from indexer.format.opening import Segment
from indexer.format.phrase_tables import COUNT_SCALE, PhraseTables
from indexer.stages.ngram_ranges import STRIDE, plan_ranges, write_branches
from indexer.stages.phrase_writer import join_branches, token_counts


def build_tables(
    segments: Sequence[Segment], vocabulary_size: int, stride: int = STRIDE
) -> PhraseTables:
    """Return the phrase tables of all documents in segments, as `write_phrases` writes them.

    Args:
        segments: whose arrays are sound.
        vocabulary_size: largest token id plus one.
        stride: occurrences that are counted together.
    """
    dtypes = {"tokens": token_dtype(vocabulary_size), "counts": COUNT_DTYPE}
    with TemporaryDirectory() as name:
        branches = [
            write_branches(segments, each, vocabulary_size, Path(name, f"{number:08d}"), stride)
            for number, each in enumerate(plan_ranges(segments, vocabulary_size, stride))
        ]
        join_branches(branches, token_counts(segments, vocabulary_size), Path(name))
        arrays = {
            file: np.fromfile(Path(name, file), dtypes.get(file[:-1], POSITION_DTYPE))
            for file in PHRASE_FILES
        }
    return PhraseTables.of_files(arrays)


def find(tables: PhraseTables, ngram: Sequence[int]) -> int | None:
    """Return the entry of an n-gram in the level of its length, or None if it has none."""
    if not 1 <= len(ngram) <= MAX_ORDER or not 0 <= ngram[0] < tables.vocabulary_size:
        return None
    entry = ngram[0]
    for level, token in enumerate(ngram[1:], start=1):
        begin, end = tables.starts[level - 1][entry : entry + 2].tolist()
        found = np.flatnonzero(tables.tokens[level][begin:end] == token)
        if len(found) == 0:
            return None
        entry = begin + int(found[0])
    return entry


def count_of(tables: PhraseTables, ngram: Sequence[int]) -> int:
    """Return how often an n-gram of 1 to 4 tokens occurs, rounded; 0 if it has no entry."""
    entry = find(tables, ngram)
    return 0 if entry is None else int(COUNT_SCALE[tables.counts[len(ngram) - 1][entry]])


def successors(tables: PhraseTables, context: Sequence[int]) -> list[tuple[int, int]]:
    """Return the tokens that followed 1 to 3 tokens, with counts, most frequent first."""
    entry = find(tables, context)
    if entry is None or len(context) >= MAX_ORDER:
        return []
    level = len(context)
    begin, end = tables.starts[level - 1][entry : entry + 2].tolist()
    counts = COUNT_SCALE[tables.counts[level][begin:end]]
    return list(zip(tables.tokens[level][begin:end].tolist(), counts.tolist(), strict=True))
