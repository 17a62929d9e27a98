from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from decoder.sampling.verification import (
    Acceptance,
    Place,
    accept_greedy,
    accept_sampled,
    draw,
    follow,
    uniforms,
)
from retriever.tree import ROOT, DraftTree
from tests.decoder.decoding import tree_of

SIZE = 6
TRIALS = 3000
START = Place(0, np.zeros(0, np.int32))
TREE = tree_of([(ROOT, 1), (0, 2), (ROOT, 3), (2, 2), (1, 4)])


def place_at(sequence: int, position: int) -> Place:
    return Place(sequence, np.zeros(position, np.int32))


def fake_logits(context: tuple[int, ...]) -> NDArray[np.float64]:
    """A target that is a pure function of its last two tokens."""
    return np.random.default_rng([11, *context[-2:]]).normal(0, 1.2, SIZE)


def tree_logits(context: tuple[int, ...], tree: DraftTree) -> torch.Tensor:
    paths = [[], *(tree.token_ids[tree.path_to(node)].tolist() for node in range(len(tree)))]
    return torch.tensor(np.array([fake_logits((*context, *path)) for path in paths]))


def softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    weights = np.exp(logits - logits.max())
    probabilities: NDArray[np.float64] = weights / weights.sum()
    return probabilities


def chi_square_excess(counts: NDArray[np.int64], expected: NDArray[np.float64]) -> float:
    """Return how many standard deviations the statistic lies above its mean."""
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = expected.size - 1
    return float((statistic - freedom) / np.sqrt(2 * freedom))


def pairs_emitted(rule: Callable[..., Acceptance], temperature: float) -> NDArray[np.int64]:
    """Count the first two tokens of many sequences decoded with drafts."""
    counts = np.zeros((SIZE, SIZE), np.int64)
    for trial in range(TRIALS):
        tokens: tuple[int, ...] = ()
        while len(tokens) < 2:
            place = Place(trial, np.array(tokens, np.int32))
            logits = tree_logits(tokens, TREE)
            path, token = rule(TREE, logits, place, temperature=temperature, seed=5)
            tokens = (*tokens, *TREE.token_ids[path].tolist(), token)
        counts[tokens[0], tokens[1]] += 1
    return counts


def pairs_expected(temperature: float) -> NDArray[np.float64]:
    first = softmax(fake_logits(()) / temperature)
    rows = [softmax(fake_logits((token,)) / temperature) for token in range(SIZE)]
    return TRIALS * first[:, None] * np.array(rows)


def trusting_the_draft(
    tree: DraftTree, logits: torch.Tensor, place: Place, *, temperature: float, seed: int
) -> Acceptance:
    """Planted error: a child is accepted with its draft's probability."""
    rng = np.random.default_rng([seed, place.sequence, place.position])
    points = torch.from_numpy(rng.random(len(logits)))
    choices = draw(torch.softmax(logits / temperature, -1), points).tolist()
    for node in range(len(tree)):
        if rng.random() < tree.probabilities[node] * 0.3:
            choices[tree.parents[node] + 1] = int(tree.token_ids[node])
    return follow(tree, choices)


def sharing_one_number(
    tree: DraftTree, logits: torch.Tensor, place: Place, *, temperature: float, seed: int
) -> Acceptance:
    """Planted error: all depths share the number of the first position."""
    points = torch.from_numpy(uniforms(seed, place, 1)).expand(len(logits))
    return follow(tree, draw(torch.softmax(logits / temperature, -1), points).tolist())


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampling_with_drafts_gives_the_targets_distribution(temperature: float) -> None:
    counts = pairs_emitted(accept_sampled, temperature)
    assert chi_square_excess(counts, pairs_expected(temperature)) < 4


@pytest.mark.parametrize("planted", [trusting_the_draft, sharing_one_number])
def test_planted_errors_in_sampling_are_caught(planted: Callable[..., Acceptance]) -> None:
    counts = pairs_emitted(planted, 1.0)
    assert chi_square_excess(counts, pairs_expected(1.0)) > 10


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
    numbers = uniforms(seed, place_at(sequence, position), count)
    one_by_one = [
        uniforms(seed, place_at(sequence, position + ahead), 1)[0] for ahead in range(count)
    ]
    assert numbers.tolist() == one_by_one
    assert len(set(one_by_one)) == count


def test_seeds_and_sequences_have_numbers_of_their_own() -> None:
    streams = [
        tuple(uniforms(seed, place_at(sequence, 0), 4))
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


def test_low_temperature_is_greedy() -> None:
    logits = tree_logits((), TREE)
    sampled = accept_sampled(TREE, logits, START, temperature=1e-4, seed=0)
    greedy = accept_greedy(TREE, logits, START)
    assert (sampled[0].tolist(), sampled[1]) == (greedy[0].tolist(), greedy[1])
