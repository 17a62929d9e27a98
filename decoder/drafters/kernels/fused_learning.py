"""Learns the weights of the sources from every committed token."""

import numpy as np
from numpy.typing import NDArray

from decoder.drafters.kernels.forest import Forest
from decoder.drafters.kernels.readings import Readings, descend
from decoder.drafters.kernels.recycled import NUM_ORDERS, Table
from decoder.drafters.kernels.siblings import (
    ABSENT,
    BIAS,
    SLOPE,
    UNLISTED,
    Hints,
    Siblings,
    add_readers,
    gather,
    score,
    set_of,
)
from retriever.kernels.compiling import kernel


@kernel()
def learn(
    siblings: Siblings,
    forest: Forest,
    table: Table,
    weights: NDArray[np.float64],
    curvature: NDArray[np.float64],
    places: NDArray[np.int32],
    context: NDArray[np.int32],
    hints: Hints,
    readings: Readings,
    came: NDArray[np.int32],
    rate: float,
) -> None:
    """Update the sources' weights once for each candidate at each committed token.

    The method is logistic regression with AdaGrad (Duchi et al., 2011).

    Args:
        siblings: scratch arrays for the candidates of one node.
        forest: the trees of the last draft.
        table: the recycled logits, as they were at the last draft.
        weights: float64[NUM_SETS, S + 1, NUM_WEIGHTS], the weights of the sources; updated.
        curvature: float64 of the same shape, sums of squared gradients; updated.
        places: int32[2, trees + readers], scratch. Row 0 must hold the number of the last committed
            token in each tree and its row in each drafting model's logits.
        context: int32[NUM_ORDERS], the last tokens before `came`, the latest first; updated.
        hints: the hints of the last draft.
        readings: the drafting models' logits for the last draft.
        came: int32[T], the tokens committed after the draft.
        rate: the learning rate.
    """
    num_trees = places.shape[1] - readings.labels.shape[1]
    nothing = Hints(hints.tokens[:0], hints.log_odds[:0])
    for depth in range(len(came)):
        said = hints if depth == 0 else nothing
        trees, rows = places[0, :num_trees], places[0, num_trees:]
        count = gather(siblings, forest, trees, table, context, said, 0)
        count = add_readers(siblings, count, readings, rows)
        chosen = set_of(siblings.known, readings.labels)
        score(siblings, count, weights[chosen])
        for candidate in range(count):
            target = 1.0 if siblings.tokens[candidate] == came[depth] else 0.0
            error = siblings.probabilities[candidate] - target
            _correct(siblings, candidate, weights[chosen], curvature[chosen], error, rate)
        descend(forest, readings, places[0], places[1], came[depth])
        for source in range(places.shape[1]):
            places[0, source] = places[1, source]
        for order in range(NUM_ORDERS - 1, 0, -1):
            context[order] = context[order - 1]
        context[0] = came[depth]


@kernel()
def _correct(
    siblings: Siblings,
    candidate: int,
    weights: NDArray[np.float64],
    curvature: NDArray[np.float64],
    error: float,
    rate: float,
) -> None:
    """Update the weights that scored a candidate."""
    num_sources = len(siblings.known)
    _descend(weights[num_sources], curvature[num_sources], BIAS, error, rate)
    for source in range(num_sources):
        if not siblings.known[source]:
            continue
        log_odds = siblings.log_odds[candidate, source]
        if log_odds == ABSENT:
            _descend(weights[source], curvature[source], UNLISTED, error, rate)
        else:
            _descend(weights[source], curvature[source], BIAS, error, rate)
            _descend(weights[source], curvature[source], SLOPE, error * log_odds, rate)


@kernel()
def _descend(
    weights: NDArray[np.float64],
    curvature: NDArray[np.float64],
    column: int,
    gradient: float,
    rate: float,
) -> None:
    curvature[column] += gradient * gradient
    weights[column] -= rate * gradient / np.sqrt(curvature[column])
