"""The indexes that drafts are taken from, as one corpus."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Final, Self

import numpy as np

from indexer.reader import Index, Vocabulary
from retriever.databases import Context, Corpus, Databases
from retriever.drafter import TokenIds
from retriever.errors import InvalidRequestError
from retriever.generations import Generations
from retriever.kernels.compiling import tell_compiling
from retriever.kernels.entries import grow_tree
from retriever.kernels.layout import MAX_MATCH
from retriever.pool import Pool
from retriever.predictor import Predictor
from retriever.tables import tables_of

_REHEARSAL_NODES: Final = 32
_PAGE_ENTRIES: Final = 1024
"""Entries of `Segment.starts` in a page of memory."""


@dataclass(frozen=True, slots=True, eq=False)
class Corpora:
    """Open indexes, and the corpus that they are together; immutable.

    Attributes:
        indexes: in the order in which they were named.
        corpus: their segments and phrase tables.
    """

    indexes: tuple[Index, ...]
    corpus: Corpus

    @classmethod
    def of(cls, indexes: Sequence[Index], before: Self | None = None) -> Self:
        """Return the corpus of open indexes of one vocabulary.

        To add up the phrase tables of several indexes takes seconds where they are large.

        Args:
            indexes: what to draft from.
            before: the same ones earlier: where no phrase tables are new, its are taken.

        Raises:
            indexer.errors.IndexerError: phrase tables cannot be added up.
        """
        segments = [segment for index in indexes for segment in index.segments]
        if before is not None and _phrases(indexes) == _phrases(before.indexes):
            tables = before.corpus.tables
        else:
            tables = tables_of(indexes)
        return cls(tuple(indexes), Corpus(segments, tables))

    def close(self, *, but_for: Self | None = None) -> None:
        """Close all indexes but those that are needed for another corpus as well."""
        kept = but_for.indexes if but_for is not None else ()
        for index in self.indexes:
            if index not in kept:
                index.close()


def rehearse(corpus: Corpus, contexts: Iterable[TokenIds]) -> None:
    """Read from a corpus what drafts for these contexts will: the first draft must not wait.

    Args:
        corpus: that is not drafted from yet.
        contexts: int32[n] each, the last tokens of a sequence.
    """
    for segment in corpus.segments:
        segment.starts[::_PAGE_ENTRIES].sum()
    predictor, nobody = Predictor(_REHEARSAL_NODES), Pool("", Generations(0))
    for context in contexts:
        databases = Databases(Context(context), nobody, corpus, learns=False)
        predictor.draft(databases, _REHEARSAL_NODES, 0.0)


def warm_kernels(predictor: Predictor, corpus: Corpus, lock: Lock) -> None:
    """Compile or load the kernels that drafts and commits need.

    Args:
        predictor: used here, for nobody's sake.
        corpus: what will be drafted from.
        lock: held while the predictor is used.
    """
    tell_compiling(grow_tree)
    context = np.zeros(2 * MAX_MATCH, np.int32)
    nobody = Databases(Context(context), Pool("", Generations(0)), corpus)
    nobody.pool.generations.add(context)
    with lock:
        predictor.draft(nobody, 1, 0.0)
        predictor.commit(nobody, context[:1])


def shared_vocabulary(indexes: Sequence[Index], vocabulary: Vocabulary | None) -> Vocabulary | None:
    """Return the one vocabulary of indexes, and of what is given.

    Raises:
        InvalidRequestError: there are several.
    """
    for index in indexes:
        vocabulary = vocabulary or index.vocabulary
        if index.vocabulary.fingerprint != vocabulary.fingerprint:
            raise InvalidRequestError(
                f"index {index.path} is of another tokenizer than {indexes[0].path}: "
                "build both with the same --tokenizer"
            )
    return vocabulary


def _phrases(indexes: Iterable[Index]) -> list[object]:
    return [index.phrases for index in indexes]
