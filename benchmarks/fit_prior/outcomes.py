"""What a replay teaches: which candidate came true at each node that an output went through."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from retriever.kernels.layout import Evidence, Traits


class Outcome(NamedTuple):
    """One node whose candidates were considered, and what came next.

    Attributes:
        features: float32[candidates, Evidence.SIZE].
        traits: float32[Traits.SIZE].
        place: where the node stands in `escape`: its dominant, and the buckets of match and depth.
        chosen: the candidate that came true, -1 for none.
    """

    features: NDArray[np.float32]
    traits: NDArray[np.float32]
    place: tuple[int, int, int]
    chosen: int


@dataclass(frozen=True, slots=True, eq=False)
class Outcomes:
    """Many outcomes, in arrays.

    Attributes:
        features: float32[all candidates, Evidence.SIZE], node by node.
        counts: int64[nodes], candidates of each.
        traits: float32[nodes, Traits.SIZE].
        places: int64[nodes, 3].
        chosen: int64[nodes], as for one.
    """

    features: NDArray[np.float32]
    counts: NDArray[np.int64]
    traits: NDArray[np.float32]
    places: NDArray[np.int64]
    chosen: NDArray[np.int64]

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> Self:
        """Return these outcomes in arrays."""
        return cls(
            np.concatenate([np.empty((0, Evidence.SIZE), np.float32), *(o[0] for o in outcomes)]),
            np.array([len(outcome.features) for outcome in outcomes], np.int64),
            np.array([o.traits for o in outcomes], np.float32).reshape(-1, Traits.SIZE),
            np.array([outcome.place for outcome in outcomes], np.int64).reshape(-1, 3),
            np.array([outcome.chosen for outcome in outcomes], np.int64),
        )

    @classmethod
    def joined(cls, parts: Iterable[Self]) -> Self:
        """Return the outcomes of all parts; there is at least one part."""
        columns = zip(
            *((p.features, p.counts, p.traits, p.places, p.chosen) for p in parts), strict=True
        )
        return cls(*map(np.concatenate, columns))

    def __len__(self) -> int:
        return len(self.counts)

    def take(self, nodes: NDArray[np.int64]) -> Self:
        """Return the outcomes at int64[n], in this order."""
        counts = self.counts[nodes]
        starts = np.cumsum(self.counts) - self.counts
        moved = np.repeat(starts[nodes] - (np.cumsum(counts) - counts), counts)
        return type(self)(
            self.features[moved + np.arange(len(moved))],
            counts,
            self.traits[nodes],
            self.places[nodes],
            self.chosen[nodes],
        )

    def sample(self, num_nodes: int, rng: np.random.Generator) -> Self:
        """Return at most so many outcomes, drawn without replacement."""
        if len(self) <= num_nodes:
            return self
        return self.take(np.sort(rng.choice(len(self), num_nodes, replace=False)))
