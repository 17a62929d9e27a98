"""Drafts of a few shapes, whose nodes are certain, drawn at random, or some of each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from decoder.sampling.verification import CERTAIN, SampledTree
from retriever.tree import ROOT
from tests.oracles.exactness.scripted_target import SIZE, logits_after

SHAPES: Final[dict[str, tuple[int, ...]]] = {
    "empty": (),
    "chain": (-1, 0, 1),
    "bush": (-1, -1, -1),
    "mixed": (-1, -1, 0, 0, 0, 1, 1, -1, 2),
}
"""Parents of the nodes. The last child of two or more is a leaf, which may be left out."""

_DRAWN_FROM: Final = SIZE - 1
"""Tokens that the draft model knows: fewer than the target."""
PROPOSALS: Final = torch.from_numpy(
    np.random.default_rng(12).dirichlet(np.full(_DRAWN_FROM, 1.5), SIZE).astype(np.float32)
)
"""What nodes are drawn from, by the token before them: float32[SIZE, SIZE - 1]."""
_ORDERS: Final = np.random.default_rng(13).permuted(np.tile(np.arange(SIZE), (SIZE, 1)), axis=1)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One draft for each of some sequences, all of one shape with N nodes.

    Attributes:
        parents: of the nodes.
        tokens: int64[sequences, 1 + N], the last token and those of the nodes.
        is_kept: bool[sequences, 1 + N], whether a node is there; the last token is.
        rows: int64[sequences, N], the distribution that each was drawn from, or `CERTAIN`.
        logits: float32[sequences, 1 + N, SIZE], the target's.
    """

    parents: tuple[int, ...]
    tokens: NDArray[np.int64]
    is_kept: NDArray[np.bool_]
    rows: NDArray[np.int64]
    logits: torch.Tensor

    def tree(self, number: int) -> tuple[SampledTree, torch.Tensor]:
        """Return one sequence's tree, and the target's logits."""
        count = len(self.parents)
        tree = SampledTree(
            self.tokens[number, 1:].astype(np.int32),
            np.array(self.parents, np.int32),
            np.linspace(0.9, 0.1, count, dtype=np.float32),
            np.zeros(count, np.uint8),
            PROPOSALS,
            self.rows[number].astype(np.int32),
        )
        return tree.among(self.is_kept[number, 1:]), self.logits[number, self.is_kept[number]]

    def path(self, number: int) -> list[int]:
        """Return the nodes above one and itself, from the root's child downwards."""
        return [] if number == ROOT else [*self.path(self.parents[number]), number]


@dataclass(frozen=True, slots=True)
class Drafts:
    """How drafts are made; a node's distribution or token depends on the token before it.

    Attributes:
        shape: one of `SHAPES`.
        kind: "certain", "drawn" or "both": then the last of several siblings is certain.
        sorts_siblings: plants an error: drawn siblings stand in order of their tokens.
    """

    shape: str
    kind: str
    sorts_siblings: bool = False

    def after(
        self, before: NDArray[np.int64], last: NDArray[np.int64], rng: np.random.Generator
    ) -> Batch:
        """Draft once for each of some sequences.

        Args:
            before: int64[n], their last tokens but one.
            last: int64[n], their last tokens.
            rng: draws.
        """
        parents = SHAPES[self.shape]
        tokens = np.zeros((len(last), 1 + len(parents)), np.int64)
        tokens[:, 0] = last
        is_kept = np.ones(tokens.shape, np.bool_)
        rows = np.full((len(last), len(parents)), CERTAIN, np.int64)
        for parent in sorted(set(parents)):
            self._fill(parent, tokens, is_kept, rows, rng)
        previous = np.column_stack([before, tokens[:, [parent + 1 for parent in parents]]])
        logits = torch.from_numpy(logits_after(previous, tokens).astype(np.float32))
        return Batch(parents, tokens, is_kept, rows, logits)

    def is_certain(self, siblings: Sequence[int]) -> list[bool]:
        """Return whether each of some siblings is certain."""
        if self.kind == "both":
            return [len(siblings) > 1 and node == siblings[-1] for node in siblings]
        return [self.kind == "certain"] * len(siblings)

    def _fill(
        self,
        parent: int,
        tokens: NDArray[np.int64],
        is_kept: NDArray[np.bool_],
        rows: NDArray[np.int64],
        rng: np.random.Generator,
    ) -> None:
        """Give the children of a node their tokens, in all sequences."""
        siblings = [node for node, of in enumerate(SHAPES[self.shape]) if of == parent]
        certain = self.is_certain(siblings)
        last = tokens[:, parent + 1]
        # The order of Gumbel-perturbed log-probabilities is that of draws without replacement.
        keys = np.log(PROPOSALS.numpy()[last]) + rng.gumbel(size=(len(last), _DRAWN_FROM))
        drawn = np.argsort(-keys, axis=1)[:, : certain.count(False)]
        if self.sorts_siblings:
            drawn = np.sort(drawn, axis=1)
        for place, (node, node_is_certain) in enumerate(zip(siblings, certain, strict=True)):
            if node_is_certain:
                tokens[:, node + 1] = _ORDERS[last, place]
                is_kept[:, node + 1] = (drawn != tokens[:, node + 1, None]).all(axis=1)
            else:
                tokens[:, node + 1] = drawn[:, place]
                rows[:, node] = last
