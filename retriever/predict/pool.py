"""A pool: what one tenant has of its own."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from retriever.predict.generations import Generations, Output
from retriever.predict.weights import Weights, prior_weights, to_bytes


@dataclass(frozen=True, slots=True)
class Entry:
    """An output to be kept, and what is kept with it.

    Attributes:
        tenant: whose it is.
        output: what was generated.
        statistics: the tenant's weights as bytes, where they have learned since they were kept.
        note: opaque, in the place of the note before; see `retriever.replication`.
    """

    tenant: str
    output: Output
    statistics: bytes | None = None
    note: bytes | None = None


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
