"""Chooses the target's token after each node: greedily, by sampling, or by rejection sampling."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from decoder.sampling.verification import CERTAIN, SampledTree, draw, is_waited_for

NOTHING: Final = -1
"""Stands for the chosen token if no token is possible."""


Chooser = Callable[[torch.Tensor, slice], torch.Tensor]
"""Chooses tokens for one tree; called with one row or several.

It takes float32[n, vocabulary], the processed logits, and their row numbers: row 0 is after the
last token, row n + 1 after node n. It returns int64[n], a token or `NOTHING` for each row.
"""


def most_probable(scores: torch.Tensor, _rows: slice) -> torch.Tensor:
    """Choose the most probable token of each row; a `Chooser` for any tree."""
    best = scores.max(dim=-1)
    return best.indices.masked_fill(best.values.isnan() | best.values.isneginf(), NOTHING)


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """Samples a token from each row's distribution.

    Nodes of the same depth share a random number: at most one of these nodes is on the path, and
    the numbers of earlier depths decide which one. A sampled draft token is compared with the
    sampled token like any other draft token. The draft model used other random numbers, so the two
    are independent.

    Attributes:
        depths: int64[1 + N], depths of the last token and of each node.
        points: float64[1 + greatest depth], a random number in [0, 1) for each depth.
    """

    depths: NDArray[np.int64]
    points: NDArray[np.float64]

    def __call__(self, scores: torch.Tensor, rows: slice) -> torch.Tensor:
        """Choose a token for each row."""
        return drawn(scores, torch.from_numpy(self.points[self.depths[rows]]))


def drawn(scores: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """Return int64[n], a token sampled from each row at its random number, or `NOTHING`."""
    probabilities = torch.softmax(scores, dim=-1)
    return draw(probabilities, points).masked_fill(probabilities[:, 0].isnan(), NOTHING)


@dataclass(frozen=True, slots=True, eq=False)
class DrawnChildren:
    """The sampled children of each row, padded to the largest number of any row.

    Attributes:
        tokens: int64[1 + N, most], the children's tokens in the order of their nodes.
        proposals: int64[1 + N, most], each child's row of the tree's proposals; `CERTAIN` for
            padding.
        counts: int64[1 + N], number of sampled children of each row.
    """

    tokens: NDArray[np.int64]
    proposals: NDArray[np.int64]
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, tree: SampledTree) -> "DrawnChildren":
        """Find the sampled children in a tree."""
        children: list[list[int]] = [[] for _ in range(len(tree) + 1)]
        for node in np.flatnonzero(tree.rows != CERTAIN).tolist():
            children[tree.parents[node] + 1].append(node)
        counts = np.array([len(nodes) for nodes in children])
        shape = (len(children), int(counts.max()))
        found = cls(np.zeros(shape, np.int64), np.full(shape, CERTAIN, np.int64), counts)
        for row, nodes in enumerate(children):
            found.tokens[row, : len(nodes)] = tree.token_ids[nodes]
            found.proposals[row, : len(nodes)] = tree.rows[nodes]
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Rejection:
    """Accepts sampled children based on the distributions from which they were sampled.

    The method is multi-candidate speculative sampling without replacement: SpecInfer (Miao et al.,
    2023, arXiv:2305.09781), MCSD (Yang et al., 2024, arXiv:2401.06706), recursive rejection
    sampling (Jeon et al., 2024, arXiv:2402.14160). Let p be the target's distribution and q the
    child's proposal without earlier siblings. Child x is accepted with probability min(1, p(x) /
    q(x)). Otherwise p becomes the residual, max(p - q, 0) normalised, and the next child is tried.
    When no child is left, the token is sampled from p.

    The method is exact. Token x is accepted with probability q(x) min(1, p(x) / q(x)) = min(p(x),
    q(x)). A rejection has probability 1 - sum(min(p, q)) = sum(max(p - q, 0)). Then x follows with
    its share of the residual, in total max(p(x) - q(x), 0). The two add up to p(x). The step after
    a rejection is the same with the residual as p, so by induction the token after a rejection is
    distributed as the residual. A certain child is a proposal with all its probability on one
    token. For such a child the rule amounts to sampling a token and comparing it, which the last
    step does.

    Attributes:
        children: the tree's sampled children.
        proposals: float[rows, n], the proposed distributions; tokens from n on have probability 0.
        depths: int64[1 + N], depths of the last token and of each node.
        points: float64[1 + greatest depth, most + 1], random numbers in [0, 1) for each child, and
            one for the token sampled last.
    """

    children: DrawnChildren
    proposals: torch.Tensor
    depths: NDArray[np.int64]
    points: NDArray[np.float64]

    def __call__(self, scores: torch.Tensor, rows: slice) -> torch.Tensor:
        """Choose a token for each row."""
        target = torch.softmax(scores.double(), dim=-1)
        has_none = target[:, 0].isnan()
        points = torch.from_numpy(self.points[self.depths[rows]]).to(scores.device)
        tokens = torch.from_numpy(self.children.tokens[rows]).to(scores.device)
        numbers = torch.from_numpy(self.children.proposals[rows]).to(scores.device)
        chosen = torch.full((len(scores),), NOTHING, device=scores.device)
        for child in range(int(self.children.counts[rows].max())):
            proposal = self._proposal(tokens[:, :child], numbers[:, : child + 1], target.shape[1])
            token = tokens[:, child]
            p, q = (values.gather(1, token[:, None])[:, 0] for values in (target, proposal))
            is_tried = (numbers[:, child] != CERTAIN) & (chosen == NOTHING) & (q > 0)
            is_accepted = is_tried & accepts(p, q, points[:, child])
            if not is_waited_for(scores) and bool(is_accepted.all()):
                return token
            chosen = torch.where(is_accepted, token, chosen)
            is_rejected = (is_tried & ~is_accepted)[:, None]
            target = torch.where(is_rejected, residual(target, proposal), target)
        last = draw(target, points[:, -1])
        return torch.where(chosen == NOTHING, last, chosen).masked_fill(has_none, NOTHING)

    def _proposal(self, before: torch.Tensor, numbers: torch.Tensor, size: int) -> torch.Tensor:
        """Return float64[n, size], the distribution from which a child of each row was sampled.

        Args:
            before: int64[n, k], tokens of the siblings before the child.
            numbers: int64[n, k + 1], proposal rows of the siblings and the child.
            size: size of the target's vocabulary.
        """
        own = numbers[:, -1:]
        given = self.proposals.to(numbers.device)[own[:, 0].clamp(min=0), :size].double()
        given = torch.nn.functional.pad(given, (0, size - given.shape[1]))
        return without(given, before, numbers[:, :-1] == own)


def accepts(p: torch.Tensor, q: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """Return bool[n], whether each random number is below min(1, p / q)."""
    return points * q < p


def without(proposal: torch.Tensor, tokens: torch.Tensor, is_gone: torch.Tensor) -> torch.Tensor:
    """Return distributions without some of their tokens, renormalised.

    Args:
        proposal: float64[n, size], a distribution in each row.
        tokens: int64[n, k], distinct tokens for each row.
        is_gone: bool[n, k], which of these tokens to remove.
    """
    left = proposal.gather(1, tokens).masked_fill(is_gone, 0)
    remaining = proposal.scatter(1, tokens, left)
    return remaining / remaining.sum(dim=-1, keepdim=True)


def residual(target: torch.Tensor, proposal: torch.Tensor) -> torch.Tensor:
    """Return max(target - proposal, 0), normalised: the target's distribution after a rejection.

    If that is zero everywhere, which only rounding can cause, return the target's distribution.
    """
    left = (target - proposal).clamp(min=0)
    mass = left.sum(dim=-1, keepdim=True)
    return torch.where(mass > 0, left / mass, target)
