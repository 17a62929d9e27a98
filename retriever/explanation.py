"""Why a draft is what it is: for each node what spoke for it, and where that stands."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from retriever.tree import DraftTree, Source


@dataclass(frozen=True, slots=True)
class DocumentOccurrence:
    """A place in an indexed document.

    Attributes:
        index: name of the index.
        name: of the document, as it was indexed.
        licence: of the document; empty where it is not known.
        position: of the drafted token in the document, counted in tokens from 0.
    """

    index: str
    name: str
    licence: str
    position: int


@dataclass(frozen=True, slots=True)
class NodeProvenance:
    """What spoke for one node: its token followed the same tokens before.

    Attributes:
        match_length: how many of the tokens before it, in the context and on its path, are the
            same where it was found.
        count: how often it was found after them, in the database that is the node's source.
        context_positions: where in the context, for a node from there; some of many.
        documents: some of the documents it was found in, for a node from an index; each once.
    """

    match_length: int
    count: int
    context_positions: tuple[int, ...] = ()
    documents: tuple[DocumentOccurrence, ...] = ()


@dataclass(frozen=True, slots=True)
class Explanation:
    """A draft tree, and what spoke for each of its nodes, in their order."""

    tree: DraftTree
    nodes: tuple[NodeProvenance, ...]

    def as_json(self, text_of: Callable[[int], str] | None = None) -> list[dict[str, Any]]:
        """Return an object for each node, in order.

        Args:
            text_of: gives the text of a token; without it there is none.
        """
        columns = (self.tree.token_ids, self.tree.parents, self.tree.probabilities)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        sources = map(Source, self.tree.sources.tolist())
        return [
            {
                "token_id": token,
                "text": text_of(token) if text_of is not None else None,
                "parent": parent,
                "probability": probability,
                "source": source.label,
                **asdict(node),
            }
            for (token, parent, probability), source, node in zip(
                rows, sources, self.nodes, strict=True
            )
        ]
