from itertools import product

import numpy as np
import pytest

from decoder.plugins.experimental_sglang.corpus import lay_out, masks_of
from retriever.tree import DraftTree
from tests.decoder.plugins.experimental_sglang.rows import greedy_path, random_tree, row_of
from tests.decoder.plugins.experimental_sglang.tree_verification import (
    links_of,
    sampled,
    verify_greedy,
)

NUM_TOKENS, WIDTH = 3, 6


def trees(count: int, max_nodes: int = WIDTH - 1) -> list[DraftTree]:
    random = np.random.default_rng(7)
    return [random_tree(random, max_nodes, NUM_TOKENS) for _ in range(count)]


def test_whatever_the_target_chooses_its_own_path_through_the_tree_is_accepted() -> None:
    for tree in trees(25):
        for last_token in (0, 2):
            tokens, mask = row_of(tree, last_token, WIDTH)
            links = links_of(mask)
            for target in product(range(NUM_TOKENS), repeat=WIDTH):
                accepted = verify_greedy(tokens, links, np.array(target))
                assert accepted == greedy_path(tree, np.array(target))
                assert max(accepted) <= len(tree)  # behind it comes padding


def test_sampling_gives_the_targets_own_distribution_at_every_node() -> None:
    random = np.random.default_rng(3)
    for tree in trees(50):
        tokens, mask = row_of(tree, 0, WIDTH)
        for node in range(len(tree) + 1):
            target = random.dirichlet([0.7] * NUM_TOKENS)
            np.testing.assert_allclose(
                sampled(tokens, links_of(mask), node, target.tolist()), target, atol=1e-12
            )


def test_padding_that_hangs_from_the_root_would_be_drawn_too_often() -> None:
    """Which is how SGLang's own corpus pads; so the test above can fail."""
    tokens = np.array([1, 0, 0, 0])
    mask = np.eye(4, dtype=np.int64)
    mask[:, 0] = 1
    drawn = sampled(tokens, links_of(mask), 0, [0.2, 0.8])
    np.testing.assert_allclose(drawn, [0.6, 0.4])


def test_no_link_leads_to_padding() -> None:
    for tree in trees(200):
        links = links_of(row_of(tree, 0, WIDTH)[1])
        for linked in (links.next_token, links.next_sibling):
            assert linked.max() <= len(tree)
            assert (linked[len(tree) + 1 :] == -1).all()


def test_positions_are_depths_and_masks_hold_ancestors_only() -> None:
    for tree in trees(200):
        _, mask = row_of(tree, 0, WIDTH)
        assert links_of(mask).positions[1 : len(tree) + 1].tolist() == tree.depths().tolist()
        for node in range(len(tree)):
            path = [0, *(tree.path_to(node) + 1)]
            assert np.flatnonzero(mask[node + 1]).tolist() == path


def test_rows_of_a_batch_are_laid_out_as_alone() -> None:
    batch = trees(8)
    tokens, parents = lay_out(batch, list(range(8)), WIDTH)
    masks = masks_of(parents)
    for row, tree in enumerate(batch):
        alone, mask = row_of(tree, row, WIDTH)
        assert tokens[row].tolist() == alone.tolist()
        assert masks[row].tolist() == mask.tolist()


@pytest.mark.parametrize("width", [1, 2, 4])
def test_a_tree_beyond_the_width_is_cut_to_its_best_nodes(width: int) -> None:
    tree = max(trees(20), key=len)
    tokens, mask = row_of(tree, 2, width)
    assert tokens.tolist() == [2, *tree.token_ids[: width - 1].tolist()]
    assert mask.tolist() == row_of(tree.prefix(width - 1), 2, width)[1].tolist()


def test_an_empty_batch_has_no_rows() -> None:
    tokens, parents = lay_out([], [], WIDTH)
    assert tokens.shape == (0, WIDTH)
    assert masks_of(parents).shape == (0, WIDTH, WIDTH)
