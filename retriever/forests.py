"""Many draft trees of one message, made and checked together: numpy is slow to begin with."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from retriever.tree import PROBABILITY_SLACK, ROOT, DraftTree, Source
from retriever.v1 import retriever_pb2 as pb

_MAX_TOKEN_ID: Final = (1 << 31) - 1
_HIGHEST_SOURCE: Final = max(Source)


@dataclass(frozen=True, slots=True)
class Forest:
    """Trees behind one another.

    Attributes:
        token_ids: int64[n].
        parents: int64[n], in nodes of the own tree.
        probabilities: float32[n].
        sources: int64[n].
        ends: where each tree ends.
    """

    token_ids: NDArray[np.int64]
    parents: NDArray[np.int64]
    probabilities: NDArray[np.float32]
    sources: NDArray[np.int64]
    ends: list[int]

    @classmethod
    def of(cls, messages: Sequence[pb.DraftTree]) -> Self:
        """Return the trees of messages as they are."""
        token_ids: list[int] = []
        parents: list[int] = []
        probabilities: list[float] = []
        sources: list[int] = []
        for message in messages:
            token_ids += message.token_ids
            parents += message.parents
            probabilities += message.probabilities
            sources += message.sources
        return cls(
            np.array(token_ids, np.int64),
            np.array(parents, np.int64),
            np.array(probabilities, np.float32),
            np.array(sources, np.int64),
            list(accumulate(_num_nodes(message) for message in messages)),
        )

    @property
    def is_valid(self) -> bool:
        """Whether each is a tree by the rules of `DraftTree.checked`."""
        size = self.ends[-1] if self.ends else 0
        arrays = (self.token_ids, self.parents, self.probabilities, self.sources)
        if min(self.ends, default=0) < 0 or any(len(each) != size for each in arrays):
            return False
        return size == 0 or self._has_valid_nodes()

    def trees(self) -> list[DraftTree]:
        """Return the trees, which share memory; unknown sources are unspecified."""
        known = (self.sources >= 0) & (self.sources <= _HIGHEST_SOURCE)
        token_ids, parents = self.token_ids.astype(np.int32), self.parents.astype(np.int32)
        sources = np.where(known, self.sources, int(Source.UNSPECIFIED)).astype(np.uint8)
        begin, trees = 0, []
        for end in self.ends:
            part = slice(begin, end)
            trees.append(
                DraftTree(token_ids[part], parents[part], self.probabilities[part], sources[part])
            )
            begin = end
        return trees

    def _has_valid_nodes(self) -> bool:
        starts = np.array([0, *self.ends[:-1]])
        lengths = np.diff(np.array([0, *self.ends]))
        first = np.repeat(starts, lengths)  # node of each node's tree
        places = np.arange(len(first))
        probabilities = self.probabilities
        # Children of roots get numbers of their own for each tree, behind those of all nodes.
        tree = np.repeat(np.arange(len(lengths)), lengths)
        siblings = np.where(self.parents == ROOT, len(first) + tree, first + self.parents)
        falls = (np.diff(probabilities) <= PROBABILITY_SLACK) | (first[1:] == places[1:])
        return bool(
            self.token_ids.max() <= _MAX_TOKEN_ID
            and np.all((self.parents >= ROOT) & (self.parents < places - first))
            and np.all((probabilities >= 0) & (probabilities <= 1 + PROBABILITY_SLACK))
            and np.all(falls)
            and len(np.unique((siblings << 31) + self.token_ids)) == len(first)
        )


def _num_nodes(message: pb.DraftTree) -> int:
    """Return how many nodes a tree has, or a number that spoils the sum if it is no tree."""
    size = len(message.token_ids)
    others = {len(message.parents), len(message.probabilities), len(message.sources)}
    return size if others == {size} else -(1 << 40)
