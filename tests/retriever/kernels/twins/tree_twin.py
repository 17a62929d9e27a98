"""A slow and obvious twin of the growing of trees: every node is looked at, none is foreseen."""

from dataclasses import dataclass, field

from retriever.predict.weights import Weights
from tests.retriever.kernels.twins.evidence_twin import EvidenceTwin, Known
from tests.retriever.kernels.twins.mixing_twin import mix, parameters
from tests.retriever.kernels.twins.worlds import ESCAPE, World

LEAST = 1e-6
"""Less probable candidates are never taken."""

Path = tuple[int, ...]


@dataclass
class TreeTwin:
    """Probabilities of paths in a world under some weights; looks at each node once."""

    world: World
    weights: Weights
    _known: dict[Path, Known] = field(default_factory=dict)
    _shares: dict[Path, dict[int, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._evidence: EvidenceTwin = self.world.twin()
        self._parameters = parameters(self.weights)

    def known(self, path: Path) -> Known:
        """What is known of a node."""
        if path not in self._known:
            probability = self.probability(path)
            self._known[path] = self._evidence.gather(self.world.rows, path, ESCAPE, probability)
        return self._known[path]

    def shares(self, path: Path) -> dict[int, float]:
        """The probability of each candidate for the next token, given the path."""
        if path not in self._shares:
            known = self.known(path)
            values = mix(self._parameters, known.candidates, known.traits, known.dominant)
            self._shares[path] = values
        return self._shares[path]

    def probability(self, path: Path) -> float:
        """The product of the shares along a path."""
        product = 1.0
        for depth, token in enumerate(path):
            product *= self.shares(path[:depth])[token]
        return product

    def best(self, budget: int, min_probability: float) -> list[float]:
        """The probabilities of the most probable nodes, highest first."""
        frontier: list[tuple[float, Path]] = [(1.0, ())]
        taken: list[float] = []
        while frontier and len(taken) <= budget:
            highest = max(frontier)
            frontier.remove(highest)
            probability, path = highest
            taken.append(probability)
            for token, share in self.shares(path).items():
                if probability * share >= max(min_probability, LEAST):
                    frontier.append((probability * share, (*path, token)))
        return taken[1:]  # without the root
