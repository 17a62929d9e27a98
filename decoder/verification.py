"""Which drafted tokens are accepted: pure functions of a tree and the target's logits.

Both rules let the target choose a token after every node and follow the children that agree
with it. The target's own choice is kept at every position, so the output is the target's,
whatever was drafted. For drafts that are certain of their token (they name it and give no
distribution) this is speculative sampling (Leviathan et al., 2023, arXiv:2211.17192; Chen et
al., 2023, arXiv:2302.01318) with q = 1: a token is kept with its probability under the target,
and the draw that disagrees is already distributed as the residual.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from retriever.tree import ROOT, DraftTree

Acceptance = tuple[NDArray[np.int64], int]
"""int64[k], the accepted nodes from the root downwards, and the target's token after them."""

AcceptRule = Callable[[DraftTree, torch.Tensor], Acceptance]
"""A rule that is given a tree of N nodes and the target's logits [1 + N, vocabulary]."""

_BLOCK = 256


def accept_greedy(tree: DraftTree, logits: torch.Tensor) -> Acceptance:
    """Follow the child that equals the target's most probable token.

    Args:
        tree: what was verified, N nodes.
        logits: [1 + N, vocabulary], the target's, after the last token and after each node.
    """
    return follow(tree, logits.argmax(dim=-1).tolist())


def accept_sampled(
    tree: DraftTree,
    logits: torch.Tensor,
    *,
    temperature: float,
    generator: torch.Generator | None = None,
) -> Acceptance:
    """Follow the child that equals a draw from the target's distribution.

    A token is drawn for every node at once, so that the device is waited for once. Only the
    draws on the path are used, and they are independent.

    Args:
        tree: what was verified, N nodes.
        logits: [1 + N, vocabulary], the target's, after the last token and after each node.
        temperature: logits are divided by it; more than zero.
        generator: source of randomness, on the logits' device.
    """
    probabilities = torch.softmax(logits.float() / temperature, dim=-1)
    return follow(tree, draw(probabilities, generator).tolist())


def follow(tree: DraftTree, choices: list[int]) -> Acceptance:
    """Walk down the tree as long as a child carries the token chosen for its parent.

    Args:
        tree: N nodes.
        choices: 1 + N tokens, the target's after the last token and after each node.
    """
    edges = zip(tree.parents.tolist(), tree.token_ids.tolist(), strict=True)
    children = {edge: node for node, edge in enumerate(edges)}
    path: list[int] = []
    node = ROOT
    while (child := children.get((node, choices[node + 1]))) is not None:
        path.append(child)
        node = child
    return np.array(path, np.int64), choices[node + 1]


def draw(probabilities: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """Draw one token for each row by inverting its distribution function.

    The function is summed in blocks and then inside one block, in double precision: a
    single-precision sum over a large vocabulary would lose the rare tokens, and
    `torch.multinomial` takes as long as a pass of a small model.

    Args:
        probabilities: float[rows, vocabulary], not negative; rows need not sum to one.
        generator: source of randomness, on the same device.

    Returns:
        int64[rows].
    """
    rows, size = probabilities.shape
    padded = torch.nn.functional.pad(probabilities, (0, -size % _BLOCK))
    blocks = padded.view(rows, -1, _BLOCK)
    ends = blocks.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    point = torch.rand(
        rows, 1, dtype=torch.float64, device=probabilities.device, generator=generator
    )
    point *= ends[:, -1:]
    block = _first_above(ends, point)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, _BLOCK))[:, 0].double().cumsum(-1)
    point -= torch.nn.functional.pad(ends, (1, 0)).gather(1, block)
    return (block * _BLOCK + _first_above(inside, point))[:, 0]


def _first_above(ends: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """Return int64[rows, 1], the first entry above a point; rounding never passes the last."""
    below_last = torch.nextafter(ends[:, -1:], torch.zeros_like(points))
    return torch.searchsorted(ends, torch.minimum(points, below_last), right=True)
