"""Growing a draft best first, several nodes in a pass.

The most probable prefixes of a tree of continuations, of which those that may have more of them
below are expanded: SpecExec (Svirschevski et al., 2024, arXiv:2406.02532), in passes of several
nodes as EAGLE-2 grows its trees (Li et al., 2024, arXiv:2406.16858).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from retriever.drafter import TokenIds
from retriever.tree import ROOT

_NOT_EXPANDED: Final = -1


@dataclass(frozen=True, slots=True, eq=False)
class Children:
    """Candidates for what follows one node.

    Attributes:
        tokens: int32[n].
        log_probabilities: float64[n], each given the node, falling and at most 0.
    """

    tokens: TokenIds
    log_probabilities: NDArray[np.float64]


class Frontier:
    """The most probable nodes known so far, and which of them were expanded.

    Nodes have numbers in the order in which they became known, so that parents precede children.

    Args:
        max_nodes: how many are kept.
        min_log_probability: of a path; less probable nodes are never kept.
        max_depth: nodes as deep as this are not expanded; `None` for no limit.

    Attributes:
        kept: int64[n], the nodes by falling probability.
        num_expanded: how many were expanded.
    """

    def __init__(
        self, max_nodes: int, min_log_probability: float = -np.inf, max_depth: int | None = None
    ) -> None:
        self._max_nodes = max_nodes
        self._min_log_probability = min_log_probability
        self._max_depth = max_depth
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.rows: list[int] = []
        self._depths: list[int] = []
        self._log_probabilities = np.empty(0)
        self.kept = np.empty(0, np.int64)
        self.num_expanded = 0

    def log_probabilities(self, nodes: NDArray[np.int64] | list[int]) -> NDArray[np.float64]:
        """Return float64[n], of the paths to nodes."""
        return self._log_probabilities[np.asarray(nodes, np.int64)]

    def worth_expanding(self, width: int) -> list[int]:
        """Return the most probable nodes, `width` at most, below which there may be more to keep.

        No node is more probable than its parent, so the last of a full tree has nothing to add.
        """
        if self._max_nodes == 0:
            return []
        is_full = len(self.kept) == self._max_nodes
        least = self._log_probabilities[self.kept[-1]] if is_full else -np.inf
        found: list[int] = []
        for node in self.kept.tolist():
            if len(found) == width or self._log_probabilities[node] <= least:
                break
            is_deep = self._max_depth is not None and self._depths[node] >= self._max_depth
            if self.rows[node] == _NOT_EXPANDED and not is_deep:
                found.append(node)
        return found

    def edges(self, nodes: list[int]) -> tuple[list[int], list[int]]:
        """Return the tokens of nodes, and their parents' numbers among the expanded ones."""
        above = [self.parents[node] for node in nodes]
        rows = [ROOT if parent == ROOT else self.rows[parent] for parent in above]
        return [self.tokens[node] for node in nodes], rows

    def kept_parents(self) -> NDArray[np.int32]:
        """Return int32[n], the parents of the kept nodes by their places among these."""
        places = np.full(len(self.tokens) + 1, ROOT, np.int32)
        places[self.kept] = np.arange(len(self.kept))
        return places[np.array(self.parents, np.int64)[self.kept]]

    def expand(self, nodes: list[int], children: list[Children]) -> None:
        """Take in what follows nodes, or the sequence: `ROOT`."""
        for node, each in zip(nodes, children, strict=True):
            if node != ROOT:
                self.rows[node] = self.num_expanded
                self.num_expanded += 1
            self._add(node, each)
        known = np.arange(len(self.tokens) - sum(len(each.tokens) for each in children))
        new = np.arange(len(known), len(self.tokens))
        candidates = np.concatenate([self.kept, new])
        values = self._log_probabilities[candidates]
        candidates = candidates[values >= self._min_log_probability]
        order = np.argsort(-self._log_probabilities[candidates], kind="stable")
        self.kept = candidates[order[: self._max_nodes]]

    def _add(self, node: int, children: Children) -> None:
        above, depth = (
            (0.0, 0) if node == ROOT else (self._log_probabilities[node], self._depths[node])
        )
        count = len(children.tokens)
        self.tokens.extend(children.tokens.tolist())
        self.parents.extend([node] * count)
        self.rows.extend([_NOT_EXPANDED] * count)
        self._depths.extend([depth + 1] * count)
        self._log_probabilities = np.concatenate(
            [self._log_probabilities, above + children.log_probabilities]
        )


def grow(
    frontier: Frontier,
    expand: Callable[[list[int]], list[Children]],
    width: int,
    max_passes: int,
    is_worthwhile: Callable[[NDArray[np.float64]], bool],
) -> list[list[int]]:
    """Expand a frontier until nothing is to be gained, and return the nodes of each pass.

    Args:
        frontier: which knows the children of the root.
        expand: what follows nodes, in one pass.
        width: most nodes of a pass.
        max_passes: most passes.
        is_worthwhile: whether a pass over nodes of these log probabilities pays.
    """
    passes: list[list[int]] = []
    while len(passes) < max_passes and (nodes := frontier.worth_expanding(width)):
        if not is_worthwhile(frontier.log_probabilities(nodes)):
            break
        frontier.expand(nodes, expand(nodes))
        passes.append(nodes)
    return passes
