"""Slow and obvious twins of mixing: the network in float64, and fast arithmetic from its rules."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from retriever.predict.weights import Weights

Parameters = dict[str, NDArray[np.float64]]
"""Weights by field, in double precision."""


def parameters(weights: Weights) -> Parameters:
    """Every field of WEIGHTS[1]."""
    return {name: weights[name][0].astype(np.float64) for name in weights.dtype.names or ()}


def log2(value: float) -> float:
    """Straight lines between the powers of two."""
    fraction, exponent = math.frexp(value)
    return exponent - 2 + 2 * fraction if value > 0 else -127.0


def exp2(value: float) -> float:
    """A cubic between the powers of two; nothing is below 2 to the power of -126."""
    whole = math.floor(max(value, -126.0))
    part = max(value, -126.0) - whole
    return math.ldexp(1 + part * (0.6954 + part * (0.2264 + part * 0.0782)), whole)


def features(evidence: Sequence[float]) -> NDArray[np.float64]:
    """Features of a candidate from its evidence, in the order of `Evidence`."""
    rows, live, corpus, similar_weight, recency, unigram = evidence
    return np.array(
        [
            (log2(rows + 1e-6) + 8) * 0.25,
            (log2(live + 1e-6) + 8) * 0.25,
            (log2(corpus + 1e-6) + 8) * 0.25,
            (log2(similar_weight + 1e-3) + 5) * 0.3,
            (log2(recency) - 10) * 0.15,
            (log2(unigram + 1e-6) + 12) * 0.25,
        ]
    )


def trait_features(traits: Sequence[float]) -> NDArray[np.float64]:
    """Features of a node from its traits, in the order of `Traits`."""
    match, depth, rows, *counts = traits
    return np.array(
        [
            log2(match + 1) * 0.5,
            log2(depth + 1) * 0.5,
            (log2(rows) + 3) * 0.3,
            *(log2(count + 0.1) * 0.2 for count in counts),
        ]
    )


def match_bucket(match: int) -> int:
    """0, 1, 2 to 3, 4 to 7, 8 to 15, 16 to 31, more."""
    return min(6, match.bit_length())


def depth_bucket(depth: int) -> int:
    """0, 1, 2 to 3, 4 to 7, more."""
    return min(4, depth.bit_length())


def score(of: Parameters, evidence: Sequence[float], traits: Sequence[float]) -> float:
    """The score of a candidate."""
    hidden = (
        of["bias"] + trait_features(traits) @ of["traits"] + features(evidence) @ of["evidence"]
    )
    return float(of["output"] @ np.maximum(hidden, 0))


def escape_score(of: Parameters, dominant: int, traits: Sequence[float]) -> float:
    """The score of "none of these"."""
    hidden = of["escape_bias"] + trait_features(traits) @ of["escape_traits"]
    cell = of["escape"][dominant, match_bucket(int(traits[0])), depth_bucket(int(traits[1]))]
    return float(cell + of["escape_output"] @ np.maximum(hidden, 0))


def mix(
    of: Parameters,
    candidates: Mapping[int, Sequence[float]],
    traits: Sequence[float],
    dominant: int,
) -> dict[int, float]:
    """The probability of each candidate."""
    scores = {token: score(of, evidence, traits) for token, evidence in candidates.items()}
    escape = escape_score(of, dominant, traits)
    highest = max(escape, *scores.values()) if scores else escape
    powers = {token: exp2(value - highest) for token, value in scores.items()}
    total = sum(powers.values()) + exp2(escape - highest)
    return {token: power / total for token, power in powers.items()}
