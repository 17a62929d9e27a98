"""Walking down a draft tree along the target's choices."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retriever.tree import ROOT, DraftTree

Acceptance = tuple[NDArray[np.int64], int]
"""int64[k], the accepted nodes from the root down, and the target's token after them."""


def follow(
    tree: DraftTree,
    choose: Callable[[slice], Any],
    goes_on: Callable[[int], bool] | None = None,
    *,
    together: bool,
) -> Acceptance:
    """Walk down the tree while a child has the token chosen after its parent.

    Args:
        tree: N nodes.
        choose: returns int64[n], an array or a tensor, the target's tokens for some rows: after the
            last token for row 0, after node n for row n + 1.
        goes_on: called with each token before the next is chosen; the walk ends if it returns
            false.
        together: whether all rows are chosen before the walk; otherwise only the rows on the path,
            as it reaches them.
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
