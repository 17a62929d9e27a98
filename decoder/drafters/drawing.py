"""Drafts drawn at random from a draft model's distributions, so that these count.

What a drawn tree looks like is settled before its first token is drawn: by how often the first,
second, ... draw below a node was kept lately, and by nothing else (the best tree of a given size:
Sequoia, Chen et al., 2024, arXiv:2402.12374). So no token can decide over its own place, and
verification by multi-candidate rejection stays exact.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from decoder.drafters.outcomes import Outcome
from decoder.errors import ContradictoryOptionsError

MAX_SIBLINGS: Final = 8
"""Most draws below one node."""

_DECAY: Final = 0.99
_PRIOR_SHARE: Final = 0.6
_PRIOR_WEIGHT: Final = 2.0


@dataclass(frozen=True, slots=True)
class Draws:
    """How drafts are drawn; the settings of the target's own sampling serve best.

    Attributes:
        temperature: logits are divided by it; more than zero.
        top_k: only the so many most probable tokens are drawn; `None` for all.
        top_p: only the most probable tokens that make up this probability; 1 for all.
        seed: of the draws, which are never those of the target's sampling.

    Raises:
        ContradictoryOptionsError: nothing can be drawn with a setting.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ContradictoryOptionsError(
                f"drafts cannot be drawn at temperature {self.temperature}: give more than 0, "
                "or draft without drawing"
            )
        if (self.top_k is not None and self.top_k < 1) or not 0 < self.top_p <= 1:
            raise ContradictoryOptionsError(
                f"top_k {self.top_k} and top_p {self.top_p} leave no token to draw"
            )

    def distributions(self, logits: torch.Tensor) -> torch.Tensor:
        """Return float32[rows, C], what is drawn from; each row sums to one."""
        warpers = LogitsProcessorList([TemperatureLogitsWarper(self.temperature)])
        if self.top_k is not None:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            warpers.append(TopPLogitsWarper(self.top_p))
        no_tokens = torch.empty(len(logits), 0, dtype=torch.int64, device=logits.device)
        scores: torch.Tensor = warpers(no_tokens, logits.float())  # type: ignore[arg-type]  # any integers
        return torch.softmax(scores, dim=-1)


class RankRates:
    """How often the first, second, ... draw below a node that was kept is kept itself.

    Fading shares, which begin with a geometric prior.
    """

    def __init__(self) -> None:
        self._kept = _PRIOR_WEIGHT * _PRIOR_SHARE * (1 - _PRIOR_SHARE) ** np.arange(MAX_SIBLINGS)
        self._drawn = np.full(MAX_SIBLINGS, _PRIOR_WEIGHT)

    def rates(self) -> NDArray[np.float64]:
        """Return float64[8], shares by rank; they fall and lie between 0 and 1."""
        return np.minimum.accumulate(np.minimum(self._kept / self._drawn, 1.0))

    def learn(self, outcome: Outcome) -> None:
        """Take in what became of a drawn tree."""
        path = set(outcome.path.tolist())
        parents = outcome.tree.parents
        for parent in outcome.decided_parents():
            children = np.flatnonzero(parents == parent)[:MAX_SIBLINGS].tolist()
            self._kept[: len(children)] *= _DECAY
            self._drawn[: len(children)] *= _DECAY
            self._drawn[: len(children)] += 1
            for rank, child in enumerate(children):
                self._kept[rank] += child in path


def drawn_below(distribution: torch.Tensor, count: int, random: np.random.Generator) -> list[int]:
    """Draw tokens one after the other, each from what the earlier ones left.

    Args:
        distribution: float32[C], not negative.
        count: of draws; fewer where no more tokens have a probability.
        random: where numbers come from.

    Returns:
        Columns in the order in which they were drawn.
    """
    left = distribution.double().numpy().copy()
    columns: list[int] = []
    for point in random.random(count).tolist():
        ends = np.cumsum(left)
        column = int(np.searchsorted(ends, point * ends[-1], side="right"))
        if column == len(ends):
            break  # nothing is left
        columns.append(column)
        left[column] = 0.0
    return columns
