"""What every database is asked, and what it must offer: one form for all of them."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from retriever.drafter import TokenIds
from retriever.kernels.layout import MAX_MATCH, Scratch
from retriever.tree import Source


class Question(NamedTuple):
    """What followed the end of a context before?

    Attributes:
        query: int32[q], the last tokens of the context, at least one and at most MAX_MATCH.
        rarity: float32[vocabulary], how rare each token is in the corpus, 0 to 1.
        depth: most tokens to copy of what followed an occurrence.
        scratch: where rows of evidence are written.
    """

    query: TokenIds
    rarity: NDArray[np.float32]
    depth: int
    scratch: Scratch


class Database(Protocol):
    """A database as one sequence asks it; what it is made of may be shared with others."""

    def collect(self, question: Question, row: int) -> int:
        """Write rows of evidence (`ROW`) from `row` on, as far as there is room.

        Returns:
            The first free row.
        """

    def commit(self, tokens: TokenIds) -> None:
        """Take note of int32[n], tokens that the sequence goes on by."""


class Occurrence(NamedTuple):
    """What a row of evidence says.

    Attributes:
        continuation: token ids that followed.
        match: tokens before them that it has in common with the end of the query, at least one.
        times: occurrences that it stands for.
    """

    continuation: Sequence[int]
    match: int
    times: float = 1.0


def write_row(question: Question, row: int, source: Source, occurrence: Occurrence) -> int:
    """Write one row from Python, for a database without a kernel; return the first free row.

    Args:
        question: what was asked.
        row: first free row.
        source: the database.
        occurrence: what it knows.
    """
    rows, copied = question.scratch.rows, occurrence.continuation[: question.depth]
    if row == len(rows) or len(copied) == 0:
        return row
    question.scratch.continuations[row, : len(copied)] = copied
    out = rows[row]
    out["length"], out["source"] = len(copied), int(source)
    out["match"], out["count"] = min(occurrence.match, MAX_MATCH), occurrence.times
    out["similarity"] = 1.0
    return row + 1
