"""The interface of a database: the question it answers and the rows it writes."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from retriever.drafter import TokenIds
from retriever.kernels.layout import MAX_MATCH, Scratch
from retriever.tree import Source


class Question(NamedTuple):
    """A query: what followed earlier occurrences of the end of a context?

    Attributes:
        query: int32[q], the last tokens of the context, at least one and at most MAX_MATCH.
        rarity: float32[vocabulary], rarity of each token in the corpus, 0 to 1.
        depth: most tokens to copy after an occurrence.
        scratch: receives the rows of evidence.
    """

    query: TokenIds
    rarity: NDArray[np.float32]
    depth: int
    scratch: Scratch


class Database(Protocol):
    """A database without a stage, opened for one sequence; sequences may share its data."""

    def collect(self, question: Question, row: int) -> int:
        """Write rows of evidence (`ROW`) from `row` on: a few dozen at most.

        All databases share the rows of a draft (`max_rows` of `layout.Scratch`). Continuations are
        drafted unchecked, so they must be inside the vocabulary.

        Returns:
            The first free row.
        """

    def commit(self, tokens: TokenIds) -> None:
        """Handle tokens appended to the sequence, int32[n]; never the prompt.

        A database that needs only the last tokens does nothing here, because its question contains
        them.
        """


@runtime_checkable
class SupposingDatabase(Protocol):
    """A database that can also answer after tokens that may come, for drafts ahead.

    If any database of a sequence cannot do this, the sequence gets no drafts ahead.
    """

    def supposing(self, tokens: TokenIds, last: TokenIds) -> AbstractContextManager[None]:
        """Make `collect` answer as if the sequence continued with some tokens, during the block.

        The question of a draft ahead ends with these tokens. So a database that reads only the
        question does nothing here.

        Args:
            tokens: int32[n], the tokens that may come.
            last: int32[m], the last tokens of the sequence, including `tokens`.
        """


class Occurrence(NamedTuple):
    """The content of a row of evidence.

    Attributes:
        continuation: ids of the tokens that followed.
        match: number of tokens before them that equal the end of the query, at least one.
        times: number of occurrences that the row represents.
    """

    continuation: Sequence[int]
    match: int
    times: float = 1.0


def write_row(question: Question, row: int, source: Source, occurrence: Occurrence) -> int:
    """Write one row from Python, for a database without a kernel; return the first free row.

    Args:
        question: the question that it answers.
        row: first free row.
        source: the database.
        occurrence: the row's content.
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
