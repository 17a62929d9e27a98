"""Draft trees as SGLang's NGRAM worker has them: a fixed number of nodes, and a mask.

Node 0 is the last committed token. Row i of the mask is 1 for node i and for its ancestors. From
that alone SGLang makes its links: a node's first child is the first later node that sees it, its
next sibling the next node with the same parent, and verification goes from node 0 along these.

So padding is nodes that see nothing but themselves. They are nobody's child, and, having no
parent, nobody's sibling: no link leads to one, whatever the target chooses and whatever token they
carry. Siblings must differ, too: sampling adds up the probabilities of the siblings that it passes,
so that a token which stands twice is drawn too often. Those of a `DraftTree` do.

Source: sglang 0.5.23, `reconstructIndicesFromTreeMask`, `VerifyTreeGreedy` and
`TreeSpeculativeSamplingTargetOnly`.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from retriever.tree import ROOT, DraftTree

NO_PARENT: Final = -1
"""Parent of node 0, and of padding."""

Nodes = NDArray[np.int64]
"""int64[2, rows, width]: tokens, and parents as places in the row."""


def lay_out(trees: Sequence[DraftTree], last_tokens: Sequence[int], width: int) -> Nodes:
    """Return trees as rows of equal width, each behind the token that it goes on from.

    A larger tree is cut; a smaller one is padded, with its last committed token, which every model
    has an embedding for.

    Args:
        trees: one for each row.
        last_tokens: the last committed token of each.
        width: nodes of a row, node 0 included.
    """
    nodes = np.empty((2, len(trees), width), np.int64)
    tokens, parents = nodes
    tokens[:] = np.asarray(last_tokens, np.int64)[:, np.newaxis]
    parents[:] = NO_PARENT
    for row, tree in enumerate(trees):
        kept = tree.prefix(width - 1)
        tokens[row, 1 : 1 + len(kept)] = kept.token_ids
        parents[row, 1 : 1 + len(kept)] = kept.parents - ROOT
    return nodes


def masks_of(parents: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return int64[rows, width, width]: which nodes each node sees, itself and its ancestors.

    Args:
        parents: int64[rows, width]; of a node, an earlier one or `NO_PARENT`.
    """
    num_rows, width = parents.shape
    masks = np.zeros((num_rows, width, width), np.int64)
    rows, nodes = np.arange(num_rows), np.arange(width)
    for node in np.flatnonzero((parents != NO_PARENT).any(axis=0)).tolist():
        above = masks[rows, parents[:, node]]
        above[rows, parents[:, node]] = 1
        masks[:, node] = above * (parents[:, node, np.newaxis] != NO_PARENT)
    masks[:, nodes, nodes] = 1
    return masks
