"""The database of the corpus: the segments and phrase tables of all indexes together."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from indexer.reader import (
    COUNT_VALUES,
    KEY_STRIDE,
    Index,
    PhraseTables,
    Segment,
    key_bits,
    sum_tables,
    token_dtype,
)
from retriever.kernels.layout import FEW, SEGMENT_LIMITS, SegmentArrays, Tables, pack
from retriever.tree import MAX_SOURCES, Source

_FREQUENT: Final = 4.0  # -ln of a token's share: tokens of 2% of the corpus or more have rarity 0
_RARE: Final = 12.0  # tokens of 6 in a million or less have rarity 1


def tables_of(indexes: Sequence[Index]) -> Tables:
    """Return the phrase tables of indexes with the same vocabulary, in the form of kernels.

    The tables of one index stay memory-mapped. Tables of several indexes are summed. The sum goes
    into a mapped temporary file unless it is small.

    Raises:
        indexer.errors.IndexerError: the tables cannot be summed.
    """
    if not indexes:
        return to_kernel(PhraseTables.empty(0, np.dtype(token_dtype(0))))
    if len(indexes) == 1:
        return to_kernel(indexes[0].phrases)
    return to_kernel(sum_tables([index.phrases for index in indexes]))


def to_kernel(tables: PhraseTables) -> Tables:
    """Return the tables with each token's share in the corpus and its rarity."""
    occurrences = COUNT_VALUES[tables.counts[0]].astype(np.float64) + 1.0
    shares = occurrences / max(occurrences.sum(), 1.0)
    rarity = (-np.log(shares) - _FREQUENT) / (_RARE - _FREQUENT)
    starts1, starts2, starts3 = tables.starts
    _, tokens2, tokens3, tokens4 = tables.tokens
    counts1, counts2, counts3, counts4 = tables.counts
    return Tables(
        starts1=starts1,
        starts2=starts2,
        starts3=starts3,
        tokens2=tokens2,
        tokens3=tokens3,
        tokens4=tokens4,
        counts1=counts1,
        counts2=counts2,
        counts3=counts3,
        counts4=counts4,
        values=COUNT_VALUES,
        shares=shares.astype(np.float32),
        rarity=np.clip(rarity, 0.0, 1.0).astype(np.float32),
    )


SHORTEST_MATCH: Final = 3
"""Shortest match to search for in the corpus; phrase tables cover shorter matches."""


def no_outcomes() -> NDArray[np.int64]:
    """Return counts of nodes and accepted nodes, int64[2, MAX_SOURCES], all zero."""
    return np.zeros((2, MAX_SOURCES), np.int64)


@dataclass(slots=True)
class Corpus:
    """The database of the corpus: the segments of all indexes.

    Attributes:
        segments: segments as the indexer's reader opened them.
        tables: phrase tables of all indexes.
        samples: most occurrences to read for each match length in a segment.
        shortest: shortest match to search for, because the tables cover shorter ones.
        enough: once a length occurs this often in a segment, shorter matches are searched neither
            there nor in later segments; at most FEW.
        outcomes: int64[2, MAX_SOURCES], nodes and accepted nodes of drafts from it; a corpus that
            replaces it continues the counts.
        packed_tables: the tables, packed for kernels.
        packed_segments: the segments, packed for kernels, one record each.
    """

    segments: Sequence[Segment]
    tables: Tables
    samples: int = 32
    enough: int = 16
    shortest: int = SHORTEST_MATCH
    outcomes: NDArray[np.int64] = field(default_factory=no_outcomes)
    packed_tables: NDArray[Any] = field(init=False)
    packed_segments: NDArray[Any] = field(init=False)
    _arrays: list[SegmentArrays] = field(init=False)  # packed by their addresses

    def __post_init__(self) -> None:
        if self.enough > FEW:
            raise ValueError(f"enough is {self.enough}: at most {FEW} occurrences are examined")
        bits = key_bits(len(self.tables.counts1))
        limits = np.array(
            [(int(Source.CORPUS), self.shortest, self.samples, self.enough, KEY_STRIDE, bits)],
            SEGMENT_LIMITS,
        )
        self.packed_tables = pack(self.tables)
        self._arrays = [
            SegmentArrays(each.tokens, each.suffixes, each.starts, each.keys, limits)
            for each in self.segments
        ]
        # All have the same type, because the vocabulary determines the width of tokens.
        packed = [pack(each) for each in self._arrays]
        self.packed_segments = np.concatenate(packed or [_no_segments(self.tables)])


def _no_segments(tables: Tables) -> NDArray[Any]:
    """Return zero records of the type of segments."""
    tokens = np.zeros(0, tables.tokens2.dtype)
    numbers, limits = np.zeros(0, np.uint32), np.zeros(0, SEGMENT_LIMITS)
    keys = np.zeros(0, np.uint64)
    return pack(SegmentArrays(tokens, numbers, numbers, keys, limits))[:0]
