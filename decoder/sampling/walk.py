"""Walks down a draft tree along the tokens that the target chooses."""

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
    """Walk down the tree as long as a child has the token chosen after its parent.

    Args:
        tree: the verified tree, N nodes.
        choose: returns int64[n], an array or a tensor, the target's tokens for a slice of rows: row
            0 is after the last token, row n + 1 after node n.
        goes_on: called with each token before the next token is chosen; if it returns false, the
            walk ends.
        together: whether the tokens of all rows are chosen before the walk; otherwise only those of
            rows on the path, when the walk reaches them.
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
