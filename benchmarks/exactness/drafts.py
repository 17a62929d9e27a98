"""Drafts of a few shapes, whose nodes are certain, drawn at random, or some of each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.exactness.target import SIZE, logits_after
from decoder.drafters.sampled import CERTAIN, SampledTree
from retriever.tree import ROOT

SHAPES: Final[dict[str, tuple[int, ...]]] = {
    "empty": (),
    "chain": (-1, 0, 1),
    "bush": (-1, -1, -1),
    "mixed": (-1, -1, 0, 0, 0, 1, 1, -1, 2),
}
"""Parents of the nodes. The last child of two or more is a leaf, which may be left out."""

_DRAWN_FROM: Final = SIZE - 1
"""Tokens that the draft model knows: fewer than the target."""
_PROPOSALS: Final = np.random.default_rng(12).dirichlet(np.full(_DRAWN_FROM, 1.5), SIZE)
_ORDERS: Final = np.random.default_rng(13).permuted(np.tile(np.arange(SIZE), (SIZE, 1)), axis=1)


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
    ) -> Iterator[tuple[SampledTree, torch.Tensor]]:
        """Draft once for each of some sequences.

        Args:
            before: int64[n], their last tokens but one.
            last: int64[n], their last tokens.
            rng: draws.

        Yields:
            A tree of N nodes and the target's logits, float32[1 + N, SIZE].
        """
        parents = SHAPES[self.shape]
        # Column 0 is the last token; node k is column k + 1.
        tokens = np.zeros((len(last), 1 + len(parents)), np.int64)
        tokens[:, 0] = last
        is_kept = np.ones(tokens.shape, np.bool_)
        for parent in sorted(set(parents)):
            self._fill(parent, tokens, is_kept, rng)
        previous = np.column_stack([before, tokens[:, [parent + 1 for parent in parents]]])
        logits = torch.from_numpy(logits_after(previous, tokens).astype(np.float32))
        for number in range(len(last)):
            tree = self._tree(tokens[number], parents)
            if is_kept[number].all():
                yield tree, logits[number]
            else:
                yield tree.among(is_kept[number, 1:]), logits[number, is_kept[number]]

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
        rng: np.random.Generator,
    ) -> None:
        """Give the children of a node their tokens, in all sequences."""
        siblings = [node for node, of in enumerate(SHAPES[self.shape]) if of == parent]
        certain = self.is_certain(siblings)
        rows = tokens[:, parent + 1]
        # The order of Gumbel-perturbed log-probabilities is that of draws without replacement.
        keys = np.log(_PROPOSALS[rows]) + rng.gumbel(size=(len(rows), _DRAWN_FROM))
        drawn = np.argsort(-keys, axis=1)[:, : certain.count(False)]
        if self.sorts_siblings:
            drawn = np.sort(drawn, axis=1)
        for place, (node, node_is_certain) in enumerate(zip(siblings, certain, strict=True)):
            if node_is_certain:
                tokens[:, node + 1] = _ORDERS[rows, place]
                is_kept[:, node + 1] = (drawn != tokens[:, node + 1, None]).all(axis=1)
            else:
                tokens[:, node + 1] = drawn[:, place]

    def _tree(self, tokens: NDArray[np.int64], parents: tuple[int, ...]) -> SampledTree:
        count = len(parents)
        rows = np.full(count, CERTAIN, np.int32)
        for parent in set(parents):
            siblings = [node for node, of in enumerate(parents) if of == parent]
            for node, node_is_certain in zip(siblings, self.is_certain(siblings), strict=True):
                if not node_is_certain:
                    rows[node] = tokens[parent + 1 if parent != ROOT else 0]
        return SampledTree(
            tokens[1:].astype(np.int32),
            np.array(parents, np.int32),
            np.linspace(0.9, 0.1, count, dtype=np.float32),
            np.zeros(count, np.uint8),
            torch.from_numpy(_PROPOSALS.astype(np.float32)),
            rows,
        )
