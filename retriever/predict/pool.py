"""A pool: what one tenant has of its own."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from retriever.log.log_store import Entry
from retriever.predict.generations import Generations, Output
from retriever.predict.weights import Weights, prior_weights, to_bytes


@dataclass(slots=True, weakref_slot=True, eq=False)
class Pool:
    """What one tenant has.

    Attributes:
        tenant: its name.
        generations: its generations.
        weights: how evidence is mixed, learned from its outputs; the log keeps them.
        learned: steps that they learned from.
        logged: how many of these the log has.
    """

    tenant: str
    generations: Generations
    weights: Weights = field(default_factory=prior_weights)
    learned: int = 0
    logged: int = 0

    def add(self, output: Output) -> Entry:
        """Remember an output, and return what the log must keep of it."""
        self.generations.extend([output])
        statistics = to_bytes(self.weights) if self.learned != self.logged else None
        self.logged = self.learned
        return Entry(self.tenant, output, statistics)

    def forgetting(self, origin: bytes) -> Iterator[None]:
        """Forget the outputs of an origin, bit by bit; see `Generations.removing`."""
        return self.generations.removing(origin)

    def clear(self) -> None:
        """Forget everything."""
        self.generations.clear()
        self.weights[:] = prior_weights()
        self.learned = self.logged = 0
