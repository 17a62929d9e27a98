"""Calibrating the probabilities of drafts by the outcomes of their nodes."""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from retriever.tree import ROOT, DraftTree


class Calibration:
    """Scales probabilities by how often nodes like them came true lately.

    Histogram binning (Zadrozny and Elkan, 2001) over a fading memory, with a cell for each source
    and each bin of probability. A cell leans on its bin and a bin on the probability as stated,
    until outcomes say otherwise. It corrects downwards and upwards: where a target is decoded
    greedily, its choice is more certain than a draft model can tell. There are as many sources as
    were seen.

    Args:
        edges: where bins of probability end, rising.
        decay: what an outcome counts for after one more draft has been learned from.
        prior_nodes: nodes that a cell, and a bin, is taken to have been right about before any.
        most_from_draft: nodes that one draft may count for in a cell; as many as it has if not
            given. Nodes of one path come true or fail together.
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
        # float64[2, sources, bins]: nodes expected to come true, and those that did
        self._counts = np.zeros((2, 1, len(self._edges) + 1))

    def corrected(
        self, probabilities: NDArray[np.floating[Any]], sources: NDArray[np.uint8] | None = None
    ) -> NDArray[np.float64]:
        """Return float64[n], probabilities corrected; they fall, from at most 1.

        Args:
            probabilities: float[n] as stated, falling.
            sources: uint8[n]; one for all if not given.
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
        """Learn from the nodes of a draft whose outcome is known.

        Args:
            probabilities: float[n] as stated, not as corrected.
            came_true: bool[n].
            sources: uint8[n]; one for all if not given.
        """
        cells, size = self._cells(probabilities, sources), self._counts[0].size
        of_draft = np.empty((2, size))
        of_draft[0] = np.bincount(cells, probabilities, minlength=size)
        of_draft[1] = np.bincount(cells[came_true], minlength=size)
        of_draft /= np.maximum(of_draft[0] / self._most_from_draft, 1.0)
        self._counts *= self._decay
        self._counts += of_draft.reshape(self._counts.shape)

    def forget(self, kept: float) -> None:
        """Let all that was learned count for a share `kept` of what it did."""
        self._counts *= kept

    def _trust(self) -> NDArray[np.float64]:
        """Return float64[sources, bins], what probabilities are multiplied by."""
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
        """Return int64[n], the cell of each node; makes room for sources that are new."""
        cells: NDArray[np.int64] = self._edges.searchsorted(probabilities, side="right")
        if sources is None or len(sources) == 0:
            return cells
        _, known, num_bins = self._counts.shape
        new = max(sources.tolist()) + 1 - known
        if new > 0:
            self._counts = np.concatenate([self._counts, np.zeros((2, new, num_bins))], axis=1)
        cells += np.multiply(sources, num_bins, dtype=np.int64)
        return cells


# Simulated decoding is that of `budget.py`, with one number changed at a time.

_EDGES: Final = np.array([0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9], np.float32)
"""Finer where a node may or may not pay, between 0.05 and 0.9; one below never does. In
simulated decoding one bin above and one below a half bring 6% less where drafts are steady, and 20
bins bring the same to 5% more, but each of them learns from fewer nodes."""

_DECAY: Final = 0.98
"""Some fifty drafts: a cell has a node in each few drafts. In simulated decoding 0.995 loses 4%
with a slow drafter. 0.95 gains 11% where the text turns every 100 steps, as it knows no cell that
is rarely used; with several sources and real text there are many."""

_PRIOR_NODES: Final = 3.0
"""Three sure nodes in a row that fail halve the trust in a bin. With 10 a drafter that changes
sides is believed too long, which costs up to 10% in simulated decoding; 1 brings up to 2% more
there, but lets a single failure halve the trust."""

_SURPRISE_DECAY: Final = 0.8
_MOST_SURPRISE: Final = 2.0
"""Hits beyond what was expected, each fading by a fifth in a step: three in a row of a drafter that
was thought to be wrong. In simulated decoding 4 is never reached, which costs up to 1%, as does a
decay of 0.6; 1 costs 1% where drafts are steady and gains up to 8% where a drafter changes
sides."""

_KEPT_AFTER_SURPRISE: Final = 0.1
"""What was learned then speaks for about five drafts more. Nothing kept, or half, brings 1 to 2%
less in simulated decoding with a drafter that changes sides."""


@dataclass(frozen=True, slots=True, eq=False)
class CorrectedDraft:
    """A draft, and its corrected probabilities.

    Attributes:
        tree: as drafted, N nodes.
        probabilities: float64[N]; they fall, from at most 1.
    """

    tree: DraftTree
    probabilities: NDArray[np.float64]


class DraftCalibration:
    """Calibrates the trees of a drafter by the passes that verify some of them.

    Where a drafter is suddenly right several times in a row, most of what was learned before is
    forgotten.
    """

    def __init__(self) -> None:
        self._calibration = Calibration(_EDGES, _DECAY, _PRIOR_NODES, most_from_draft=1.0)
        self._surprise = 0.0

    def corrected(self, tree: DraftTree) -> CorrectedDraft:
        """Correct a draft's probabilities."""
        return CorrectedDraft(tree, self._calibration.corrected(tree.probabilities, tree.sources))

    def learn(
        self, draft: CorrectedDraft, num_verified: int, path: NDArray[np.int64], next_token: int
    ) -> bool:
        """Learn from a draft, including the nodes that were not verified.

        Nodes beyond the verified ones are wrong unless they continue where the path ended; those
        that follow `next_token` there have no known outcome yet and do not count.

        Args:
            draft: as it was corrected.
            num_verified: how many of the draft's first nodes were verified.
            path: int64[k], those that were accepted, from a child of the root downwards.
            next_token: what the target chose after them.

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
        """Fade what was learned once first tokens come true much more often than expected."""
        likely = float(draft.probabilities[draft.tree.parents == ROOT].sum())
        self._surprise = _SURPRISE_DECAY * self._surprise + is_hit - min(likely, 1.0)
        if self._surprise > _MOST_SURPRISE:
            self._surprise = 0.0
            self._calibration.forget(_KEPT_AFTER_SURPRISE)


def _outcomes(
    tree: DraftTree, num_verified: int, path: NDArray[np.int64], next_token: int
) -> tuple[int, NDArray[np.int64]]:
    """Return how many of the first nodes have a known outcome, and which came true."""
    tip = int(path[-1]) if len(path) else ROOT
    beyond = slice(num_verified, None)
    goes_on = (tree.parents[beyond] == tip) & (tree.token_ids[beyond] == next_token)
    if not goes_on.any():
        return len(tree), path
    node = num_verified + int(goes_on.argmax())
    children = np.flatnonzero(tree.parents == node)
    known = int(children[0]) if len(children) else len(tree)
    return known, np.append(path, node)
