"""The frontier gives candidates by falling probability, and knows which can no longer be taken."""

import numpy as np

from retriever.kernels.layout import NUM_RANKS
from retriever.kernels.tree_growth import candidate_of, key_of, least_of, pop, push, rank_of


def test_candidates_leave_by_falling_probability_and_of_equals_the_first_comes_first() -> None:
    rng = np.random.default_rng(61)
    for _ in range(300):
        num = int(rng.integers(1, 60))
        probabilities = rng.choice(rng.random(8), num).astype(np.float32)
        heap, waiting, left = np.zeros(num, np.int64), set[int](), list(range(num))
        while waiting or left:
            if left and (not waiting or rng.random() < 0.6):
                push(heap, len(waiting), key_of(probabilities[left[0]], left[0]))
                waiting.add(left.pop(0))
                continue
            expected = min(waiting, key=lambda each: (-probabilities[each], each))
            assert candidate_of(pop(heap, len(waiting))) == expected
            waiting.remove(expected)


def test_numbers_of_candidates_survive_in_keys() -> None:
    for candidate in (0, 1, (1 << 14) - 1, (1 << 31) - 1):
        for probability in (1e-6, 0.5, 1.0):
            assert candidate_of(key_of(probability, candidate)) == candidate


def test_ranks_fall_with_probability_and_know_their_least() -> None:
    probabilities = np.exp2(-np.linspace(0, 20, 4001)).astype(np.float32)
    ranks = [int(rank_of(each)) for each in probabilities]
    assert ranks == sorted(ranks)
    assert set(ranks) == set(range(NUM_RANKS))
    for rank, probability in zip(ranks, probabilities.tolist(), strict=True):
        assert probability >= 0.999 * least_of(rank)
        if rank > 0:
            assert probability <= 1.001 * least_of(rank - 1)
