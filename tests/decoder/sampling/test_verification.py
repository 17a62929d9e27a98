import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from decoder.sampling.verification import PassContext, accept_greedy, draw, drawn_numbers, uniforms
from retriever.tree import ROOT, DraftTree
from tests.decoder.decoding import tree_of

SIZE = 6
START = PassContext(0, np.zeros(0, np.int32))
TREE = tree_of([(ROOT, 1), (0, 2), (ROOT, 3), (2, 2), (1, 4)])


def context_at(sequence: int, position: int) -> PassContext:
    return PassContext(sequence, np.zeros(position, np.int32))


def chi_square_excess(counts: NDArray[np.int64], expected: NDArray[np.float64]) -> float:
    """Return how many standard deviations the statistic lies above its mean."""
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = expected.size - 1
    return float((statistic - freedom) / np.sqrt(2 * freedom))


@pytest.mark.parametrize("size", [5, 256, 700])
def test_draw_follows_the_distribution_over_blocks(size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = np.random.default_rng(0).dirichlet(np.full(size, 2.0))
    rows = torch.tensor(weights, dtype=torch.float32).expand(20000, size)
    counts = np.bincount(
        draw(rows, torch.rand(20000, generator=generator).double()).numpy(), minlength=size
    )
    assert chi_square_excess(counts, 20000 * weights) < 4


def test_draw_never_takes_what_is_impossible() -> None:
    probabilities = torch.zeros(4000, 600)
    probabilities[:, [3, 255, 256, 599]] = torch.tensor([0.1, 0.2, 0.3, 0.4])
    assert set(draw(probabilities, torch.rand(4000).double()).tolist()) == {3, 255, 256, 599}


@given(st.integers(0, 2**64 - 1), st.integers(0, 1000), st.integers(0, 5000), st.integers(1, 30))
def test_random_numbers_belong_to_positions(
    seed: int, sequence: int, position: int, count: int
) -> None:
    numbers = uniforms(seed, context_at(sequence, position), count)
    one_by_one = [
        uniforms(seed, context_at(sequence, position + ahead), 1)[0] for ahead in range(count)
    ]
    assert numbers.tolist() == one_by_one
    assert len(set(one_by_one)) == count


@given(st.integers(0, 2**64 - 1), st.integers(0, 1000), st.integers(0, 5000))
def test_numbers_of_passes_are_none_of_positions(seed: int, sequence: int, position: int) -> None:
    context = context_at(sequence, position)
    of_pass = drawn_numbers(seed, context, (3, 4))
    assert of_pass.tolist() == drawn_numbers(seed, context, (3, 4)).tolist()
    of_next = drawn_numbers(seed, context_at(sequence, position + 1), (3, 4))
    of_positions = uniforms(seed, context_at(sequence, max(0, position - 4)), 40)
    assert len({*of_pass.flat, *of_next.flat, *of_positions}) == 12 + 12 + 40


def test_seeds_and_sequences_have_numbers_of_their_own() -> None:
    streams = [
        tuple(uniforms(seed, context_at(sequence, 0), 4))
        for seed in range(5)
        for sequence in range(5)
    ]
    assert len(set(streams)) == 25


def test_greedy_follows_the_argmax_and_adds_the_targets_own_token() -> None:
    logits = torch.zeros(6, SIZE)
    for row, choice in enumerate([3, 0, 0, 2, 5, 0]):
        logits[row, choice] = 1.0
    path, token = accept_greedy(TREE, logits, START)
    assert (path.tolist(), token) == ([2, 3], 5)
    assert path.dtype == np.int64


def test_empty_tree_gives_the_targets_own_token() -> None:
    path, token = accept_greedy(DraftTree.empty(), torch.tensor([[0.0, 2.0, 1.0]]), START)
    assert (path.tolist(), token) == ([], 1)
