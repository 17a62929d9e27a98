"""Provenance: traces the nodes of a draft to their evidence and its documents.

Runs after the draft, off the hot path. The rows of evidence stay in the predictor's memory until
the next draft. Rows whose continuation starts with a node's path support the node. A node without
such a row comes from counts of what follows its last one to three tokens in the phrase tables, the
sequence or generations.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from indexer.errors import IndexerError
from indexer.reader import Index, Segment
from retriever.drafter import TokenIds
from retriever.errors import ProvenanceError
from retriever.kernels.layout import Tables
from retriever.kernels.live_table import check_of, entry_count, entry_token, hash_context
from retriever.predict.databases import Databases
from retriever.predict.draft import Predictor
from retriever.tree import (
    ROOT,
    DocumentOccurrence,
    DraftTree,
    NodeProvenance,
    PredictedPlace,
    Source,
)

_LOOKS_PER_DOCUMENT: Final = 8
"""Occurrences to examine for each requested document, because one document may have several."""


def find_ngram(segment: Segment, ngram: Sequence[int]) -> NDArray[Any]:
    """Return unsigned[n], the positions of an n-gram in a segment, in suffix order.

    Bisects the suffix array. Damaged arrays never cause reads beyond their ends.

    Args:
        segment: the segment to search.
        ngram: token ids, at least one.
    """
    wanted = list(ngram)
    tokens, suffixes, starts = segment.tokens, segment.suffixes, segment.starts
    if not 0 <= wanted[0] < len(starts) - 1:
        return suffixes[:0]

    def beginning(place: int) -> list[int]:
        position = int(suffixes[place])
        words: list[int] = tokens[position : position + len(wanted)].tolist()
        return words

    low, high = int(starts[wanted[0]]), min(int(starts[wanted[0] + 1]), len(suffixes))
    begin = bisect_left(range(high), wanted, low, high, key=beginning)
    end = bisect_right(range(high), wanted, begin, high, key=beginning)
    return suffixes[begin:end]


def count_and_locate(
    indexes: Sequence[Index], ngram: Sequence[int], max_documents: int
) -> tuple[int, tuple[DocumentOccurrence, ...]]:
    """Return the number of occurrences of an n-gram, and documents that contain it.

    Args:
        indexes: the indexes to search.
        ngram: token ids, at least one; positions refer to the last token.
        max_documents: most documents to return, with one occurrence each; sampled evenly over a
            segment's occurrences.

    Raises:
        ProvenanceError: an index is damaged or closed.
    """
    count = 0
    found: dict[tuple[str, str, int], DocumentOccurrence] = {}
    for index in indexes:
        for number, segment in enumerate(index.segments):
            begins = find_ngram(segment, ngram)
            count += len(begins)
            for key, occurrence in _documents(index, number, begins, ngram, max_documents):
                if len(found) < max_documents:
                    found.setdefault(key, occurrence)
    return count, tuple(found.values())


def _documents(
    index: Index, number: int, begins: NDArray[Any], ngram: Sequence[int], max_documents: int
) -> Iterator[tuple[tuple[str, str, int], DocumentOccurrence]]:
    """Yield documents of a segment that contain the n-gram; a document may come twice."""
    segment = index.segments[number]
    looks = min(len(begins), _LOOKS_PER_DOCUMENT * max_documents)
    for look in range(looks):
        begin = int(begins[len(begins) * look // looks])
        if not np.array_equal(segment.tokens[begin : begin + len(ngram)], ngram):
            continue  # damaged
        last = begin + len(ngram) - 1
        try:
            document = index.document_at(number, last)
        except (IndexerError, ValueError) as error:
            raise ProvenanceError(f"the document of a token cannot be found: {error}") from error
        place = last - document.start
        yield (
            (str(index.path), segment.name, document.start),
            DocumentOccurrence(index.path.name, document.name, document.licence, place),
        )


_MAX_POSITIONS: Final = 8
"""Most positions in the context or in predictions that are returned for a node."""

_MAX_ORDER: Final = 3
_TABLE_ORDERS: Final = (3, 2, 1)
_CONTEXT_ORDERS: Final = (2, 1)
_LIVE_ORDERS: Final = (3, 2)


@dataclass(frozen=True, slots=True, eq=False)
class DraftedRows:
    """The rows of a draft, copied because the next draft overwrites them.

    Attributes:
        rows: ROW[n].
        continuations: int32[n, budget].
    """

    rows: NDArray[Any]
    continuations: NDArray[np.int32]

    @classmethod
    def of(cls, predictor: Predictor, budget: int) -> Self:
        """Copy the rows of the last draft; `budget` was its most nodes."""
        scratch, end = predictor.scratch, predictor.num_rows
        return cls(scratch.rows[:end].copy(), scratch.continuations[:end, :budget].copy())


@dataclass(frozen=True, slots=True)
class Support:
    """The evidence for a node, before documents are searched.

    Attributes:
        match_length: number of matching tokens before the node.
        count: number of occurrences of the match.
        positions: positions in the context.
        ngram: the matching tokens and the node's token, if found in the corpus; else empty.
        predictions: places in predictions.
    """

    match_length: int = 0
    count: int = 0
    positions: tuple[int, ...] = ()
    ngram: tuple[int, ...] = ()
    predictions: tuple[PredictedPlace, ...] = ()


def trace_nodes(tree: DraftTree, databases: Databases, evidence: DraftedRows) -> Iterator[Support]:
    """Yield the evidence for each node of a draft.

    Args:
        tree: the draft.
        databases: the databases of the draft; the sequence is unchanged since then.
        evidence: the rows of the draft.
    """
    tracer = _Tracer(tree, databases, evidence)
    for node in range(len(tree)):
        yield tracer.support(node)


def locate(
    supports: Sequence[Support], indexes: Sequence[Index], max_documents: int
) -> Iterator[NodeProvenance]:
    """Find the documents of each node; reads only indexes, so drafts can continue.

    Raises:
        ProvenanceError: an index is damaged or closed.
    """
    for support in supports:
        if support.ngram:
            count, documents = count_and_locate(indexes, support.ngram, max_documents)
            yield NodeProvenance(support.match_length, count, documents=documents)
        else:
            yield NodeProvenance(
                support.match_length,
                support.count,
                support.positions,
                predictions=support.predictions,
            )


class _Tracer:
    def __init__(self, tree: DraftTree, databases: Databases, evidence: DraftedRows) -> None:
        self._tree = tree
        self._databases = databases
        self._rows = evidence.rows
        self._continuations = evidence.continuations
        self._context = databases.context.last(len(databases.context))
        self._agreeing: dict[int, NDArray[np.int64]] = {ROOT: np.arange(len(evidence.rows))}
        self._depths = tree.depths()

    def support(self, node: int) -> Support:
        """Return the evidence for a node; must be called for its parent first."""
        source = int(self._tree.sources[node])
        rows = self._agree(node)
        rows = rows[self._rows["source"][rows] == source]
        if len(rows):
            return self._of_rows(node, source, rows)
        path = self._tree.token_ids[self._tree.path_to(node)]
        if source == Source.CONTEXT:
            return _followed(self._context, np.concatenate([self._context, path]))
        text = np.concatenate([self._context[-_MAX_ORDER:], path])
        if source == Source.GENERATIONS:
            return _counted(self._databases.pool.generations.live, text)
        if source == Source.PHRASES:
            return _tabled(self._databases.corpus.tables, text)
        return Support()

    def _agree(self, node: int) -> NDArray[np.int64]:
        """Return the rows whose continuations start with the path to a node."""
        depth = int(self._depths[node])
        rows = self._agreeing[int(self._tree.parents[node])]
        rows = rows[self._rows["length"][rows] >= depth]
        goes_on = self._continuations[rows, depth - 1] == self._tree.token_ids[node]
        self._agreeing[node] = rows[goes_on]
        return self._agreeing[node]

    def _of_rows(self, node: int, source: int, rows: NDArray[np.int64]) -> Support:
        """Return the longest matches among rows."""
        matches = self._rows["match"][rows]
        rows = rows[matches == matches.max()]
        before = int(self._depths[node]) - 1
        match_length, count = int(matches.max()) + before, len(rows)
        path = self._tree.token_ids[self._tree.path_to(node)]
        if source == Source.CONTEXT:
            begins = self._rows["position"][rows]
            places = begins + before % (len(self._context) - begins)  # wraps at the end
            # A trail edits its continuation, so the source may have another token.
            places = _some(places[self._context[places] == path[-1]])
            longest = _longest(self._text(path), (self._context[:place] for place in places))
            return Support(longest, count, places)
        if source == Source.PREDICTIONS and (known := self._databases.predictions) is not None:
            places = _some(self._rows["position"][rows] + before)
            longest = _longest(self._text(path), map(known.before, places))
            return Support(longest, count, predictions=tuple(map(known.place_of, places)))
        if source == Source.CORPUS:
            matched = self._context[len(self._context) - int(matches.max()) :]
            return Support(match_length, count, ngram=(*matched.tolist(), *path.tolist()))
        return Support(match_length, count)

    def _text(self, path: TokenIds) -> TokenIds:
        """Return the context and the path without its last token, int32[n]."""
        return np.concatenate([self._context, path[:-1]])


def _followed(context: TokenIds, text: TokenIds) -> Support:
    """Find the last token of a text in the context, after the one or two tokens before it."""
    for order in _CONTEXT_ORDERS:
        ngram = text[-order - 1 :]
        if len(ngram) > order:
            places = order + np.flatnonzero(context[order:] == ngram[-1])
            for back in range(1, order + 1):
                places = places[context[places - back] == ngram[-1 - back]]
            if len(places):
                named = _some(places)
                longest = _longest(text[:-1], (context[:place] for place in named))
                return Support(longest, len(places), named)
    return Support()


_LOOKED_AT_FIRST: Final = 64  # tokens; most agreements are shorter


def _longest(text: TokenIds, others: Iterable[TokenIds]) -> int:
    """Return the length of the longest suffix, in tokens, that a text shares with another."""
    return max((_agreement(text, other) for other in others), default=0)


def _agreement(text: TokenIds, other: TokenIds) -> int:
    size = min(len(text), len(other))
    for looked_at in (min(size, _LOOKED_AT_FIRST), size):
        differs = np.flatnonzero(text[len(text) - looked_at :] != other[len(other) - looked_at :])
        if len(differs):
            return looked_at - 1 - int(differs[-1])
    return size


def _counted(live: NDArray[np.int64], text: TokenIds) -> Support:
    """Find the last token of a text in generations, after the two or three tokens before it."""
    tail = np.full(_MAX_ORDER, -1, np.int32)
    before = text[:-1][-len(tail) :]
    tail[len(tail) - len(before) :] = before
    for order in _LIVE_ORDERS:
        if len(before) >= order:
            key = int(hash_context(tail, order))
            for entry in live[key & (len(live) - 1)]:
                count = int(entry_count(entry, check_of(key)))
                if count and int(entry_token(entry)) == text[-1]:
                    return Support(order, count)
    return Support()


def _tabled(tables: Tables, text: TokenIds) -> Support:
    """Find the last token of a text in the phrase tables, after the one to three before it."""
    for order in _TABLE_ORDERS:
        ngram = tuple(text[-order - 1 :].tolist())
        if len(ngram) > order and _has_entry(tables, ngram):
            return Support(order, 0, ngram=ngram)
    return Support()


def _has_entry(tables: Tables, ngram: Sequence[int]) -> bool:
    """Return whether the tables hold an n-gram; reads of damaged tables stay in bounds."""
    entry = ngram[0]
    if not entry < len(tables.counts1):
        return False
    levels: Sequence[tuple[NDArray[Any], NDArray[Any]]] = (
        (tables.starts1, tables.tokens2),
        (tables.starts2, tables.tokens3),
        (tables.starts3, tables.tokens4),
    )
    for (starts, tokens), token in zip(levels, ngram[1:], strict=False):
        if entry + 1 >= len(starts):
            return False
        begin = int(starts[entry])
        found = np.flatnonzero(tokens[begin : int(starts[entry + 1])] == token)
        if len(found) == 0:
            return False
        entry = begin + int(found[0])
    return True


def _some(places: NDArray[np.int64]) -> tuple[int, ...]:
    return tuple(int(place) for place in np.unique(places)[-_MAX_POSITIONS:])
