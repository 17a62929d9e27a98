"""The layout of a draft tree in one forward pass: which rows see which, and their positions."""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from retriever.tree import DraftTree


@dataclass(frozen=True, slots=True, eq=False)
class TreeLayout:
    """The rows of one verification pass: the last committed token, then the tree's nodes.

    Attributes:
        visible: bool[1+N, 1+N], whether a row sees a column: the last committed token, its
            own ancestors and itself, and nothing else.
        depths: int64[1+N], distance of each row from the last committed token. Positions
            follow from it, so siblings share one.
    """

    visible: NDArray[np.bool_]
    depths: NDArray[np.int64]

    @classmethod
    def of(cls, tree: DraftTree) -> Self:
        """Lay out a tree."""
        visible = np.eye(len(tree) + 1, dtype=np.bool_)
        visible[:, 0] = True
        for row, parent in enumerate(tree.parents.tolist(), start=1):
            visible[row] |= visible[parent + 1]
        return cls(visible, visible.sum(axis=1) - 1)


def additive_mask(
    visible: torch.Tensor, depths: torch.Tensor, past: int, window: int | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return the attention mask of one verification pass over `past` cached tokens.

    Additive and floating, because eager attention adds a boolean mask as numbers.
    The window is counted in positions: by slots, siblings would push each other out of it.

    Args:
        visible: bool[W, W] on the model's device, see `TreeLayout`.
        depths: int64[W] on the model's device.
        past: tokens in the cache; the token in slot i stands at position i.
        window: positions that a sliding layer looks back over, itself included; `None` for
            full attention.
        dtype: the model's.

    Returns:
        dtype[1, 1, W, past + W], zero where attention is allowed.
    """
    width = len(depths)
    lowest = torch.finfo(dtype).min
    mask = torch.zeros(width, past + width, dtype=dtype, device=visible.device)
    mask[:, past:].masked_fill_(~visible, lowest)
    if window is not None:
        rows = depths + past
        columns = torch.cat([torch.arange(past, device=rows.device), rows])
        mask.masked_fill_(rows[:, None] - columns[None, :] >= window, lowest)
    return mask[None, None]


def within_depth(tree: DraftTree, max_depth: int) -> DraftTree:
    """Return the tree without the nodes deeper than `max_depth`.

    Parents lie less deep than their children, so what remains is a valid tree.
    """
    kept = tree.depths() <= max_depth
    if kept.all():
        return tree
    return tree.among(kept)
