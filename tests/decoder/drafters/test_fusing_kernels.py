import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from decoder.drafters.kernels.forest import Forest, plant
from decoder.drafters.kernels.fused_growth import Growth, grow
from decoder.drafters.kernels.fused_learning import learn
from decoder.drafters.kernels.readings import (
    LIKELY,
    NUM_LIKELY_COLUMNS,
    Readings,
    enter_rows,
    reader_log_odds,
)
from decoder.drafters.kernels.recycled import (
    LEAST_SHARE,
    NOT_FOUND,
    NUM_ORDERS,
    TAIL,
    WAYS,
    Table,
    find,
    key_of,
    rank_columns,
    write_rows,
)
from decoder.drafters.kernels.siblings import (
    BIAS,
    NUM_SETS,
    NUM_TABLE_SOURCES,
    NUM_WEIGHTS,
    SLOPE,
    UNLISTED,
    Hints,
    Siblings,
)
from decoder.drafters.recycling import likeliest, rows_of
from retriever.tree import DraftTree, Source
from tests.decoder.decoding import random_tree
from tests.decoder.drafters.fusing import Knowledge, Odds, Path, ReaderNotes, log_odds
from tests.suite_parts import cases

VOCABULARY = 12
CAPACITY = 1 << 12
MANY = 1e8
"""Squared gradients so far: so many that the order of the candidates hardly matters."""
LOG_SUM_ERROR = 3e-4
"""Powers of two are 2e-4 off at most, and sums of 500 of them round by 500 * 2 ** -24."""


def latest_first(tokens: Path) -> NDArray[np.int32]:
    context = np.full(NUM_ORDERS, -1, np.int32)
    last = tokens[-NUM_ORDERS:][::-1]
    context[: len(last)] = last
    return context


def knowledge(rng: np.random.Generator) -> tuple[Knowledge, Table, Hints]:
    """Return random evidence as dictionaries and as arrays."""
    trees = [
        random_tree(rng, int(rng.integers(0, 20)), VOCABULARY) for _ in range(rng.integers(0, 4))
    ]
    contexts = rng.integers(0, VOCABULARY, (int(rng.integers(0, 60)), NUM_ORDERS))
    table: dict[Path, Odds] = {}
    arrays = Table.of(CAPACITY, 4)
    for now, context in enumerate(contexts.tolist(), start=1):
        tokens = rng.permutation(VOCABULARY)[:4].astype(np.int32)
        odds = rng.normal(0, 2, 4).astype(np.float32)
        write_rows(arrays, latest_first(tuple(context))[None], tokens[None], odds[None], now)
        said = dict(zip(tokens.tolist(), odds.tolist(), strict=True))
        table |= {tuple(context[-order:]): said for order in range(1, NUM_ORDERS + 1)}
    hints = Hints(
        rng.permutation(VOCABULARY)[: rng.integers(0, 5)].astype(np.int32),
        rng.normal(0, 2, 5).astype(np.float32),
    )
    hints = Hints(hints.tokens, hints.log_odds[: len(hints.tokens)])
    readers = [read(rng, trees) for _ in range(rng.integers(0, 3))]
    num_sources = len(trees) + NUM_TABLE_SOURCES + len(readers)
    weights = rng.normal(0, 0.7, (NUM_SETS, num_sources + 1, NUM_WEIGHTS))
    context = tuple(rng.integers(0, VOCABULARY, int(rng.integers(1, 5))).tolist())
    said = dict(zip(hints.tokens.tolist(), hints.log_odds.tolist(), strict=True))
    return Knowledge(trees, table, context, said, weights, readers), arrays, hints


def read(rng: np.random.Generator, trees: list[DraftTree]) -> ReaderNotes:
    """Return what a model with part of the vocabulary says of some paths, each behind its parent.

    Some paths are of the trees, others of its own. No share is so small that it would be clipped:
    candidates would tie.
    """
    paths: list[Path] = [()] if rng.random() < 0.8 else []
    tokens = np.sort(rng.permutation(VOCABULARY)[: rng.integers(1, VOCABULARY + 1)])
    known = [
        tuple(tree.token_ids[tree.path_to(n)].tolist()) for tree in trees for n in range(len(tree))
    ]
    for path in sorted(known, key=len):
        if path[:-1] in paths and path not in paths and rng.random() < 0.7:
            paths.append(path)
    for _ in range(rng.integers(0, 20) if paths else 0):
        path = (*paths[rng.integers(0, len(paths))], int(rng.integers(0, VOCABULARY)))
        if path not in paths:
            paths.append(path)
    logits = {
        path: dict(
            zip(
                tokens.tolist(),
                rng.normal(0, 1.2, len(tokens)).astype(np.float32).tolist(),
                strict=True,
            )
        )
        for path in paths
    }
    return ReaderNotes(int(rng.integers(1, 3)), int(rng.integers(1, 6)), logits)


def readings_of(readers: list[ReaderNotes]) -> tuple[Readings, NDArray[np.int32]]:
    """Return the same as arrays, and the rows of the root."""
    columns = [
        np.array(list(next(iter(each.logits.values()), {0: 0.0})), np.int32) for each in readers
    ]
    readings = Readings.of(
        columns, [each.kind for each in readers], [each.source for each in readers]
    )
    roots = np.full(len(readers), -1, np.int32)
    for number, each in enumerate(readers):
        rows = {path: row for row, path in enumerate(each.logits)}
        for path, row in rows.items():
            values = np.array(list(each.logits[path].values()), np.float32)
            readings.logits[number, row, : len(values)] = values
            likely = np.argsort(-values, kind="stable")[:NUM_LIKELY_COLUMNS]
            readings.rows[number, row, LIKELY : LIKELY + len(likely)] = likely
            parent = rows[path[:-1]] if path else -1
            token = path[-1] if path else 0
            enter_rows(
                readings, number, row, np.array([token], np.int32), np.array([parent], np.int32)
            )
            exact = np.log(np.exp(values.astype(np.float64)).sum())
            assert readings.log_sums[number, row] == pytest.approx(exact, abs=LOG_SUM_ERROR)
            readings.log_sums[number, row] = exact  # or near ties would fall out differently
        roots[number] = rows.get((), -1)
    return readings, roots


def planted(trees: list[DraftTree]) -> Forest:
    forest, start = Forest.of(len(trees), 32), len(trees)
    for number, tree in enumerate(trees):
        start = plant(
            forest, number, start, tree.token_ids, tree.parents, tree.probabilities, tree.sources
        )
    return forest


@pytest.mark.seeds
def test_fused_tree_is_that_of_the_slow_twin() -> None:
    for seed in range(cases(100, of=500)):
        check_fused_tree(seed)


def check_fused_tree(seed: int) -> None:
    rng = np.random.default_rng(seed)
    known, table, hints = knowledge(rng)
    budget, floor = int(rng.integers(0, 40)), float(rng.choice([1e-4, 0.05]))
    num_trees = len(known.trees)
    num_readers = len(known.readers)
    growth = Growth.of(num_trees, 64, num_readers)
    siblings = Siblings.of(num_trees, num_readers)
    readings, roots = readings_of(known.readers)
    growth.places[0] = [*range(num_trees), *roots.tolist()]
    growth.contexts[0] = latest_first(known.context)
    size = grow(
        growth,
        siblings,
        planted(known.trees),
        table,
        known.weights,
        hints,
        readings,
        budget,
        floor,
        int(Source.MODEL),
    )
    tree = DraftTree.checked(
        growth.tokens[:size],
        growth.parents[:size],
        growth.probabilities[:size],
        growth.sources[:size],
    )
    expected = known.grown(budget, floor)
    assert len(tree) == len(expected)
    for node, (path, probability, source) in enumerate(expected):
        assert tuple(tree.token_ids[tree.path_to(node)].tolist()) == path
        assert tree.probabilities[node] == pytest.approx(probability, rel=1e-4)
        assert tree.sources[node] == source


def learned(known: Knowledge, came: Path, rate: float) -> NDArray[np.float64]:
    """Return the weights after one step for each candidate, the slow way, candidates in order."""
    weights, curvature = known.weights, np.full_like(known.weights, MANY)
    for depth, token in enumerate(came):
        path = came[:depth]
        opinions = known.opinions(path)
        own, squares = weights[known.chosen(opinions)], curvature[known.chosen(opinions)]
        for candidate, share in known.children(path).items():
            error = share - (candidate == token)
            gradient = np.zeros_like(own)
            gradient[-1, BIAS] = error
            for source, said in enumerate(opinions):
                if said is not None and candidate in said:
                    gradient[source, [BIAS, SLOPE]] = error, error * said[candidate]
                elif said is not None:
                    gradient[source, UNLISTED] = error
            squares += gradient**2
            own -= rate * gradient / np.sqrt(squares)
    return weights


@pytest.mark.seeds
def test_learning_moves_the_weights_as_the_slow_twin_does() -> None:
    for seed in range(cases(60, of=300)):
        check_learning(seed)


def check_learning(seed: int) -> None:
    rng = np.random.default_rng(1000 + seed)
    known, table, hints = knowledge(rng)
    came = tuple(rng.integers(0, VOCABULARY, 3).tolist())
    rate = 1.0
    weights = known.weights.copy()
    num_trees = len(known.trees)
    readings, roots = readings_of(known.readers)
    places = np.zeros((2, num_trees + len(roots)), np.int32)
    places[0] = [*range(num_trees), *roots.tolist()]
    learn(
        Siblings.of(num_trees, len(known.readers)),
        planted(known.trees),
        table,
        weights,
        np.full_like(weights, MANY),
        places,
        latest_first(known.context),
        hints,
        readings,
        np.array(came, np.int32),
        rate,
    )
    before = known.weights.copy()
    np.testing.assert_allclose(
        weights - before, learned(known, came, rate) - before, rtol=1e-3, atol=1e-8
    )


def test_what_a_reader_says_is_bounded_and_no_evidence_outside_of_its_vocabulary() -> None:
    logits = {3: 40.0, 5: 0.0, 9: 39.0}
    readings, _ = readings_of([ReaderNotes(1, 5, {(): logits})])
    said = [reader_log_odds(readings, 0, 0, token, 77.0) for token in (3, 5, 9, 4, 10_000)]
    expected = [log_odds(1 / (1 + np.exp(-1))), log_odds(0.0), log_odds(1 / (1 + np.exp(1)))]
    np.testing.assert_allclose(said, [*expected, 77.0, 77.0], rtol=1e-5)
    assert readings.rows[0, 0, LIKELY:].tolist() == [0, 2, 1] + [-1] * 7


@pytest.mark.parametrize("width", [1, 3, 500])
def test_logits_that_are_no_numbers_are_noticed(width: int) -> None:
    columns = [np.arange(width, dtype=np.int32), np.arange(500, dtype=np.int32)]
    readings = Readings.of(columns, [1, 2], [5, 5])
    readings.logits[:] = np.nan
    rng = np.random.default_rng(width)
    node = np.zeros(1, np.int32), np.full(1, -1, np.int32)

    def entered() -> bool:
        """Enter the row as readers do: the likeliest columns first, whatever NaN makes of them."""
        likely = np.empty((1, min(NUM_LIKELY_COLUMNS, width)), np.int32)
        rank_columns(readings.logits[0, :1, :width].copy().view(np.int32), likely)
        readings.rows[0, 0, LIKELY : LIKELY + likely.shape[1]] = likely
        return bool(enter_rows(readings, 0, 0, *node))

    for _ in range(50):
        logits = rng.normal(0, 10, width).astype(np.float32)
        logits[1:][rng.random(width - 1) < 0.2] = -np.inf
        readings.logits[0, 0, :width] = logits
        assert entered()
        expected = torch.from_numpy(logits).double().logsumexp(0)
        assert readings.log_sums[0, 0] == pytest.approx(float(expected), abs=LOG_SUM_ERROR)
        for wrong in (np.nan, np.copysign(np.nan, -1.0), np.inf):  # NaN ranks first, or last
            readings.logits[0, 0, :width] = logits
            readings.logits[0, 0, rng.integers(0, width)] = wrong
            assert not entered()
    readings.logits[0, 0, :width] = -np.inf
    assert not entered()


def test_table_holds_what_was_written_last() -> None:
    for seed in range(20):
        check_table(seed)


def check_table(seed: int) -> None:
    rng = np.random.default_rng(seed)
    table = Table.of(1 << 12, 2)
    truth: dict[Path, list[int]] = {}
    for now in range(1, 60):
        contexts = rng.integers(-1, 5, (int(rng.integers(1, 4)), NUM_ORDERS)).astype(np.int32)
        tokens = rng.integers(0, 99, (len(contexts), 2)).astype(np.int32)
        write_rows(table, contexts, tokens, tokens.astype(np.float32), now)
        for context, row in zip(contexts.tolist(), tokens.tolist(), strict=True):
            for order in range(1, NUM_ORDERS + 1):
                if min(context[:order]) < 0:
                    break
                truth[tuple(context[:order])] = row
    for context, row in truth.items():
        padded = np.array([*context, *[0] * (NUM_ORDERS - len(context))], np.int32)
        entry = find(table.entries, key_of(padded, len(context)))
        assert table.tokens[entry].tolist() == row
        assert table.log_odds[entry].tolist() == row


def test_rows_of_small_vocabularies_are_not_read_beyond_their_end() -> None:
    table = Table.of(1 << 6, 8)
    contexts = np.array([[0, -1, -1], [1, -1, -1]], np.int32)
    tokens = np.array([[2, 1, 0], [1, 0, 2]], np.int32)
    write_rows(table, contexts, tokens, tokens.astype(np.float32), 1)
    for context, row in zip(contexts, tokens.tolist(), strict=True):
        entry = find(table.entries, key_of(context, 1))
        assert table.tokens[entry].tolist() == [*row, *[row[-1]] * 5]
        assert table.log_odds[entry].tolist() == [*row, *[row[-1]] * 5]


def test_oldest_context_gives_way() -> None:
    table = Table.of(WAYS, 1)  # all contexts share one set of entries
    for token in range(WAYS + 1):
        context = np.array([[token, -1, -1]], np.int32)
        write_rows(table, context, context[:, :1], np.zeros((1, 1), np.float32), token + 1)
    kept = [
        find(table.entries, key_of(np.array([token, -1, -1], np.int32), 1)) != NOT_FOUND
        for token in range(WAYS + 1)
    ]
    assert kept == [False, *[True] * WAYS]


def test_contexts_follow_the_tree() -> None:
    rng = np.random.default_rng(5)
    tree = random_tree(rng, 30)
    contexts, _ = rows_of(tree, np.array([7, 8, 9], np.int32), np.zeros((31, 2), np.float32))
    for node in range(len(tree)):
        path = tree.token_ids[tree.path_to(node)].tolist()
        assert contexts[node + 1].tolist() == [9, 8, 7, *path][::-1][:NUM_ORDERS]
    assert contexts[0].tolist() == [7, 8, 9]


@pytest.mark.parametrize("count", [1, 2, 8])
def test_log_odds_are_of_shares_with_a_tail_and_bounded(count: int) -> None:
    rng = np.random.default_rng(count)
    spread = np.array([[0.1], [3.0], [40.0]]) * rng.standard_normal((3, count))
    logits = -np.sort(-spread.astype(np.float32), axis=1)
    _, found = rows_of(DraftTree.empty(), np.zeros(NUM_ORDERS, np.int32), logits)
    weights = np.exp(logits.astype(np.float64) - logits[:, :1])
    shares = weights / (weights.sum(axis=1, keepdims=True) + TAIL * weights[:, -1:])
    shares = np.clip(shares, LEAST_SHARE, 1 - LEAST_SHARE)
    np.testing.assert_allclose(found, np.log(shares / (1 - shares)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("vocabulary", [8, 64, 100, 1000])
def test_likeliest_tokens_are_those_of_a_sort(dtype: torch.dtype, vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = (torch.randn(6, vocabulary, generator=generator) * 5).to(dtype)
    logits[0, :] = -torch.inf
    logits[1, 3:] = -3.0  # ties, below zero
    logits[2, 5] = torch.inf
    tokens, values = likeliest(logits, 8)
    np.testing.assert_array_equal(values, logits.sort(descending=True).values[:, :8].float())
    assert all(len(set(row)) == 8 for row in tokens.tolist())
    found = logits.gather(1, torch.from_numpy(tokens).long())
    np.testing.assert_array_equal(values, found.float())
