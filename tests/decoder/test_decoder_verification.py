import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from decoder.verification import accept_greedy, accept_sampled, draw, follow
from retriever.tree import ROOT, DraftTree
from tests.decoder.decoding import tree_of

SIZE = 6
TRIALS = 3000
TREE = tree_of([(ROOT, 1), (0, 2), (ROOT, 3), (2, 2), (1, 4)])


def fake_logits(context: tuple[int, ...]) -> NDArray[np.float64]:
    """A target that is a pure function of its last two tokens."""
    return np.random.default_rng([11, *context[-2:]]).normal(0, 1.2, SIZE)


def tree_logits(context: tuple[int, ...], tree: DraftTree) -> torch.Tensor:
    paths = [[], *(tree.token_ids[tree.path_to(node)].tolist() for node in range(len(tree)))]
    return torch.tensor(np.array([fake_logits((*context, *path)) for path in paths]))


def softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def chi_square_excess(counts: NDArray[np.int64], expected: NDArray[np.float64]) -> float:
    """Return how many standard deviations the statistic lies above its mean."""
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = expected.size - 1
    return float((statistic - freedom) / np.sqrt(2 * freedom))


def pairs_emitted(rule: object, temperature: float) -> NDArray[np.int64]:
    """Count the first two tokens of many sequences decoded with drafts."""
    generator = torch.Generator().manual_seed(5)
    counts = np.zeros((SIZE, SIZE), np.int64)
    for _ in range(TRIALS):
        tokens: tuple[int, ...] = ()
        while len(tokens) < 2:
            path, token = rule(
                TREE, tree_logits(tokens, TREE), temperature=temperature, generator=generator
            )
            tokens = (*tokens, *TREE.token_ids[path].tolist(), token)
        counts[tokens[0], tokens[1]] += 1
    return counts


def pairs_expected(temperature: float) -> NDArray[np.float64]:
    first = softmax(fake_logits(()) / temperature)
    rows = [softmax(fake_logits((token,)) / temperature) for token in range(SIZE)]
    return TRIALS * first[:, None] * np.array(rows)


def trusting_the_draft(
    tree: DraftTree, logits: torch.Tensor, *, temperature: float, generator: torch.Generator
) -> tuple[NDArray[np.int64], int]:
    """Planted error: a child is accepted with its draft's probability."""
    choices = draw(torch.softmax(logits / temperature, -1), generator).tolist()
    for node in range(len(tree)):
        if torch.rand((), generator=generator) < tree.probabilities[node] * 0.3:
            choices[tree.parents[node] + 1] = int(tree.token_ids[node])
    return follow(tree, choices)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampling_with_drafts_gives_the_targets_distribution(temperature: float) -> None:
    counts = pairs_emitted(accept_sampled, temperature)
    assert chi_square_excess(counts, pairs_expected(temperature)) < 4


def test_planted_trust_in_the_draft_is_caught() -> None:
    counts = pairs_emitted(trusting_the_draft, 1.0)
    assert chi_square_excess(counts, pairs_expected(1.0)) > 10


@pytest.mark.parametrize("size", [5, 256, 700])
def test_draw_follows_the_distribution_over_blocks(size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = np.random.default_rng(0).dirichlet(np.full(size, 2.0))
    rows = torch.tensor(weights, dtype=torch.float32).expand(20000, size)
    counts = np.bincount(draw(rows, generator).numpy(), minlength=size)
    assert chi_square_excess(counts, 20000 * weights) < 4


def test_draw_never_takes_what_is_impossible() -> None:
    probabilities = torch.zeros(4000, 600)
    probabilities[:, [3, 255, 256, 599]] = torch.tensor([0.1, 0.2, 0.3, 0.4])
    assert set(draw(probabilities).tolist()) == {3, 255, 256, 599}


def test_draw_is_repeatable_by_seed() -> None:
    probabilities = torch.rand(50, 300)
    first, second = (draw(probabilities, torch.Generator().manual_seed(4)) for _ in range(2))
    assert torch.equal(first, second)


def test_greedy_follows_the_argmax_and_adds_the_targets_own_token() -> None:
    logits = torch.zeros(6, SIZE)
    for row, choice in enumerate([3, 0, 0, 2, 5, 0]):
        logits[row, choice] = 1.0
    path, token = accept_greedy(TREE, logits)
    assert (path.tolist(), token) == ([2, 3], 5)
    assert path.dtype == np.int64


def test_empty_tree_gives_the_targets_own_token() -> None:
    path, token = accept_greedy(DraftTree.empty(), torch.tensor([[0.0, 2.0, 1.0]]))
    assert (path.tolist(), token) == ([], 1)


def test_low_temperature_is_greedy() -> None:
    logits = tree_logits((), TREE)
    sampled = accept_sampled(TREE, logits, temperature=1e-4)
    greedy = accept_greedy(TREE, logits)
    assert (sampled[0].tolist(), sampled[1]) == (greedy[0].tolist(), greedy[1])
