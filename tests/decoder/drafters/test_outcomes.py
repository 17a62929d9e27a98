"""What may come of a pass is found as a slow twin finds it, and is always something that may."""

import math
from collections import Counter, defaultdict
from itertools import pairwise

import numpy as np
import pytest

from decoder.drafters.following import NO_TABLE, PendingPass
from decoder.drafters.kernels.likely_outcomes import (
    GUESSED,
    NUM_FREQUENT,
    TRUSTED,
    LikelyOutcomes,
    Nodes,
    find_outcomes,
)
from decoder.drafters.kernels.recycled import NUM_ORDERS, Table, write_rows
from retriever.drafter import NUM_FOUND
from retriever.tree import ROOT, DraftTree
from tests.decoder.decoding import random_tree
from tests.decoder.drafters.drafted_chains import paths_of
from tests.suite_parts import cases

VOCABULARY = 9
Outcome = tuple[int, ...]
Likely = dict[tuple[int, ...], dict[int, float]]
"""Log-odds of tokens by the context before them, the latest token first."""


def possible(verified: DraftTree, max_tokens: int) -> set[Outcome]:
    """All outcomes of a small vocabulary: paths that leave the tree with their last token."""
    inside = {(), *paths_of(verified)}
    return {
        (*path, token)
        for path in inside
        for token in range(VOCABULARY)
        if (*path, token) not in inside and len(path) < max_tokens
    }


def shares_after(last: list[int], path: Outcome, table: Likely) -> dict[int, float]:
    """The twin of how what is left is shared."""
    shares: dict[int, float] = defaultdict(float)
    context = [*last, *path][::-1][:NUM_ORDERS]
    rest = 1.0
    for order in range(len(context), 0, -1):
        known = table.get(tuple(context[:order]))
        if known is not None:
            rest -= TRUSTED
            for token, odds in known.items():
                shares[token] += TRUSTED / (1 + math.exp(-odds))
            break
    after_one = Counter(b for a, b in pairwise(last) if a == context[0])
    after_two = Counter(
        c for a, b, c in zip(last, last[1:], last[2:], strict=False) if [b, a] == context[:2]
    )
    for after in (after_two, after_one):
        if after:
            given = rest * after.total() / (after.total() + len(after))
            rest -= given
            for token, count in after.items():
                shares[token] += given * count / after.total()
    for token, count in Counter(last).items():
        shares[token] += rest * count / len(last)
    return shares


def twin(
    last: list[int], proposed: DraftTree, verified: DraftTree, table: Likely, max_tokens: int
) -> dict[Outcome, float]:
    """Every outcome that can be found, with its score."""
    inside = dict(zip([(), *paths_of(verified)], [1.0, *verified.probabilities], strict=True))
    left = dict(inside)
    for path in paths_of(verified):
        left[path[:-1]] -= inside[path]
    scores: dict[Outcome, float] = {}
    for path, probability in zip(paths_of(proposed), proposed.probabilities, strict=True):
        if path not in inside and path[:-1] in inside:
            scores[path] = probability
            left[path[:-1]] -= probability
    for path in inside:
        if left[path] >= 1e-4:
            for token, share in shares_after(last, path, table).items():
                if (*path, token) not in inside and (*path, token) not in scores:
                    scores[*path, token] = GUESSED * left[path] * share
    return {path: score for path, score in scores.items() if len(path) <= max_tokens}


def random_table(rng: np.random.Generator) -> tuple[Table, Likely]:
    """Likely tokens as the kernel has them, and by context."""
    arrays, likely = Table.of(1 << 10, NUM_FOUND), Likely()
    for now in range(int(rng.integers(0, 8))):
        context = rng.integers(0, VOCABULARY, NUM_ORDERS).astype(np.int32)
        tokens = rng.permutation(VOCABULARY)[:NUM_FOUND].astype(np.int32)
        log_odds = np.sort(rng.normal(size=NUM_FOUND))[::-1].astype(np.float32)
        write_rows(arrays, context[None], tokens[None], log_odds[None], now + 1)
        for order in range(1, NUM_ORDERS + 1):
            likely[tuple(context[:order].tolist())] = dict(
                zip(tokens.tolist(), log_odds.tolist(), strict=True)
            )
    return arrays, likely


def parts_of(rng: np.random.Generator, tree: DraftTree) -> DraftTree:
    """What may be verified of a tree: a prefix, a chain, or something else."""
    kind = rng.integers(0, 4)
    if kind == 0:
        return tree.best_chain(int(rng.integers(1, 6)))
    if kind == 1:
        return random_tree(rng, int(rng.integers(0, 12)), VOCABULARY)
    return tree.prefix(int(rng.integers(0, len(tree) + 1)))


@pytest.mark.seeds
def test_outcomes_are_those_of_the_twin() -> None:
    for seed in range(cases(60, of=300)):
        check_outcomes(seed)


def check_outcomes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    last = rng.integers(0, int(rng.integers(1, VOCABULARY + 1)), int(rng.integers(1, 40)))
    proposed = random_tree(rng, int(rng.integers(0, 30)), VOCABULARY)
    verified = parts_of(rng, proposed)
    table, likely = random_table(rng)
    most, max_tokens = int(rng.integers(1, 80)), int(rng.integers(1, 8))
    expected = twin(last.tolist(), proposed, verified, likely, max_tokens)
    pending = PendingPass(last.astype(np.int32), proposed, verified, most, max_tokens, table)
    outcomes = [tuple(each.tolist()) for each in pending.outcomes()]
    assert len(set(outcomes)) == len(outcomes) == min(most, len(expected))
    assert set(outcomes) <= possible(verified, max_tokens)
    scores = [expected[each] for each in outcomes]
    best = sorted(expected.values(), reverse=True)[: len(outcomes)]
    np.testing.assert_allclose(scores, best, atol=1e-6)


def test_outcomes_stand_in_order_of_what_they_are_given() -> None:
    proposed = DraftTree.checked([1, 2, 3], [ROOT, 0, 1], [0.9, 0.8, 0.6], [1, 1, 1])
    last = np.array([5, 2, 7, 5], np.int32)
    pending = PendingPass(last, proposed, proposed.prefix(2), 3, 9)
    assert [each.tolist() for each in pending.outcomes()] == [[1, 2, 3], [1, 2, 7], [2]]


def test_a_limit_of_tokens_holds_for_outcomes() -> None:
    proposed = DraftTree.checked([1, 2, 3], [ROOT, 0, 1], [0.9, 0.8, 0.7], [1, 1, 1])
    pending = PendingPass(np.array([5], np.int32), proposed, proposed.prefix(2), 9, 2)
    assert [each.tolist() for each in pending.outcomes()] == [[5], [1, 5]]
    none = PendingPass(np.array([5], np.int32), proposed, proposed.prefix(2), 9, 0)
    assert none.outcomes() == []


def test_many_distinct_tokens_are_counted_and_the_most_frequent_guessed() -> None:
    rng = np.random.default_rng(0)
    last = rng.permutation(np.arange(100_000, 104_000, dtype=np.int32))
    often = last[: NUM_FREQUENT // 2].repeat(3)
    tokens = np.concatenate([last, rng.permutation(often), np.array([7], np.int32)])
    pending = PendingPass(tokens, DraftTree.empty(), DraftTree.empty(), NUM_FREQUENT // 2, 4)
    assert {int(each[0]) for each in pending.outcomes()} == set(often.tolist())


def test_no_room_finds_nothing() -> None:
    empty = DraftTree.empty()
    arrays = Nodes(empty.token_ids, empty.parents, empty.probabilities)
    found = LikelyOutcomes.of(0, 0, 0, NO_TABLE)
    assert find_outcomes(found, np.array([1], np.int32), NO_TABLE, arrays, arrays, 4) == 0
