"""How far a drafter's probabilities can be trusted, learned from what became of them."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from retriever.tree import ROOT, DraftTree, Source

_EDGES: Final = np.array([0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9], np.float32)
_NUM_SOURCES: Final = max(Source) + 1
_SHAPE: Final = len(_EDGES) + 1, _NUM_SOURCES
_DECAY: Final = 0.98
_PRIOR_NODES: Final = 3.0
_QUICK_DECAY: Final = 0.8
_SURPRISE: Final = 2.0
_FORGOTTEN: Final = 0.1


@dataclass(frozen=True, slots=True, eq=False)
class _Draft:
    """What was drafted last: its tree, the cell of each node, and what was made of it."""

    tree: DraftTree
    cells: NDArray[np.int64]
    corrected: NDArray[np.float64]


class Calibration:
    """Scales probabilities by how often nodes like them came true lately.

    Histogram binning (Zadrozny and Elkan, 2001) over a fading memory, with a cell for each bin
    of probability and each source. A cell leans on its bin and a bin on the drafter's word, until
    outcomes say otherwise. One draft says of a cell no more than a single sure node would: nodes
    of one path fall together. A drafter that is suddenly right again and again is given its word
    back: most of what spoke against it is forgotten.
    """

    def __init__(self) -> None:
        self._counts = np.zeros((2, *_SHAPE))  # nodes expected to come true, and those that did
        self._surprise = 0.0
        self._last: _Draft | None = None

    def corrected(self, tree: DraftTree) -> NDArray[np.float64]:
        """Return float64[N], a draft's probabilities corrected; they fall, from at most 1."""
        expected, accepted = self._counts.sum(axis=2, keepdims=True) + _PRIOR_NODES
        of_bins = accepted / expected
        trust = (self._counts[1] + _PRIOR_NODES * of_bins) / (self._counts[0] + _PRIOR_NODES)
        cells = np.searchsorted(_EDGES, tree.probabilities, side="right") * _NUM_SOURCES
        cells += tree.sources
        corrected: NDArray[np.float64] = tree.probabilities * trust.ravel()[cells]
        np.minimum(corrected, 1.0, out=corrected)
        np.minimum.accumulate(corrected, out=corrected)
        self._last = _Draft(tree, cells, corrected)
        return corrected

    def learn(self, num_verified: int, path: NDArray[np.int64], next_token: int) -> bool:
        """Take in what became of the last draft, that of it too which was not verified.

        Nodes beyond the verified ones are wrong unless they go on where the path ended; what
        follows `next_token` there is not known yet, and says nothing.

        Args:
            num_verified: how many of the draft's first nodes were verified.
            path: int64[k], those that were accepted, from a child of the root downwards.
            next_token: what the target chose after them.

        Returns:
            Whether the draft began rightly.
        """
        draft, self._last = self._last, None
        if draft is None or len(draft.tree) == 0:
            return False
        known, came_true = _outcomes(draft.tree, num_verified, path, next_token)
        cells, size = draft.cells[:known], self._counts[0].size
        expected = np.bincount(cells, draft.tree.probabilities[:known], minlength=size)
        accepted = np.bincount(draft.cells[came_true], minlength=size)
        share = 1 / np.maximum(expected, 1.0)
        self._counts *= _DECAY
        self._counts[0] += (expected * share).reshape(_SHAPE)
        self._counts[1] += (accepted * share).reshape(_SHAPE)
        is_hit = len(came_true) > 0
        self._notice(draft, is_hit=is_hit)
        return is_hit

    def _notice(self, draft: _Draft, *, is_hit: bool) -> None:
        """Forget what is out of date: first tokens came true much oftener than was thought."""
        likely = float(draft.corrected[draft.tree.parents == ROOT].sum())
        self._surprise = _QUICK_DECAY * self._surprise + is_hit - min(likely, 1.0)
        if self._surprise > _SURPRISE:
            self._surprise = 0.0
            self._counts *= _FORGOTTEN


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
