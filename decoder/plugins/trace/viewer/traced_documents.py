"""Which documents of an index hold the nodes of a draft, for traces."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Self

from indexer.reader import Index
from retriever.predict.provenance import count_and_locate, find_ngram
from retriever.tree import ROOT, DocumentOccurrence, DraftTree, Source

_MAX_DOCUMENTS: Final = 3  # for each node: enough to judge by, and a trace stays readable
_FROM_INDEXES: Final = frozenset({Source.CORPUS, Source.PHRASES})


@dataclass(frozen=True, slots=True)
class TracedEvidence:
    """Where an index holds a node's token behind the same tokens.

    Attributes:
        node: the node's number in its tree.
        match_length: tokens before it, in the context and on its path, that are the same there.
        count: how often the index holds it behind them.
        documents: some of the documents, with licence and position.
    """

    node: int
    match_length: int
    count: int
    documents: list[DocumentOccurrence]

    @classmethod
    def parsed(cls, fields: dict[str, Any]) -> Self:
        """Take over what a line says of a node.

        Raises:
            ValueError, KeyError, TypeError, OverflowError: it is no evidence.
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
    """Finds nodes of drafts in indexes, by the longest match before each.

    It looks into the indexes after the draft was made, so it says where a token stands, whatever
    the weights of the draft's own evidence were. A node takes about a tenth of a millisecond.

    Args:
        indexes: open ones that are drafted from.
    """

    MAX_MATCH: ClassVar[int] = 16
    """Tokens of the context that a match has at most."""

    def __init__(self, indexes: Sequence[Index]) -> None:
        self._indexes = indexes

    def evidence(self, context: Sequence[int], tree: DraftTree) -> list[TracedEvidence]:
        """Return the evidence for the nodes of a tree that came from an index, in order.

        Args:
            context: token ids before the tree, of which the last `MAX_MATCH` count.
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
        """Return how many tokens of the context an index holds before a path, at most `most`."""
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
        """Return a node's evidence; none where nothing matches before it."""
        match_length = matched + len(path) - 1
        if match_length == 0:
            return []
        ngram = before[len(before) - matched :] + path
        count, documents = count_and_locate(self._indexes, ngram, _MAX_DOCUMENTS)
        return [TracedEvidence(node, match_length, count, list(documents))] if count else []
