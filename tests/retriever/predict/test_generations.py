"""generations in memory: bounded, oldest out first, and small while they are few."""

from itertools import pairwise

import numpy as np
import pytest

from retriever.drafter import TokenIds
from retriever.kernels.chains import SEPARATOR
from retriever.kernels.layout import MAX_MATCH, Scratch
from retriever.predict.generations import Generations, Output
from retriever.predict.stores import GENERATIONS_LIMITS, ChainStore
from retriever.tree import Source
from tests.retriever.kernels.stages import collect_store
from tests.retriever.kernels.twins import row_twins as twins

DEPTH = 12


def rows_of(generations: Generations, query: TokenIds) -> list[twins.Row]:
    scratch = Scratch(DEPTH)
    generations.leave_out_expired()
    store, source = generations.arrays[0], int(Source.GENERATIONS)
    num_rows = collect_store(store, source, query[-MAX_MATCH:], DEPTH, scratch)
    return [
        twins.Row(
            tuple(scratch.continuations[i, : scratch.rows[i]["length"]].tolist()),
            int(scratch.rows[i]["match"]),
        )
        for i in range(num_rows)
    ]


def random_outputs(rng: np.random.Generator, num_outputs: int, longest: int) -> list[TokenIds]:
    lengths = rng.integers(1, longest, num_outputs)
    return [rng.integers(0, 3, int(length)).astype(np.int32) for length in lengths]


@pytest.mark.parametrize("capacity", [1024, 4096])
def test_what_is_read_is_what_brute_force_reads_of_the_last_outputs(capacity: int) -> None:
    """While the ring grows, and after it has begun to overwrite."""
    rng = np.random.default_rng(31)
    generations, tokens, found = Generations(capacity), list[int](), 0
    for output in random_outputs(rng, 60, 200):
        generations.add(output)
        tokens += [*output.tolist(), SEPARATOR]
        size = min(capacity, max(1024, 1 << (len(tokens) - 1).bit_length()))
        query = rng.integers(0, 3, 12).astype(np.int32)
        expected = twins.chain_rows(
            tokens,
            query.tolist(),
            oldest=max(0, len(tokens) - capacity),
            num_buckets=size // 2,
            orders=GENERATIONS_LIMITS.orders,
            max_rows=GENERATIONS_LIMITS.max_rows,
            wrap=False,
            depth=DEPTH,
        )
        assert rows_of(generations, query) == expected
        assert generations.num_tokens == min(len(tokens), capacity)
        found += len(expected)
    assert len(tokens) > capacity
    assert found > 500


def test_adding_at_once_equals_adding_one_by_one() -> None:
    rng = np.random.default_rng(32)
    for num_outputs in (3, 30, 300):
        outputs = random_outputs(rng, num_outputs, 60)
        one_by_one, at_once = Generations(4096), Generations(4096)
        for output in outputs:
            one_by_one.add(output)
        at_once.extend([Output(output, 0.0) for output in outputs])
        assert one_by_one.num_bytes == at_once.num_bytes
        for _ in range(50):
            query = rng.integers(0, 3, 12).astype(np.int32)
            assert rows_of(one_by_one, query) == rows_of(at_once, query)


def test_memory_is_bounded_by_the_capacity_and_small_for_a_small_tenant() -> None:
    """`serve --generations-tokens` states the bytes of a token; some 30 more are for a ring."""
    generations = Generations(1 << 16)
    assert generations.num_bytes < 25 * 1024
    generations.add(np.arange(3000, dtype=np.int32))
    assert generations.num_bytes < 25 * 4096
    for _ in range(100):
        generations.add(np.arange(3000, dtype=np.int32))
    assert generations.num_bytes >> 16 == 24


def test_an_output_longer_than_the_ring_leaves_its_end() -> None:
    generations = Generations(1024)
    generations.add(np.arange(5000, dtype=np.int32))
    assert rows_of(generations, np.arange(1000, 1004, dtype=np.int32)) == []
    assert rows_of(generations, np.arange(4990, 4994, dtype=np.int32))[0].continuation[0] == 4994


def test_what_is_too_old_is_not_read() -> None:
    now = 1000.0
    generations = Generations(4096, max_age_s=60, clock=lambda: now)
    generations.add(np.array([1, 2, 1, 2, 3], np.int32))
    now += 50
    generations.add(np.array([1, 2, 1, 2, 4], np.int32))
    query = np.array([1, 2, 1, 2], np.int32)
    assert [row.continuation for row in rows_of(generations, query)] == [(4,), (3,)]
    now += 20
    assert [row.continuation for row in rows_of(generations, query)] == [(4,)]
    assert generations.num_tokens == 6
    now += 60
    assert rows_of(generations, query) == []
    generations.add(np.array([1, 2, 1, 2, 5], np.int32))
    assert [row.continuation for row in rows_of(generations, query)] == [(5,)]


def test_a_ring_grows_with_what_is_young_enough_and_not_with_what_was() -> None:
    now = 0.0
    generations = Generations(1 << 16, max_age_s=10, clock=lambda: now)
    for now in range(1000):  # noqa: B007  the clock
        generations.add(np.arange(40, dtype=np.int32))
    assert generations.num_bytes // 1024 == 26
    assert rows_of(generations, np.arange(8, dtype=np.int32))


def test_cleared_generations_are_empty_and_usable() -> None:
    generations = Generations(1024)
    generations.add(np.array([1, 2, 1, 2, 3], np.int32))
    generations.clear()
    query = np.array([1, 2, 1, 2], np.int32)
    assert rows_of(generations, query) == []
    generations.add(np.array([1, 2, 1, 2, 4], np.int32))
    assert [row.continuation for row in rows_of(generations, query)] == [(4,)]


@pytest.mark.parametrize("capacity", [1 << 14, 1 << 16])
def test_what_is_loaded_at_once_is_read_as_what_was_added_one_by_one(capacity: int) -> None:
    """So a restarted service drafts as before. Ten thousand tokens, some of them many times."""
    rng = np.random.default_rng(5)
    phrases = [rng.integers(0, 500, int(n)).astype(np.int32) for n in rng.integers(1, 40, 50)]
    outputs = [
        Output(np.concatenate([phrases[i] for i in rng.integers(0, 50, 4)]), float(at), bytes(16))
        for at in range(120)
    ]
    one_by_one, at_once = Generations(capacity), Generations(capacity)
    for output in outputs:
        one_by_one.extend([output])
    at_once.extend(outputs)
    assert at_once.num_tokens > 1 << 13
    assert at_once.num_tokens == one_by_one.num_tokens
    assert at_once.num_bytes == one_by_one.num_bytes
    assert np.array_equal(at_once.live, one_by_one.live)
    held = at_once.outputs()
    for one, other in zip(held, one_by_one.outputs(), strict=True):
        assert np.array_equal(one.tokens, other.tokens)
        assert one._replace(tokens=outputs[0].tokens) == other._replace(tokens=outputs[0].tokens)
    tokens = np.concatenate([each.tokens for each in held])
    num_rows = 0
    for end in range(9, len(tokens), 7):
        rows = rows_of(at_once, tokens[end - 9 : end])
        assert rows == rows_of(one_by_one, tokens[end - 9 : end])
        num_rows += len(rows)
    assert num_rows > 1000


@pytest.mark.parametrize("size", [1024, 8192])
def test_tokens_appended_in_any_pieces_are_linked_as_the_twin_links_them(size: int) -> None:
    """Pieces of one token, of more than a block, and of more than the ring holds."""
    rng = np.random.default_rng(9)
    tokens = rng.integers(-1, 3, 30_000).astype(np.int32)
    cuts = np.sort(rng.integers(0, len(tokens), 30)).tolist()
    store = ChainStore(size, GENERATIONS_LIMITS, Source.GENERATIONS)
    for begin, end in pairwise([0, 1, 2, *cuts, len(tokens)]):
        store.append(tokens[begin:end])
    heads, links = twins.linked(tokens.tolist(), size, GENERATIONS_LIMITS.orders)
    assert store.chains.heads.tolist() == heads
    assert store.chains.links.tolist() == links
