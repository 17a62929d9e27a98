"""The documents of an index that contain the nodes of a draft, for traces."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Self

from indexer.reader import Index
from retriever.predict.provenance import count_and_locate, find_ngram
from retriever.tree import ROOT, DocumentOccurrence, DraftTree, Source

_MAX_DOCUMENTS: Final = 3  # for each node; more would make a trace hard to read
_FROM_INDEXES: Final = frozenset({Source.CORPUS, Source.PHRASES})


@dataclass(frozen=True, slots=True)
class TracedEvidence:
    """Where an index contains a node's token after the same preceding tokens.

    Attributes:
        node: number of the node in its tree.
        match_length: number of matching tokens before the node, from its path and the context.
        count: number of times that the index contains the token after them.
        documents: some of the documents, with licence and position.
    """

    node: int
    match_length: int
    count: int
    documents: list[DocumentOccurrence]

    @classmethod
    def parsed(cls, fields: dict[str, Any]) -> Self:
        """Return the evidence from the fields of a line.

        Raises:
            ValueError, KeyError, TypeError, OverflowError: the fields are not valid evidence.
        """
        return cls(
            int(fields["node"]),
            int(fields["match_length"]),
            int(fields["count"]),
            [
                DocumentOccurrence(
                    str(each["index"]),
                    str(each["name"]),
                    str(each["licence"]),
                    int(each["position"]),
                )
                for each in fields["documents"]
            ],
        )


class DocumentFinder:
    """Finds the nodes of drafts in indexes, by the longest match before each node.

    It searches the indexes after the draft was made. So it says where a token occurs, regardless of
    the weight that this occurrence had in the draft. A node takes about a tenth of a millisecond.

    Args:
        indexes: the open indexes that drafts come from.
    """

    MAX_MATCH: ClassVar[int] = 16
    """Most tokens of the context in a match."""

    def __init__(self, indexes: Sequence[Index]) -> None:
        self._indexes = indexes

    def evidence(self, context: Sequence[int], tree: DraftTree) -> list[TracedEvidence]:
        """Return the evidence for the nodes of a tree that came from an index, in order.

        Args:
            context: token ids before the tree; only the last `MAX_MATCH` are used.
            tree: the verified nodes.

        Raises:
            ProvenanceError: an index is damaged or closed.
        """
        if not self._indexes:
            return []
        before = list(context)[-self.MAX_MATCH :]
        longest = {ROOT: len(before)}
        found: list[TracedEvidence] = []
        for node, source in enumerate(tree.sources.tolist()):
            path = tree.token_ids[tree.path_to(node)].tolist()
            most = longest[int(tree.parents[node])]
            longest[node] = most
            if source in _FROM_INDEXES:
                longest[node] = matched = self._longest(before, path, most)
                found.extend(self._located(node, before, path, matched))
        return found

    def _longest(self, before: list[int], path: list[int], most: int) -> int:
        """Return how many context tokens, at most `most`, some index contains before a path."""
        least = 0
        while least < most:
            middle = (least + most + 1) // 2
            if self._holds(before[len(before) - middle :] + path):
                least = middle
            else:
                most = middle - 1
        return least

    def _holds(self, ngram: Sequence[int]) -> bool:
        return any(
            len(find_ngram(segment, ngram)) for index in self._indexes for segment in index.segments
        )

    def _located(
        self, node: int, before: list[int], path: list[int], matched: int
    ) -> list[TracedEvidence]:
        """Return the evidence for a node; empty if no token before it matches."""
        match_length = matched + len(path) - 1
        if match_length == 0:
            return []
        ngram = before[len(before) - matched :] + path
        count, documents = count_and_locate(self._indexes, ngram, _MAX_DOCUMENTS)
        return [TracedEvidence(node, match_length, count, list(documents))] if count else []
