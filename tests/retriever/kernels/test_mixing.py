"""Mixing equals its twin, and learning goes down the gradient of the surprise and stays bounded."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from retriever.kernels.layout import MAX_MATCH, Evidence, Scratch, Traits, Work
from retriever.kernels.mixing import depth_bucket, learn, match_bucket, mix, to_traits
from retriever.predict.draft import DEFAULT_PRIOR
from retriever.predict.weights import Weights, prior_weights, values_of
from retriever.tree import Source
from tests.retriever.kernels.twins import mixing_twin
from tests.retriever.kernels.twins.mixing_twin import Parameters
from tests.retriever.predict.blank import blank_weights, random_weights
from tests.suite_parts import cases

NUM_SEEDS = cases(60, of=2000)
NUM_OUTCOMES = cases(8000, of=100_000)
NONE = -1
LEAST_GRADIENT = 0.002  # less is not learned from


class Node:
    """A root with candidates 0, 1, 2, … and raw evidence for them, as `gather` leaves it."""

    def __init__(
        self, evidence: Sequence[Sequence[float]], traits: Sequence[float], dominant: int
    ) -> None:
        self.evidence = np.array(evidence, np.float32).reshape(-1, 6)
        self.traits = np.array(traits, np.float32)
        self.dominant = dominant
        self.work: Work = Scratch(1, max_rows=1, max_nodes=len(evidence) + 1).work

    def mix(self, weights: Weights) -> NDArray[np.float32]:
        """Return float32[candidates], their probabilities."""
        work, end = self.work, len(self.evidence) + 1
        root = work.nodes[0]
        root["first_child"], root["end_child"], root["place"] = 1, end, -1
        root["dominant"] = self.dominant
        work.nodes["token"][1:] = np.arange(end - 1)
        work.nodes["place"][1:] = -1
        work.evidence[1:, : Evidence.SIZE] = self.evidence
        work.traits[0] = self.traits
        mix(weights[0], work, 0)
        return work.shares[1:end]

    def twin(self, of: Parameters) -> list[float]:
        """The same by the twin."""
        candidates = dict(enumerate(self.evidence.tolist()))
        return list(mixing_twin.mix(of, candidates, self.traits.tolist(), self.dominant).values())

    def learn(self, weights: Weights, outcome: int, rate: float) -> int:
        """Learn from a candidate's index, or from `NONE` of them."""
        token = len(self.evidence) if outcome == NONE else outcome
        return int(learn(weights, self.work, np.array([token], np.int32), rate))


def random_node(rng: np.random.Generator, most: int = 12) -> Node:
    num = int(rng.integers(0, most))
    evidence = 10 ** rng.uniform(-7, 0, (num, 6))
    evidence[rng.random((num, 6)) < 0.2] = 0
    evidence[:, 4] = np.where(rng.random(num) < 0.3, 2.0**20, rng.integers(1, 5000, num))
    counts = np.where(rng.random(7) < 0.3, 0, np.rint(10 ** rng.uniform(0, 5, 7)))
    depth, longest = int(rng.integers(0, 40)), int(rng.integers(0, MAX_MATCH + 1))
    match = longest + depth if longest else 0
    traits = [match, depth, rng.uniform(0.03, 1.03), *counts]
    return Node(evidence.tolist(), traits, int(rng.integers(0, len(Source))))


@pytest.mark.seeds
def test_mixing_equals_its_twin() -> None:
    rng = np.random.default_rng(81)
    for _ in range(NUM_SEEDS):
        weights, node = random_weights(rng), random_node(rng)
        shares = node.mix(weights)
        expected = node.twin(mixing_twin.parameters(weights))
        np.testing.assert_allclose(shares, expected, rtol=1e-3, atol=1e-5)
        assert shares.sum() <= 1 + 1e-6


def test_every_match_and_depth_has_its_bucket() -> None:
    for number in range(5000):
        traits = np.ones(Traits.SIZE, np.float32)
        traits[Traits.MATCH] = traits[Traits.DEPTH] = number
        to_traits(traits)
        assert match_bucket(traits) == mixing_twin.match_bucket(number)
        assert depth_bucket(traits) == mixing_twin.depth_bucket(number)


def flat(of: Parameters) -> NDArray[np.float64]:
    return np.concatenate([values.ravel() for values in of.values()])


def shaped(values: NDArray[np.float64], like: Parameters) -> Parameters:
    parts = np.split(values, np.cumsum([array.size for array in like.values()])[:-1])
    return {name: part.reshape(like[name].shape) for part, name in zip(parts, like, strict=True)}


def surprise(node: Node, of: Parameters, fixed: dict[int, float], outcome: int) -> float:
    """Bits that an outcome costs; the scores of some candidates do not depend on the weights."""
    traits = node.traits.tolist()
    scores = [
        fixed.get(index, mixing_twin.score(of, evidence, traits))
        for index, evidence in enumerate(node.evidence.tolist())
    ]
    escape = mixing_twin.escape_score(of, node.dominant, traits)
    total = sum(2.0**value for value in scores) + 2.0**escape
    return math.log2(total) - (escape if outcome == NONE else scores[outcome])


@pytest.mark.seeds
def test_learning_goes_down_the_gradient_of_the_surprise() -> None:
    """By finite differences: of each kind of weight some, and along random directions."""
    rng = np.random.default_rng(82)
    rate, step = 5e-5, 1e-6
    moved, num_nodes = 0, cases(40, of=150)
    for _ in range(num_nodes):
        weights, node = random_weights(rng, 0.3), random_node(rng, most=8)
        before = mixing_twin.parameters(weights)
        shares = node.mix(weights).tolist()
        outcome = int(rng.integers(NONE, len(shares)))
        traits = node.traits.tolist()
        fixed = {
            index: mixing_twin.score(before, evidence, traits)
            for index, evidence in enumerate(node.evidence.tolist())
            if abs(shares[index] - (index == outcome)) <= LEAST_GRADIENT
        }
        assert node.learn(weights, outcome, rate) == 1
        gradient = (flat(before) - flat(mixing_twin.parameters(weights))) / rate
        scale = max(float(np.abs(gradient).max()), 1e-2)
        known = len(values_of(weights))  # no source has the rows after these
        single = np.eye(len(gradient))[rng.choice(known, 25, replace=False)]
        every = rng.normal(0, 1, (5, known)) / math.sqrt(known) @ np.eye(known, len(gradient))
        for direction in (*single, *every, gradient / max(float(np.linalg.norm(gradient)), 1e-9)):
            ahead, behind = (
                surprise(node, shaped(flat(before) + way * direction, before), fixed, outcome)
                for way in (step, -step)
            )
            slope = (ahead - behind) / (2 * step)
            assert slope == pytest.approx(gradient @ direction, abs=0.01 * scale + 0.01)
            moved += abs(slope) > 0.1 * scale
    assert moved > 2 * num_nodes


@pytest.mark.seeds
def test_repeated_outcomes_surprise_less_and_less() -> None:
    rng = np.random.default_rng(83)
    for _ in range(cases(30, of=100)):
        weights, node = random_weights(rng), random_node(rng)
        outcome = int(rng.integers(NONE, len(node.evidence)))
        surprises = []
        for _ in range(40):
            shares = node.mix(weights)
            chance = 1 - shares.sum() if outcome == NONE else shares[outcome]
            surprises.append(-math.log2(max(float(chance), 1e-6)))
            node.learn(weights, outcome, DEFAULT_PRIOR.rate)
        assert surprises[-1] < surprises[0] or surprises[0] < 0.1


@pytest.mark.parametrize("weights", [prior_weights(), blank_weights()])
def test_extreme_evidence_gives_probabilities(weights: Weights) -> None:
    most = 1.6e10
    for value in (0.0, 1e-38, 1.0, 1e10):
        for count in (0.0, most):
            node = Node([[value] * 6] * 3 + [[0.0] * 6], [most, most, most, *[count] * 7], 0)
            for outcome in (NONE, 0, 3):
                kept = weights.copy()
                shares = node.mix(kept)
                assert np.isfinite(shares).all()
                assert ((shares >= 0) & (shares <= 1)).all()
                assert shares.sum() <= 1 + 1e-6
                node.learn(kept, outcome, DEFAULT_PRIOR.rate)
                assert np.isfinite(kept.view(np.float32)).all()


@pytest.mark.seeds
@pytest.mark.parametrize("adversary", ["least likely", "by turns", "random"])
def test_weights_stay_bounded_whatever_comes_next(adversary: str) -> None:
    """Very many outcomes that nothing can be learned from, at ten times the usual rate."""
    rng = np.random.default_rng(84)
    weights = random_weights(rng)
    nodes = [random_node(rng, most=30) for _ in range(50)]
    extreme = [[1e3, 1e3, 1e3, 1e3, 1e-30, 1.0], [0.0] * 6, [1.0] * 6]
    nodes.append(Node(extreme, [4000, 4000, 1e9, *[1.6e10] * 7], 1))
    for number in range(NUM_OUTCOMES):
        node = nodes[number % len(nodes)]
        shares = node.mix(weights)
        outcome = int(rng.integers(NONE, len(shares)))
        if adversary == "least likely":
            outcome = int(np.append(shares, 1 - shares.sum()).argmin())
        elif adversary == "by turns":
            outcome = number % 2
        node.learn(weights, outcome if outcome < len(shares) else NONE, 10 * DEFAULT_PRIOR.rate)
    assert np.abs(weights.view(np.float32)).max() < 50
    for node in nodes:
        shares = node.mix(weights)
        assert ((shares >= 0) & (shares <= 1)).all()
        assert shares.sum() <= 1 + 1e-5
