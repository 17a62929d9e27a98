"""A pool: one tenant's generations and learned weights."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from retriever.drafter import Saving
from retriever.kernels.layout import Shared
from retriever.predict.generations import Generations, Output
from retriever.predict.running import RunningOutputs
from retriever.predict.searched_corpus import Corpus
from retriever.predict.weights import Weights, prior_weights, to_bytes


@dataclass(frozen=True, slots=True)
class Entry:
    """An output for the log, with the tenant's statistics.

    Attributes:
        tenant: the tenant that the output belongs to.
        output: the generation; if it has no tokens, only the other fields are written.
        statistics: the tenant's weights as bytes, if they changed since they were last logged.
        note: opaque bytes that replace the previous note; see `retriever.plugins.replication`.
        saving: save status of the output.
    """

    tenant: str
    output: Output
    statistics: bytes | None = None
    note: bytes | None = None
    saving: Saving = field(default_factory=Saving, compare=False)


class DraftedFrom(NamedTuple):
    """The data that drafts of a tenant's sequences read.

    Attributes:
        arrays: arrays of generations.
        running: packed running outputs.
        corpus: the database of the indexes.
        bounds: bounds of steps.
        shared: all of the above.
        packed: `shared`, packed for kernels.
    """

    arrays: tuple[NDArray[Any], ...]
    running: NDArray[Any]
    corpus: Corpus
    bounds: NDArray[np.int64]
    shared: Shared
    packed: NDArray[Any]


@dataclass(slots=True, weakref_slot=True, eq=False)
class Pool:
    """One tenant's generations and weights.

    Attributes:
        tenant: name of the tenant.
        generations: the tenant's generations.
        weights: mixing weights, learned from the tenant's outputs; saved in the log.
        learned: number of learning steps.
        logged: number of learning steps when the weights were last logged.
        last_used_s: time of the last call that needed the pool, by `time.monotonic`.
        running: outputs of running sequences; None while no sequence has a group.
        drafted_from: cache of the data that drafts read; see `draft.Predictor`.
    """

    tenant: str
    generations: Generations
    weights: Weights = field(default_factory=prior_weights)
    learned: int = 0
    logged: int = 0
    last_used_s: float = 0.0
    running: RunningOutputs | None = None
    drafted_from: DraftedFrom | None = None

    @property
    def num_bytes(self) -> int:
        """Memory of the tenant's outputs, ended and running, in bytes."""
        running = 0 if self.running is None else self.running.num_bytes
        return self.generations.num_bytes + running

    def tidy(self) -> None:
        """Free the memory of running outputs once there are none."""
        if self.running is not None and not self.running.num_lanes:
            self.running = None

    def entry(self, output: Output) -> Entry:
        """Return an output's entry for the log, with the weights if they are not logged yet."""
        return Entry(self.tenant, output, self.unlogged())

    def unlogged(self) -> bytes | None:
        """Return the weights for the log and count them as logged; None if it already has them."""
        learned = self.learned  # another session may increase it meanwhile
        if learned == self.logged:
            return None
        self.logged = learned
        return to_bytes(self.weights)

    def forgetting(self, origin: bytes) -> Iterator[None]:
        """Delete the outputs of an origin in steps; see `Generations.removing`."""
        return self.generations.removing(origin)

    def clear(self) -> None:
        """Delete everything."""
        self.generations.clear()
        if self.running is not None:
            self.running.clear()
        self.weights[:] = prior_weights()
        self.learned = self.logged = 0
