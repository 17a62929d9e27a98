"""How evidence is mixed: candidates are scored by a small network, and the network learns.

A candidate's score is a hidden layer over the logarithms of its evidence and of how much evidence
its node has; "none of these" has a score as well, from the latter alone. A softmax (to the base 2)
makes probabilities of them. That is the log-linear mixing of context-mixing compressors (Mahoney
2005) with one hidden layer, which sees how kinds of evidence bear on one another. Each outcome
moves the weights by one step down the gradient of its surprise, so that the probabilities come to
mean what they say for the text at hand.
"""

from typing import Any, Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

from retriever.kernels.arithmetic import fast_exp2, fast_log2
from retriever.kernels.borrowing import borrow
from retriever.kernels.layout import (
    DEPTH_BUCKETS,
    HIDDEN,
    MATCH_BUCKETS,
    Evidence,
    Traits,
    Work,
)

_LEAST: Final = np.float32(1e-6)
_LEAST_AFFINE: Final = np.float32(1e-3)


@njit(cache=True, nogil=True, fastmath={"contract", "reassoc", "nsz"})
def to_features(evidence: NDArray[np.float32], first: int, end: int) -> None:
    """Replace evidence by its logarithms, moved and scaled to about -2 to 2.

    Args:
        evidence: float32[Evidence.SIZE, max_nodes]; columns `first` to `end` are written.
        first: first candidate.
        end: after the last one.
    """
    rows, live = evidence[Evidence.ROWS, first:end], evidence[Evidence.LIVE, first:end]
    corpus, affine = evidence[Evidence.CORPUS, first:end], evidence[Evidence.AFFINE, first:end]
    recency = evidence[Evidence.RECENCY, first:end]
    unigram = evidence[Evidence.UNIGRAM, first:end]
    for index in range(end - first):
        rows[index] = (fast_log2(rows[index] + _LEAST) + np.float32(8)) * np.float32(0.25)
        live[index] = (fast_log2(live[index] + _LEAST) + np.float32(8)) * np.float32(0.25)
        corpus[index] = (fast_log2(corpus[index] + _LEAST) + np.float32(8)) * np.float32(0.25)
        affine[index] = (fast_log2(affine[index] + _LEAST_AFFINE) + np.float32(5)) * np.float32(0.3)
        recency[index] = (fast_log2(recency[index]) - np.float32(10)) * np.float32(0.15)
        unigram[index] = (fast_log2(unigram[index] + _LEAST) + np.float32(12)) * np.float32(0.25)


@njit(cache=True, nogil=True)
def to_traits(traits: NDArray[np.float32]) -> None:
    """Replace what is known of a node by logarithms of it, scaled likewise."""
    for index in (Traits.MATCH, Traits.DEPTH):
        traits[index] = fast_log2(traits[index] + np.float32(1)) * np.float32(0.5)
    traits[Traits.ROWS] = (fast_log2(traits[Traits.ROWS]) + np.float32(3)) * np.float32(0.3)
    for index in range(Traits.CORPUS_3, Traits.SIZE):
        traits[index] = fast_log2(traits[index] + np.float32(0.1)) * np.float32(0.2)


@njit(cache=True, nogil=True, fastmath={"contract", "reassoc", "nsz"})
def score(
    weights: Any,
    traits: NDArray[np.float32],
    evidence: NDArray[np.float32],
    scores: NDArray[np.float32],
    first: int,
    end: int,
) -> None:
    """Write the scores of candidates `first` to `end`, float32[end - first]."""
    rows, live = evidence[Evidence.ROWS, first:end], evidence[Evidence.LIVE, first:end]
    corpus, affine = evidence[Evidence.CORPUS, first:end], evidence[Evidence.AFFINE, first:end]
    recency = evidence[Evidence.RECENCY, first:end]
    unigram = evidence[Evidence.UNIGRAM, first:end]
    bias, output = weights.bias, weights.output
    of_traits, of_evidence = weights.traits, weights.evidence
    scores[:] = np.float32(0.0)
    for unit in range(HIDDEN):
        base = bias[unit]
        for trait in range(Traits.SIZE):
            base += of_traits[unit, trait] * traits[trait]
        w0, w1, w2 = of_evidence[unit, 0], of_evidence[unit, 1], of_evidence[unit, 2]
        w3, w4, w5 = of_evidence[unit, 3], of_evidence[unit, 4], of_evidence[unit, 5]
        out = output[unit]
        for index in range(end - first):
            sum_ = base + w0 * rows[index] + w1 * live[index] + w2 * corpus[index]
            sum_ += w3 * affine[index] + w4 * recency[index] + w5 * unigram[index]
            scores[index] += out * max(sum_, np.float32(0.0))


@njit(cache=True, nogil=True, fastmath={"contract", "reassoc", "nsz"})
def score_doubt(weights: Any, traits: NDArray[np.float32], source: int) -> float:
    """Return the score of "none of the candidates"."""
    bias, output, of_traits = weights.doubt_bias, weights.doubt_output, weights.doubt_traits
    total = weights.doubt[source, match_bucket(traits), depth_bucket(traits)]
    for unit in range(HIDDEN):
        sum_ = bias[unit]
        for trait in range(Traits.SIZE):
            sum_ += of_traits[unit, trait] * traits[trait]
        total += output[unit] * max(sum_, np.float32(0.0))
    return total


@njit(cache=True, nogil=True)
def match_bucket(traits: NDArray[np.float32]) -> int:
    """Return the bucket of a match length: 0, 1, 2 to 3, 4 to 7, to 15, to 31, more."""
    return min(MATCH_BUCKETS - 1, np.int64(np.ceil(traits[Traits.MATCH] * np.float32(2))))


@njit(cache=True, nogil=True)
def depth_bucket(traits: NDArray[np.float32]) -> int:
    """Return the bucket of a depth: 0, 1, 2 to 3, 4 to 7, more."""
    return min(DEPTH_BUCKETS - 1, np.int64(np.ceil(traits[Traits.DEPTH] * np.float32(2) - 0.01)))


@njit(cache=True, nogil=True, fastmath={"contract", "reassoc", "nsz"})
def to_shares(shares: NDArray[np.float32], doubt: float) -> None:
    """Replace scores by probabilities, which leave room for "none of these"."""
    highest = np.float32(doubt)
    for index in range(shares.shape[0]):
        highest = max(highest, shares[index])
    total = fast_exp2(np.float32(doubt) - highest)
    for index in range(shares.shape[0]):
        shares[index] = fast_exp2(shares[index] - highest)
        total += shares[index]
    scale = np.float32(1.0) / total
    for index in range(shares.shape[0]):
        shares[index] *= scale


@njit(cache=True, nogil=True)
def mix(
    weights: Any,
    node: Any,
    traits: NDArray[np.float32],
    evidence: NDArray[np.float32],
    shares: NDArray[np.float32],
) -> None:
    """Write the probabilities of a node's candidates, given the node.

    Args:
        weights: one record of WEIGHTS.
        node: one record of NODE.
        traits: float32[Traits.SIZE], of the node as `gather` left it; becomes features.
        evidence: float32[Evidence.SIZE, max_nodes], likewise.
        shares: float32[max_nodes], written.
    """
    first, end = node.first_child, node.end_child
    to_features(evidence, first, end)
    to_traits(traits)
    scores = shares[first:end]
    score(weights, traits, evidence, scores, first, end)
    to_shares(scores, score_doubt(weights, traits, node.voice))


@njit(cache=True, nogil=True)
def learn(weights: NDArray[Any], work: Work, tokens: NDArray[np.int32], rate: float) -> int:
    """Move the weights by what came next; return for how many nodes.

    Follows the tokens down the tree of the last draft, as far as it was considered.

    Args:
        weights: WEIGHTS[1], updated.
        work: as the draft left it.
        tokens: int32[n], what came next.
        rate: size of a step.
    """
    weights, nodes, shares = borrow(weights), borrow(work.nodes), borrow(work.shares)
    evidence, traits = borrow(work.evidence), borrow(work.traits)
    current = 0
    for depth in range(tokens.shape[0]):
        node = nodes[current]
        if node.end_child == 0:
            return depth
        outcome = -1
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


@njit(cache=True, nogil=True)
def _descend(
    weights: Any,
    node: Any,
    traits: NDArray[np.float32],
    evidence: NDArray[np.float32],
    shares: NDArray[np.float32],
    outcome: int,
    rate: float,
) -> None:
    """Take one step down the gradient of the surprise at a node."""
    first, end = node.first_child, node.end_child
    left = np.float32(1.0)
    for child in range(first, end):
        left -= shares[child]
        blame = shares[child] - np.float32(1.0 if child == outcome else 0.0)
        if abs(blame) > np.float32(0.002):
            _blame_candidate(weights, evidence[:, child], traits, rate * blame)
    blame = rate * (max(left, np.float32(0.0)) - np.float32(1.0 if outcome < 0 else 0.0))
    weights.doubt[node.voice, match_bucket(traits), depth_bucket(traits)] -= blame
    _blame_doubt(weights, traits, blame)


@njit(cache=True, nogil=True)
def _blame_candidate(
    weights: Any, features: NDArray[np.float32], traits: NDArray[np.float32], step: float
) -> None:
    for unit in range(HIDDEN):
        sum_ = weights.bias[unit]
        for trait in range(Traits.SIZE):
            sum_ += weights.traits[unit, trait] * traits[trait]
        for index in range(Evidence.SIZE):
            sum_ += weights.evidence[unit, index] * features[index]
        if sum_ > 0:
            through = step * weights.output[unit]
            weights.output[unit] -= step * sum_
            weights.bias[unit] -= through
            for trait in range(Traits.SIZE):
                weights.traits[unit, trait] -= through * traits[trait]
            for index in range(Evidence.SIZE):
                weights.evidence[unit, index] -= through * features[index]


@njit(cache=True, nogil=True)
def _blame_doubt(weights: Any, traits: NDArray[np.float32], step: float) -> None:
    for unit in range(HIDDEN):
        sum_ = weights.doubt_bias[unit]
        for trait in range(Traits.SIZE):
            sum_ += weights.doubt_traits[unit, trait] * traits[trait]
        if sum_ > 0:
            through = step * weights.doubt_output[unit]
            weights.doubt_output[unit] -= step * sum_
            weights.doubt_bias[unit] -= through
            for trait in range(Traits.SIZE):
                weights.doubt_traits[unit, trait] -= through * traits[trait]
