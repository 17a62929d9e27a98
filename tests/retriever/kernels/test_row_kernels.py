"""Rows of evidence are collected and weighed as their slow twins do it, in thousands of cases."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from retriever.drafter import TokenIds
from retriever.kernels.chains import SEPARATOR, append_tokens, collect_chains
from retriever.kernels.layout import (
    MAX_MATCH,
    SEGMENT_LIMITS,
    Chains,
    Found,
    Orders,
    Scratch,
    SegmentArrays,
)
from retriever.kernels.similarity import mark_recent
from retriever.kernels.suffixes import collect_suffixes, find_interval
from retriever.kernels.tree_growth import weigh_rows
from tests.retriever.kernels.twins import row_twins as twins
from tests.suite_parts import cases

NUM_SEEDS = cases(100, of=3000)
CAPACITY = 64
NUM_BUCKETS = 32


def rows_in(scratch: Scratch, first: int, num_rows: int) -> list[twins.Row]:
    return [
        twins.Row(
            tuple(scratch.continuations[i, : scratch.rows[i]["length"]].tolist()),
            int(scratch.rows[i]["match"]),
            float(scratch.rows[i]["count"]),
            int(scratch.rows[i]["source"]),
            similarity=float(scratch.rows[i]["similarity"]),
        )
        for i in range(first, num_rows)
    ]


def store(
    num_orders: int, start: int = 0, *, capacity: int = CAPACITY, num_last: int = 1
) -> Chains:
    return Chains(
        np.zeros(capacity, np.int32),
        np.full((num_orders, NUM_BUCKETS), -1, np.int32),
        np.zeros((num_orders, capacity), np.int32),
        np.full(3, start),
        np.full(num_last, -1, np.int32),
    )


def segment_of(
    tokens: NDArray[Any],
    suffixes: NDArray[Any],
    starts: NDArray[Any],
    *,
    shortest: int = 1,
    samples: int = 8,
    enough: int = 4,
    stride: int = 0,
    **_: int,
) -> SegmentArrays:
    """Arrays of a segment whose rows are marked with 4; without keys if `stride` is 0."""
    size, separator, keys = len(starts) - 1, int(np.iinfo(tokens.dtype).max), list[int]()
    if stride:
        keys = twins.suffix_keys(tokens.tolist(), separator, suffixes.tolist(), size, stride)
    limits = np.array(
        [(4, shortest, samples, enough, stride or 1, size.bit_length())], SEGMENT_LIMITS
    )
    return SegmentArrays(tokens, suffixes, starts, np.array(keys, np.uint64), limits)


def with_few(scratch: Scratch, few: int) -> Found:
    """What a search writes to, where so many occurrences are few."""
    return scratch.found._replace(matches=np.zeros(few, np.int32))


def mark(rng: np.random.Generator, scratch: Scratch, query: TokenIds) -> dict[int, float]:
    """Note the query as the recent context, with rarities whose sums are exact."""
    rarity = (rng.integers(0, 65, int(rng.integers(1, 5))) / 64).astype(np.float32)
    mark_recent(query, rarity, scratch.found.recent, scratch.found.marked)
    return twins.recent_tokens(query.tolist(), rarity.tolist())


@pytest.mark.seeds
def test_chains_find_what_brute_force_finds() -> None:
    rng = np.random.default_rng(1)
    found = 0
    scratch = Scratch(16, max_rows=64, max_nodes=64)
    for _ in range(NUM_SEEDS):
        wrap = bool(rng.integers(2))
        alphabet = int(rng.integers(2, 6))
        low = 0 if wrap else SEPARATOR  # a context has no separators
        num_tokens = int(rng.integers(1, CAPACITY if wrap else 200))
        tokens = rng.integers(low, alphabet, num_tokens).astype(np.int32)
        query = tokens[-MAX_MATCH:] if wrap else rng.integers(0, alphabet, 9).astype(np.int32)
        orders = np.array([[8, 4, 2, 1], [4, 2], [3, 1]][int(rng.integers(3))], np.int64)
        max_rows = rng.integers(1, 6, len(orders))
        depth = int(rng.integers(1, 12))
        start = int(rng.choice([0, (1 << 31) - 70, 3 << 31]))  # heads keep 31 bits of a position
        forgotten = 0 if wrap else int(rng.integers(num_tokens + 1))
        chains = store(len(orders), start)
        chains.state[2] += forgotten
        for part in np.array_split(tokens, 3):
            append_tokens(chains, orders, part)
        recent = mark(rng, scratch, query)
        first = int(rng.integers(0, 3))  # rows of another database come first
        num_rows = collect_chains(
            chains, Orders(orders, max_rows), query, 2, wrap, depth, scratch.found, first
        )
        expected = twins.chain_rows(
            tokens.tolist(),
            query.tolist(),
            oldest=max(forgotten, num_tokens - CAPACITY),
            num_buckets=NUM_BUCKETS,
            orders=orders.tolist(),
            max_rows=max_rows.tolist(),
            wrap=wrap,
            depth=depth,
            recent=recent,
        )
        assert rows_in(scratch, first, num_rows) == [replace(row, source=2) for row in expected]
        found += len(expected)
    assert found > NUM_SEEDS


LARGE_VOCABULARY: dict[type[np.unsignedinteger], int] = {np.uint16: 40_000, np.uint32: 70_000}


def recalled(
    rng: np.random.Generator, tokens: NDArray[Any], separator: int, query: TokenIds
) -> TokenIds:
    """A query that ends like some place in a document does."""
    begin = int(rng.integers(len(tokens)))
    recalled = tokens[begin : begin + int(rng.integers(1, 10))]
    recalled = recalled[recalled != separator]
    return np.append(query, recalled.astype(np.int32))


@pytest.mark.seeds
@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_suffixes_find_what_brute_force_finds(dtype: type[np.unsignedinteger]) -> None:
    rng = np.random.default_rng(2)
    separator = int(np.iinfo(dtype).max)
    found = 0
    for _ in range(NUM_SEEDS):
        alphabet = int(rng.integers(1, 5))
        tokens = rng.integers(0, alphabet + 1, int(rng.choice([20, 60, 200])))
        tokens = np.append(np.where(tokens == alphabet, separator, tokens), separator).astype(dtype)
        suffixes = np.array(twins.sort_suffixes(tokens.tolist(), separator), np.uint32)
        firsts = tokens[suffixes]
        # Of a large vocabulary a key tells three or four tokens, of a small one all.
        size = int(rng.choice([alphabet, alphabet, LARGE_VOCABULARY[dtype]]))
        starts = np.searchsorted(firsts, np.arange(size + 1)).astype(np.uint32)
        query = rng.integers(0, alphabet, int(rng.integers(1, 10))).astype(np.int32)
        if rng.random() < 0.5:  # the longest match is long
            query = recalled(rng, tokens, separator, query)
        limits = {
            "longest": int(rng.integers(1, 11)),
            "shortest": int(rng.integers(1, 4)),
            "samples": int(rng.integers(1, 9)),
            "enough": int(rng.integers(1, 9)),
            "depth": int(rng.integers(1, 7)),
        }
        first, max_rows = int(rng.integers(0, 3)), int(rng.choice([4, 256]))  # 4 rows fill up
        scratch = Scratch(8, max_rows=max_rows, max_nodes=8)
        # Not marked as read only, as kernels never see what they read: they keep to it.
        read = [array.tobytes() for array in (tokens, suffixes, starts)]
        recent = mark(rng, scratch, query)
        found_before = 3 if rng.random() < 0.1 else 0
        num_rows, longest, shortest = collect_suffixes(
            segment_of(tokens, suffixes, starts, stride=int(rng.choice([0, 1, 2, 5])), **limits),
            query, found_before, limits["longest"], limits["depth"],
            with_few(scratch, int(rng.choice([8, 12, 128]))), first,
        )  # fmt: skip
        assert [array.tobytes() for array in (tokens, suffixes, starts)] == read
        limits["shortest"] = max(limits["shortest"], found_before)
        expected = twins.suffix_rows(
            tokens.tolist(), separator, query.tolist(), recent=recent, **limits
        )
        rows = [replace(row, source=4) for row in expected[0]]
        room = max_rows - first
        assert rows_in(scratch, first, num_rows) == rows[:room]
        if len(rows) < room:
            assert (longest, shortest) == expected[1:]
        found += len(rows)
    assert found > NUM_SEEDS


@pytest.mark.seeds
def test_interval_holds_every_occurrence_and_nothing_else() -> None:
    rng = np.random.default_rng(3)
    tokens = np.append(rng.integers(0, 3, 500), 65535).astype(np.uint16)
    suffixes = np.array(twins.sort_suffixes(tokens.tolist(), 65535), np.uint32)
    sizes = (3, 3, LARGE_VOCABULARY[np.uint16])
    segments = [
        segment_of(
            tokens,
            suffixes,
            np.searchsorted(tokens[suffixes], np.arange(size + 1)).astype(np.uint32),
            stride=stride,
        )
        for size, stride in zip(sizes, (0, 4, 7), strict=True)
    ]
    for _ in range(NUM_SEEDS):
        pattern = rng.integers(0, 3, int(rng.integers(1, 9))).astype(np.int32)
        wanted, most = pattern.tolist(), int(rng.choice([1, 5, 64, 1 << 32]))
        true = {p for p in range(500) if tokens[p : p + len(wanted)].tolist() == wanted}
        for segment in segments:
            begin, end = find_interval(segment, pattern, most)
            inside = {int(position) for position in suffixes[begin:end]}
            assert len(inside) == min(most, len(true))
            assert inside <= true
            assert begin == 0 or int(suffixes[begin - 1]) not in true


def random_rows(rng: np.random.Generator) -> list[twins.Row]:
    return [
        twins.Row(
            tuple(rng.integers(0, 4, int(rng.integers(1, 8))).tolist()),
            int(rng.integers(1, MAX_MATCH + 1)),
            float(rng.integers(1, 5)),
            int(rng.integers(0, 5)),
            # A multiple of a power of two adds up to the same sum in every order.
            float(rng.integers(1, 64)) / 1024,
        )
        for _ in range(int(rng.integers(0, 30)))
    ]


@pytest.mark.seeds
def test_weights_are_interpolated_from_the_longest_match_down() -> None:
    rng = np.random.default_rng(4)
    scratch = Scratch(8, max_rows=32, max_nodes=32)
    for _ in range(NUM_SEEDS):
        rows = random_rows(rng)
        trust = rng.uniform(0.1, 4, 5)
        twins.fill(scratch, rows)
        weigh_rows(scratch.rows, len(rows), trust, 7.0, scratch.found.counts)
        expected = twins.weights(rows, trust.tolist(), 7.0)
        np.testing.assert_allclose(scratch.rows["weight"][: len(rows)], expected, rtol=1e-9)
        assert sum(expected) <= 1 + 1e-9


@pytest.mark.seeds
def test_damaged_suffixes_are_read_without_harm() -> None:
    """Positions outside a segment find nothing, or something; nothing is read out there."""
    rng = np.random.default_rng(6)
    tokens = np.append(rng.integers(0, 3, 200), 65535).astype(np.uint16)
    for _ in range(NUM_SEEDS):
        suffixes = rng.integers(0, 1 << 32, 200).astype(np.uint32)
        starts = np.sort(rng.integers(0, 1 << int(rng.integers(4, 31)), 4)).astype(np.uint32)
        query = rng.integers(0, 3, 6).astype(np.int32)
        scratch = Scratch(8, max_rows=16, max_nodes=8)
        keys = rng.integers(0, 1 << 63, int(rng.integers(0, 60)), np.uint64)
        segment = segment_of(tokens, suffixes, starts)._replace(keys=np.sort(keys))
        segment.limits["key_stride"] = 4
        found = with_few(scratch, int(rng.choice([8, 128])))
        num_rows, _, _ = collect_suffixes(segment, query, 0, 6, 8, found, 0)
        assert 0 <= num_rows <= 16


def test_damaged_tokens_are_not_copied() -> None:
    tokens = np.array([1, 2, 0, 60000, 1, 65535], np.uint16)
    suffixes = np.array([2, 0, 4, 1], np.uint32)
    starts = np.array([0, 1, 3, 4], np.uint32)
    scratch = Scratch(8, max_rows=16, max_nodes=8)
    num_rows, _, _ = collect_suffixes(
        segment_of(tokens, suffixes, starts), np.array([1], np.int32), 0, 1, 8, scratch.found, 0
    )
    assert [row.continuation for row in rows_in(scratch, 0, num_rows)] == [(2, 0)]


@pytest.mark.seeds
def test_the_last_position_of_every_token_is_known() -> None:
    """Of tokens whose ids are equal modulo the size of the table, the newest one's."""
    rng = np.random.default_rng(7)
    orders = np.array([2], np.int64)
    for _ in range(NUM_SEEDS // 10):
        tokens = rng.integers(0, 30, int(rng.integers(1, CAPACITY))).astype(np.int32)
        chains = store(1, num_last=16)
        for part in np.array_split(tokens, 3):
            append_tokens(chains, orders, part)
        expected = [-1] * 16
        for position, token in enumerate(tokens.tolist()):
            expected[token % 16] = position
        assert chains.last.tolist() == expected


@pytest.mark.seeds
def test_only_the_last_tokens_are_marked() -> None:
    rng = np.random.default_rng(8)
    scratch = Scratch(8)
    rarity = rng.uniform(0, 1, 1 << 16).astype(np.float32)
    for _ in range(NUM_SEEDS // 100):
        query = rng.integers(0, 1 << 18, int(rng.integers(1, MAX_MATCH + 1))).astype(np.int32)
        mark_recent(query, rarity, scratch.found.recent, scratch.found.marked)
        expected = twins.recent_tokens(query.tolist(), rarity.tolist())
        marked = np.flatnonzero(scratch.found.recent)
        assert (
            dict(zip(marked.tolist(), scratch.found.recent[marked].tolist(), strict=True))
            == expected
        )
