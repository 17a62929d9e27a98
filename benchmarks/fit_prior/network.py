"""The network of `retriever.kernels.mixing` in torch, and fitting it to outcomes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import relu

from benchmarks.fit_prior.outcomes import Outcomes
from retriever.kernels.layout import WEIGHTS
from retriever.predict.weights import Weights

_ESCAPE_DECAY: Final = 1e-4
"""Pulls what is added to "none of these" to where it began (0, mostly) if it was seldom needed."""

_SPREAD: Final = 0.4


@dataclass(frozen=True, slots=True)
class Schedule:
    """How weights are fitted.

    Attributes:
        epochs: times that each outcome is seen.
        rate: highest learning rate; it rises to it and falls to almost none.
        batch: nodes in a step.
        decay: of the weights (AdamW).
        seed: of random weights and of the order of the outcomes.
    """

    epochs: int = 20
    rate: float = 0.01
    batch: int = 512
    decay: float = 1e-5
    seed: int = 0


class Network(torch.nn.Module):
    """Scores candidates and "none of these" as the kernels do.

    Args:
        weights: WEIGHTS[1], to begin with.
    """

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterDict(
            {name: torch.nn.Parameter(torch.tensor(weights[name][0])) for name in _names()}
        )

    def forward(self, outcomes: Outcomes) -> torch.Tensor:
        """Return float32[nodes], the surprise of each outcome in bits."""
        given = self.weights
        traits = torch.from_numpy(outcomes.traits)
        nodes = torch.from_numpy(np.repeat(np.arange(len(outcomes)), outcomes.counts))
        base = traits @ given["traits"] + given["bias"]
        hidden = relu(torch.from_numpy(outcomes.features) @ given["evidence"] + base[nodes])
        scores = hidden @ given["output"]
        escape = relu(traits @ given["escape_traits"] + given["escape_bias"])
        none = escape @ given["escape_output"] + given["escape"][tuple(outcomes.places.T)]
        return _surprise(scores, none, nodes, outcomes)

    def to_weights(self) -> Weights:
        """Return WEIGHTS[1]."""
        weights = np.zeros(1, WEIGHTS)
        for name in _names():
            weights[name] = self.weights[name].detach().numpy()
        return weights


def random_weights(rng: np.random.Generator) -> Weights:
    """Return weights to begin fitting with; every hidden unit has another."""
    weights = np.zeros(1, WEIGHTS)
    for name in ("evidence", "traits", "output", "escape_traits", "escape_output"):
        weights[name] = rng.normal(0, _SPREAD, weights[name].shape)
    for name in ("bias", "escape_bias"):
        weights[name] = rng.random(weights[name].shape)
    return weights


def fit(outcomes: Outcomes, schedule: Schedule, start: Weights | None = None) -> Weights:
    """Return the weights under which outcomes surprise least.

    Args:
        outcomes: at least one.
        schedule: how to go about it.
        start: weights to begin with; random ones if None.
    """
    rng = np.random.default_rng(schedule.seed)
    network = Network(random_weights(rng) if start is None else start)
    begun = network.weights["escape"].detach().clone()
    parameters = list(network.parameters())
    optimizer = torch.optim.AdamW(parameters, schedule.rate, weight_decay=schedule.decay)
    batches = list(_batches(len(outcomes), schedule, rng))
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, schedule.rate, total_steps=len(batches))
    for nodes in batches:
        optimizer.zero_grad()
        loss = network(outcomes.take(nodes)).mean()
        moved = (network.weights["escape"] - begun).square().sum()
        (loss + _ESCAPE_DECAY * moved).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        rates.step()
    return network.to_weights()


@torch.no_grad()
def mean_surprise(weights: Weights, outcomes: Outcomes, batch: int = 4096) -> float:
    """Return how many bits an outcome takes on average."""
    network = Network(weights)
    nodes = np.arange(len(outcomes))
    parts = (nodes[start : start + batch] for start in range(0, len(nodes), batch))
    total = sum(float(network(outcomes.take(part)).sum()) for part in parts)
    return total / max(1, len(nodes))


def _surprise(
    scores: torch.Tensor, none: torch.Tensor, nodes: torch.Tensor, outcomes: Outcomes
) -> torch.Tensor:
    """Return float32[nodes]: log2 of the sum of 2^score, less the score of what came true."""
    highest = none.detach().scatter_reduce(0, nodes, scores.detach(), "amax")
    total = torch.exp2(none - highest).scatter_add(0, nodes, torch.exp2(scores - highest[nodes]))
    hit = outcomes.chosen >= 0
    starts = np.cumsum(outcomes.counts) - outcomes.counts
    chosen = scores[torch.from_numpy((starts + outcomes.chosen)[hit])]
    true = none.masked_scatter(torch.from_numpy(hit), chosen)
    return torch.log2(total) + highest - true


def _batches(
    num_nodes: int, schedule: Schedule, rng: np.random.Generator
) -> Iterator[NDArray[np.int64]]:
    for _ in range(schedule.epochs):
        order = rng.permutation(num_nodes)
        for start in range(0, num_nodes, schedule.batch):
            yield order[start : start + schedule.batch]


def _names() -> tuple[str, ...]:
    assert WEIGHTS.names is not None  # noqa: S101  (it has fields)
    return WEIGHTS.names
