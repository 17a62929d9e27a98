"""The mixer: a small network that scores candidates from their evidence, and learns online.

One hidden layer computes a candidate's score from the logarithms of its evidence and of its node's
amount of evidence. The escape, "none of these", also has a score, computed from the node's amount
of evidence alone. A softmax (to base 2) turns the scores into probabilities. This is the log-linear
mixing of context-mixing compressors (Mahoney 2005) with a hidden layer, which models interactions
between kinds of evidence. Each outcome moves the weights by one gradient step on its log loss. This
calibrates the probabilities to the current text.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from retriever.kernels.compiling import fast_exp2, fast_log2, kernel
from retriever.kernels.layout import DEPTH_BUCKETS, HIDDEN, MATCH_BUCKETS, Evidence, Traits, Work

_FAST: Final = {"contract", "reassoc", "nsz"}
"""Optimizations allowed in sums: the compiler vectorizes them and chooses their order. `kernel`
explains why such functions and their callers are inlined."""

_LEAST_GRADIENT: Final = np.float32(0.002)  # smaller gradients are skipped to save time

# By kind of evidence: the constant added to it, and the shift and scale of its logarithm.
_LEAST: Final = np.array([1e-6, 1e-6, 1e-6, 1e-3, 0, 1e-6, 1, 1], np.float32)
_SHIFT: Final = np.array([8, 8, 8, 5, -10, 12, 0, 0], np.float32)
_SCALE: Final = np.array([0.25, 0.25, 0.25, 0.3, 0.15, 0.25, 0, 0], np.float32)


@kernel(forceinline=True, fastmath=_FAST)
def to_features(evidence: NDArray[np.float32], first: int, end: int) -> None:
    """Replace evidence by its logarithms, shifted and scaled to about -2 to 2.

    Args:
        evidence: float32[max_nodes, Evidence.WIDTH]; rows `first` to `end` are written.
        first: first candidate.
        end: index after the last candidate.
    """
    for candidate in range(first, end):
        row = evidence[candidate]
        for kind in range(Evidence.WIDTH):
            row[kind] = (fast_log2(row[kind] + _LEAST[kind]) + _SHIFT[kind]) * _SCALE[kind]


@kernel()
def to_traits(traits: NDArray[np.float32]) -> None:
    """Replace the features of a node by their logarithms, scaled the same way."""
    for index in (Traits.MATCH, Traits.DEPTH):
        traits[index] = fast_log2(traits[index] + np.float32(1)) * np.float32(0.5)
    traits[Traits.ROWS] = (fast_log2(traits[Traits.ROWS]) + np.float32(3)) * np.float32(0.3)
    for index in range(Traits.CORPUS_3, Traits.SIZE):
        traits[index] = fast_log2(traits[index] + np.float32(0.1)) * np.float32(0.2)


@kernel(forceinline=True, fastmath=_FAST)
def score(
    weights: Any,
    traits: NDArray[np.float32],
    evidence: NDArray[np.float32],
    scores: NDArray[np.float32],
    first: int,
    end: int,
    sums: NDArray[np.float32],
) -> None:
    """Write the scores of candidates `first` to `end`, float32[end - first].

    Loops over the hidden units are vectorized; `sums`, float32[HIDDEN], is scratch.
    """
    bias, of_traits, of_evidence = weights.bias, weights.traits, weights.evidence
    output = weights.output
    for unit in range(HIDDEN):
        sum_ = bias[unit]
        for trait in range(Traits.SIZE):
            sum_ += of_traits[trait, unit] * traits[trait]
        sums[unit] = sum_
    for index in range(end - first):
        row = evidence[first + index]
        total = np.float32(0.0)
        for unit in range(HIDDEN):
            sum_ = sums[unit]
            for kind in range(Evidence.SIZE):
                sum_ += of_evidence[kind, unit] * row[kind]
            total += output[unit] * max(sum_, np.float32(0.0))
        scores[index] = total


@kernel(forceinline=True, fastmath=_FAST)
def score_escape(weights: Any, traits: NDArray[np.float32], source: int) -> float:
    """Return the score of "none of the candidates"."""
    bias, output, of_traits = weights.escape_bias, weights.escape_output, weights.escape_traits
    total = weights.escape[source, match_bucket(traits), depth_bucket(traits)]
    for unit in range(HIDDEN):
        sum_ = bias[unit]
        for trait in range(Traits.SIZE):
            sum_ += of_traits[trait, unit] * traits[trait]
        total += output[unit] * max(sum_, np.float32(0.0))
    return total


@kernel()
def match_bucket(traits: NDArray[np.float32]) -> int:
    """Return the bucket of a match length: 0, 1, 2 to 3, 4 to 7, to 15, to 31, more."""
    return min(MATCH_BUCKETS - 1, np.int64(np.ceil(traits[Traits.MATCH] * np.float32(2))))


@kernel()
def depth_bucket(traits: NDArray[np.float32]) -> int:
    """Return the bucket of a depth: 0, 1, 2 to 3, 4 to 7, more."""
    return min(DEPTH_BUCKETS - 1, np.int64(np.ceil(traits[Traits.DEPTH] * np.float32(2) - 0.01)))


@kernel(forceinline=True, fastmath=_FAST)
def to_shares(shares: NDArray[np.float32], escape: float) -> None:
    """Replace scores by probabilities; the rest up to one is the escape, "none of these"."""
    highest = np.float32(escape)
    for index in range(shares.shape[0]):
        highest = max(highest, shares[index])
    total = fast_exp2(np.float32(escape) - highest)
    for index in range(shares.shape[0]):
        shares[index] = fast_exp2(shares[index] - highest)
        total += shares[index]
    scale = np.float32(1.0) / total
    for index in range(shares.shape[0]):
        shares[index] *= scale


@kernel(forceinline=True)
def mix(weights: Any, work: Work, current: int) -> None:
    """Write the probabilities of a node's candidates, given the node.

    Args:
        weights: one record of WEIGHTS.
        work: as `gather` left it; traits and evidence become features, and shares are written.
        current: the node.
    """
    node = work.nodes[current]
    first, end, traits = node.first_child, node.end_child, work.traits[node.place + 1]
    to_features(work.evidence, first, end)
    to_traits(traits)
    scores = work.shares[first:end]
    score(weights, traits, work.evidence, scores, first, end, work.sums)
    to_shares(scores, score_escape(weights, traits, node.dominant))


@kernel(forceinline=True)
def learn(weights: NDArray[Any], work: Work, tokens: NDArray[np.int32], rate: float) -> int:
    """Update the weights from the tokens that followed; return the number of updated nodes.

    Follows the tokens down the last draft's tree, through nodes whose children were computed.

    Args:
        weights: WEIGHTS[1], updated.
        work: as the draft left it.
        tokens: int32[n], the tokens that followed.
        rate: learning rate.
    """
    nodes, evidence, traits, shares = work.nodes, work.evidence, work.traits, work.shares
    current = 0
    for depth in range(tokens.shape[0]):
        node = nodes[current]
        if node.end_child == 0:
            return depth
        outcome = np.int64(-1)  # a literal would be compiled separately
        for child in range(node.first_child, node.end_child):
            if nodes[child].token == tokens[depth]:
                outcome = child
        _descend(
            weights[0], node, traits[node.place + 1], evidence, shares, outcome, np.float32(rate)
        )
        if outcome < 0 or nodes[outcome].place < 0:
            return depth + 1
        current = outcome
    return tokens.shape[0]


@kernel(forceinline=True)
def _descend(
    weights: Any,
    node: Any,
    traits: NDArray[np.float32],
    evidence: NDArray[np.float32],
    shares: NDArray[np.float32],
    outcome: int,
    rate: float,
) -> None:
    """Take one gradient step on the log loss at a node."""
    left = np.float32(1.0)
    for child in range(node.first_child, node.end_child):
        left -= shares[child]
        gradient = shares[child] - np.float32(1.0 if child == outcome else 0.0)
        if abs(gradient) > _LEAST_GRADIENT:
            _move_candidate(weights, evidence[child], traits, rate * gradient)
    gradient = rate * (max(left, np.float32(0.0)) - np.float32(1.0 if outcome < 0 else 0.0))
    weights.escape[node.dominant, match_bucket(traits), depth_bucket(traits)] -= gradient
    _move_escape(weights, traits, gradient)


@kernel(forceinline=True, fastmath=_FAST)
def _move_candidate(
    weights: Any, features: NDArray[np.float32], traits: NDArray[np.float32], step: float
) -> None:
    bias, of_traits, of_evidence = weights.bias, weights.traits, weights.evidence
    output = weights.output
    for unit in range(HIDDEN):
        sum_ = bias[unit]
        for trait in range(Traits.SIZE):
            sum_ += of_traits[trait, unit] * traits[trait]
        for kind in range(Evidence.SIZE):
            sum_ += of_evidence[kind, unit] * features[kind]
        through = step * output[unit] if sum_ > 0 else np.float32(0.0)
        output[unit] -= step * max(sum_, np.float32(0.0))
        bias[unit] -= through
        for trait in range(Traits.SIZE):
            of_traits[trait, unit] -= through * traits[trait]
        for kind in range(Evidence.SIZE):
            of_evidence[kind, unit] -= through * features[kind]


@kernel(forceinline=True, fastmath=_FAST)
def _move_escape(weights: Any, traits: NDArray[np.float32], step: float) -> None:
    bias, output, of_traits = weights.escape_bias, weights.escape_output, weights.escape_traits
    for unit in range(HIDDEN):
        sum_ = bias[unit]
        for trait in range(Traits.SIZE):
            sum_ += of_traits[trait, unit] * traits[trait]
        through = step * output[unit] if sum_ > 0 else np.float32(0.0)
        output[unit] -= step * max(sum_, np.float32(0.0))
        bias[unit] -= through
        for trait in range(Traits.SIZE):
            of_traits[trait, unit] -= through * traits[trait]
