"""Calibrates draft probabilities by whether earlier nodes were accepted."""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from retriever.tree import ROOT, DraftTree


class Calibration:
    """Scales probabilities by how often similar nodes were right recently.

    The method is histogram binning (Zadrozny and Elkan, 2001) with exponential forgetting, with a
    cell for each source and probability bin. A cell's prior is the correction of its bin; a bin's
    prior is no correction. Corrections also go up: in greedy decoding the target's choice is more
    certain than a draft model's probabilities say. New sources get cells as they appear.

    Args:
        edges: upper edges of the probability bins, ascending.
        decay: each new draft multiplies the weight of earlier outcomes by this factor.
        prior_nodes: prior weight of a cell and of a bin, as a number of correctly predicted nodes.
        most_from_draft: most weight of one draft in a cell, in nodes, because the outcomes of nodes
            on a path are correlated; unlimited if not given.
    """

    def __init__(
        self,
        edges: ArrayLike,
        decay: float,
        prior_nodes: float,
        most_from_draft: float = np.inf,
    ) -> None:
        self._edges = np.asarray(edges)
        self._decay = decay
        self._prior_nodes = prior_nodes
        self._most_from_draft = most_from_draft
        # float64[2, sources, bins]: number of nodes expected to be right, and of nodes that were
        self._counts = np.zeros((2, 1, len(self._edges) + 1))

    def corrected(
        self, probabilities: NDArray[np.floating[Any]], sources: NDArray[np.uint8] | None = None
    ) -> NDArray[np.float64]:
        """Return float64[n], the corrected probabilities, descending and at most 1.

        Args:
            probabilities: float[n], the drafter's probabilities, descending.
            sources: uint8[n], the `Source` of each node; the same for all if not given.
        """
        cells = self._cells(probabilities, sources)
        corrected: NDArray[np.float64] = probabilities * self._trust().ravel()[cells]
        np.minimum(corrected, 1.0, out=corrected)
        np.minimum.accumulate(corrected, out=corrected)
        return corrected

    def learn(
        self,
        probabilities: NDArray[np.floating[Any]],
        came_true: NDArray[np.bool_],
        sources: NDArray[np.uint8] | None = None,
    ) -> None:
        """Learn from the nodes of a draft whose outcomes are known.

        Args:
            probabilities: float[n], the drafter's uncorrected probabilities.
            came_true: bool[n], whether each node was right.
            sources: uint8[n], the `Source` of each node; the same for all if not given.
        """
        cells, size = self._cells(probabilities, sources), self._counts[0].size
        of_draft = np.empty((2, size))
        of_draft[0] = np.bincount(cells, probabilities, minlength=size)
        of_draft[1] = np.bincount(cells[came_true], minlength=size)
        of_draft /= np.maximum(of_draft[0] / self._most_from_draft, 1.0)
        self._counts *= self._decay
        self._counts += of_draft.reshape(self._counts.shape)

    def forget(self, kept: float) -> None:
        """Scale the weight of everything learned so far by `kept`."""
        self._counts *= kept

    def _trust(self) -> NDArray[np.float64]:
        """Return float64[sources, bins], the factors that correct probabilities."""
        prior = self._prior_nodes
        expected, right = self._counts.sum(axis=1) + prior
        of_bins: NDArray[np.float64] = right / expected
        if self._counts.shape[1] == 1:
            return of_bins
        expected, right = self._counts
        of_cells: NDArray[np.float64] = (right + prior * of_bins) / (expected + prior)
        return of_cells

    def _cells(
        self, probabilities: NDArray[np.floating[Any]], sources: NDArray[np.uint8] | None
    ) -> NDArray[np.int64]:
        """Return int64[n], the cell of each node; adds cells for new sources."""
        cells: NDArray[np.int64] = self._edges.searchsorted(probabilities, side="right")
        if sources is None or len(sources) == 0:
            return cells
        _, known, num_bins = self._counts.shape
        new = max(sources.tolist()) + 1 - known
        if new > 0:
            self._counts = np.concatenate([self._counts, np.zeros((2, new, num_bins))], axis=1)
        cells += np.multiply(sources, num_bins, dtype=np.int64)
        return cells


# "Simulated decoding" is the simulation described in `budget.py`; one constant was changed at a
# time.

_EDGES: Final = np.array([0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9], np.float32)
"""Edges of the probability bins, finer between 0.05 and 0.9, where a node may or may not pay off;
below, it never does. In simulated decoding two bins, split at 0.5, are 6% slower with steady
drafters. 20 bins are 0 to 5% faster, but each bin learns from fewer nodes."""

_DECAY: Final = 0.98
"""Decay per draft: about 50 drafts count, because a cell gets a node only every few drafts. In
simulated decoding 0.995 loses 4% with a slow drafter. 0.95 gains 11% if the text changes every 100
steps, but only because the simulation has no rarely used cells; with several sources and real text
there are many."""

_PRIOR_NODES: Final = 3.0
"""Prior weight, in nodes: three wrong nodes in a row that seemed certain halve the trust in a bin.
With 10 a drafter that turns wrong is trusted too long, which costs up to 10% in simulated decoding.
With 1 it is up to 2% faster, but a single failure then halves the trust."""

_SURPRISE_DECAY: Final = 0.8
_MOST_SURPRISE: Final = 2.0
"""Largest excess of hits over the expected number; the excess decays by a fifth per step. Three
hits in a row exceed this limit if the drafter was believed to be wrong. In simulated decoding a
limit of 4 is never reached, which costs up to 1%. A decay of 0.6 costs as much. A limit of 1 costs
1% with steady drafters and gains up to 8% if a drafter switches between right and wrong."""

_KEPT_AFTER_SURPRISE: Final = 0.1
"""Share of their weight that earlier drafts keep after such a surprise: they then count as about
five drafts. If they keep no weight, or half of it, simulated decoding is 1 to 2% slower with a
drafter that switches between right and wrong."""


@dataclass(frozen=True, slots=True, eq=False)
class CorrectedDraft:
    """A draft and its corrected probabilities.

    Attributes:
        tree: the tree as drafted, N nodes.
        probabilities: float64[N], the corrected probability of each node, descending and at most 1.
    """

    tree: DraftTree
    probabilities: NDArray[np.float64]


class DraftCalibration:
    """Calibrates a drafter's trees by the passes that verify some of their nodes.

    If a drafter is suddenly right several times in a row, it forgets most of what it learned
    before.
    """

    def __init__(self) -> None:
        self._calibration = Calibration(_EDGES, _DECAY, _PRIOR_NODES, most_from_draft=1.0)
        self._surprise = 0.0

    def corrected(self, tree: DraftTree) -> CorrectedDraft:
        """Return a draft with corrected probabilities."""
        return CorrectedDraft(tree, self._calibration.corrected(tree.probabilities, tree.sources))

    def learn(
        self, draft: CorrectedDraft, num_verified: int, path: NDArray[np.int64], next_token: int
    ) -> bool:
        """Learn from a draft, including its unverified nodes.

        Unverified nodes are wrong, except a node with `next_token` after the end of the path. The
        outcome of nodes below that node is unknown, so they do not count.

        Args:
            draft: the corrected draft.
            num_verified: how many of the draft's first nodes were verified.
            path: int64[k], the accepted nodes, from a child of the root down.
            next_token: the target's token after the accepted nodes.

        Returns:
            Whether the first token of the draft was right.
        """
        tree = draft.tree
        if len(tree) == 0:
            return False
        num_known, right = _outcomes(tree, num_verified, path, next_token)
        came_true = np.zeros(num_known, np.bool_)
        came_true[right] = True
        self._calibration.learn(tree.probabilities[:num_known], came_true, tree.sources[:num_known])
        is_hit = len(right) > 0
        self._notice(draft, is_hit=is_hit)
        return is_hit

    def _notice(self, draft: CorrectedDraft, *, is_hit: bool) -> None:
        """Forget most if drafts' first tokens are right much more often than expected."""
        likely = float(draft.probabilities[draft.tree.parents == ROOT].sum())
        self._surprise = _SURPRISE_DECAY * self._surprise + is_hit - min(likely, 1.0)
        if self._surprise > _MOST_SURPRISE:
            self._surprise = 0.0
            self._calibration.forget(_KEPT_AFTER_SURPRISE)


def _outcomes(
    tree: DraftTree, num_verified: int, path: NDArray[np.int64], next_token: int
) -> tuple[int, NDArray[np.int64]]:
    """Return how many of the tree's first nodes have a known outcome, and which were right."""
    tip = int(path[-1]) if len(path) else ROOT
    beyond = slice(num_verified, None)
    goes_on = (tree.parents[beyond] == tip) & (tree.token_ids[beyond] == next_token)
    if not goes_on.any():
        return len(tree), path
    node = num_verified + int(goes_on.argmax())
    children = np.flatnonzero(tree.parents == node)
    known = int(children[0]) if len(children) else len(tree)
    return known, np.append(path, node)
