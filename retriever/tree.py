"""The draft tree: the one value that drafters give and verifiers take."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from retriever.errors import InvalidTreeError

ROOT: Final = -1
"""Parent of the first drafted tokens: the last committed token."""

PROBABILITY_SLACK: Final = 1e-6
"""By so much a probability may be beyond its bound: it is rounding."""


class Source(IntEnum):
    """Which database spoke for a node. The numbers are those of the wire contract.

    `MODEL` stands for models: a draft model, or the target's own logits of earlier passes.
    """

    UNSPECIFIED = 0
    CONTEXT = 1
    GENERATIONS = 2
    PHRASES = 3
    CORPUS = 4
    MODEL = 5


@dataclass(frozen=True, slots=True, eq=False)
class DraftTree:
    """Continuations of a sequence as a tree, most probable node first.

    Every parent precedes its children and probabilities fall from node to node, hence every
    prefix of a tree is itself a valid tree, and the best one of its size. Trees from outside
    enter through `checked`; the constructor trusts its arguments.

    Attributes:
        token_ids: int32[N], the drafted tokens.
        parents: int32[N], index of the parent node, `ROOT` for children of the last
            committed token.
        probabilities: float32[N], estimate that the node and all its ancestors are accepted.
        sources: uint8[N], the `Source` that spoke for each node.
    """

    token_ids: NDArray[np.int32]
    parents: NDArray[np.int32]
    probabilities: NDArray[np.float32]
    sources: NDArray[np.uint8]

    @classmethod
    def empty(cls) -> Self:
        """Return the tree without nodes, which is what a miss looks like."""
        return cls(
            np.empty(0, np.int32),
            np.empty(0, np.int32),
            np.empty(0, np.float32),
            np.empty(0, np.uint8),
        )

    @classmethod
    def checked(
        cls,
        token_ids: ArrayLike,
        parents: ArrayLike,
        probabilities: ArrayLike,
        sources: ArrayLike,
        *,
        vocabulary_size: int | None = None,
    ) -> Self:
        """Build a tree from arrays of unknown origin.

        Raises:
            InvalidTreeError: the arrays break one of the tree's rules; the message says which.
        """
        tree = cls(
            _array(token_ids, np.int32, "token_ids"),
            _array(parents, np.int32, "parents"),
            _array(probabilities, np.float32, "probabilities"),
            _array(sources, np.uint8, "sources"),
        )
        _check_values(tree, vocabulary_size)
        _check_structure(tree)
        return tree

    def __len__(self) -> int:
        return len(self.token_ids)

    def depths(self) -> NDArray[np.int32]:
        """Return int32[N], the distance of each node from the root: 1 for its children."""
        depths = np.empty(len(self), np.int32)
        for node, parent in enumerate(self.parents.tolist()):
            depths[node] = 1 if parent == ROOT else depths[parent] + 1
        return depths

    def prefix(self, num_nodes: int) -> Self:
        """Return the tree of the first `num_nodes` nodes: the best one of that size."""
        if num_nodes >= len(self):
            return self
        return type(self)(
            self.token_ids[:num_nodes],
            self.parents[:num_nodes],
            self.probabilities[:num_nodes],
            self.sources[:num_nodes],
        )

    def among(self, kept: NDArray[np.bool_]) -> "DraftTree":
        """Return the tree of the kept nodes, bool[N], whose parents are kept, too."""
        renumbered = np.append(np.cumsum(kept, dtype=np.int32) - 1, np.int32(ROOT))
        return DraftTree(
            self.token_ids[kept],
            renumbered[self.parents[kept]].astype(np.int32),
            self.probabilities[kept],
            self.sources[kept],
        )

    def best_chain(self, max_tokens: int) -> "DraftTree":
        """Return the path from the root that is expected to have most of its tokens accepted.

        The expectation of a path is the sum of its nodes' probabilities. For verifiers that
        take only chains; a chain is a tree.
        """
        expected = self.probabilities.astype(np.float64)
        depths = self.depths()
        for node, parent in enumerate(self.parents.tolist()):
            if parent != ROOT:
                expected[node] += expected[parent]
        within = np.flatnonzero(depths <= max_tokens)
        if len(within) == 0:
            return DraftTree.empty()
        path = self.path_to(int(within[np.argmax(expected[within])]))
        parents = np.arange(-1, len(path) - 1, dtype=np.int32)
        return DraftTree(
            self.token_ids[path], parents, self.probabilities[path], self.sources[path]
        )

    def follow(self, tokens: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """Return int64[k], the nodes of the longest path that the tokens begin with.

        Args:
            tokens: integers[n], what comes after the last committed token.
        """
        path: list[int] = []
        current, wanted = ROOT, tokens[: len(self)].tolist()
        nodes = enumerate(zip(self.parents.tolist(), self.token_ids.tolist(), strict=True))
        for node, (parent, token) in nodes:
            if parent == current and len(path) < len(wanted) and token == wanted[len(path)]:
                path.append(node)
                current = node
        return np.array(path, np.int64)

    def path_to(self, node: int) -> NDArray[np.int64]:
        """Return int64[depth], the nodes from the root's child down to `node`."""
        path = []
        while node != ROOT:
            path.append(node)
            node = int(self.parents[node])
        return np.array(path[::-1], np.int64)


def _array(values: ArrayLike, dtype: type[np.generic], name: str) -> NDArray[Any]:
    """Convert without loss or say what is wrong."""
    array = np.asarray(values)
    if array.size == 0:
        return np.empty(0, dtype)
    if array.ndim != 1:
        raise InvalidTreeError(f"{name} must have one dimension, not {array.ndim}")
    converted = array.astype(dtype)
    if np.issubdtype(dtype, np.integer) and not np.array_equal(converted, array):
        raise InvalidTreeError(f"{name} does not fit {np.dtype(dtype).name}")
    return converted


def _check_values(tree: DraftTree, vocabulary_size: int | None) -> None:
    sizes = {len(tree.token_ids), len(tree.parents), len(tree.probabilities), len(tree.sources)}
    if len(sizes) != 1:
        raise InvalidTreeError(f"arrays of a tree differ in length: {sorted(sizes)}")
    if len(tree) == 0:
        return
    if tree.token_ids.min() < 0:
        raise InvalidTreeError("token ids must not be negative")
    if vocabulary_size is not None and tree.token_ids.max() >= vocabulary_size:
        raise InvalidTreeError(
            f"token id {tree.token_ids.max()} is outside the vocabulary of {vocabulary_size}"
        )
    if not np.all((tree.probabilities >= 0) & (tree.probabilities <= 1 + PROBABILITY_SLACK)):
        raise InvalidTreeError("probabilities must lie between 0 and 1")
    if tree.sources.max() > max(Source):
        raise InvalidTreeError(f"unknown source {tree.sources.max()}")


def _check_structure(tree: DraftTree) -> None:
    nodes = np.arange(len(tree))
    if np.any(tree.parents < ROOT) or np.any(tree.parents >= nodes):
        raise InvalidTreeError("every parent must be the root (-1) or an earlier node")
    if np.any(np.diff(tree.probabilities) > PROBABILITY_SLACK):
        raise InvalidTreeError("nodes must stand in order of falling probability")
    siblings = np.stack([tree.parents, tree.token_ids])
    if np.unique(siblings, axis=1).shape[1] != len(tree):
        raise InvalidTreeError("two children of one node carry the same token")
