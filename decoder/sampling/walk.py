"""Walking down a draft tree along the tokens that the target chose."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retriever.tree import ROOT, DraftTree

Acceptance = tuple[NDArray[np.int64], int]
"""int64[k], the accepted nodes from the root downwards, and the target's token after them."""


def follow(
    tree: DraftTree,
    choose: Callable[[slice], Any],
    goes_on: Callable[[int], bool] | None = None,
    *,
    together: bool,
) -> Acceptance:
    """Walk down the tree as long as a child carries the token chosen for its parent.

    Args:
        tree: N nodes.
        choose: gives int64[n], an array or a tensor, the target's tokens for some rows: after the
            last token for row 0, after node n for row n + 1.
        goes_on: is told each chosen token before the next is; the walk ends where it says no.
        together: whether all rows are asked for before the walk; otherwise each is when the path
            comes by, and no other.
    """
    edges = zip(tree.parents.tolist(), tree.token_ids.tolist(), strict=True)
    children = {edge: node for node, edge in enumerate(edges)}
    choices = choose(slice(0, len(tree) + 1)).tolist() if together else None

    def chosen(row: int) -> int:
        return int(choose(slice(row, row + 1))) if choices is None else choices[row]

    path: list[int] = []
    node, token = ROOT, chosen(0)
    while (goes_on is None or goes_on(token)) and (
        child := children.get((node, token))
    ) is not None:
        path.append(child)
        node, token = child, chosen(child + 1)
    return np.array(path, np.int64), token
