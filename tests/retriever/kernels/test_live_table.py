"""The live table counts as its twin does, never too much, and forgets what is taken back."""

import numpy as np
import pytest

from retriever.drafter import TokenIds
from retriever.kernels.chains import SEPARATOR
from retriever.kernels.live_table import WAYS, count_tokens
from retriever.predict.generations import Generations, Output, live_table
from tests.retriever.kernels.twins.live_table_twin import (
    MAX_COUNT,
    LiveTwin,
    counts_in,
    place_of,
    successors,
    true_counts,
)
from tests.suite_parts import cases, draws_all_cases

NUM_SEEDS = cases(100, of=1000)
CAPACITY = 64
MARGIN = 4


def random_tokens(rng: np.random.Generator, size: int) -> TokenIds:
    """Tokens of a small or a large vocabulary, a separator now and then."""
    alphabet = int(rng.choice([2, 5, 40, (1 << 31) - 1]))
    tokens = rng.integers(0, alphabet, size)
    return np.where(rng.random(size) < 0.1, SEPARATOR, tokens).astype(np.int32)


@pytest.mark.seeds
def test_counting_and_taking_back_equal_the_twins() -> None:
    """A ring is written several times over; what will be overwritten is taken back before."""
    rng = np.random.default_rng(61)
    full = 0
    for _ in range(NUM_SEEDS):
        num_sets = int(rng.choice([1, 2, 16]))
        table, twin = np.zeros((num_sets, WAYS), np.int64), LiveTwin(num_sets)
        ring = np.zeros(CAPACITY, np.int32)
        history: list[int] = []
        counted_from = 0
        for part in np.array_split(random_tokens(rng, int(rng.integers(1, 200))), 8):
            kept_from = max(counted_from, len(history) + len(part) - CAPACITY + MARGIN)
            count_tokens(table, ring, counted_from, kept_from, -1)
            twin.count_tokens(history, counted_from, kept_from, -1)
            counted_from, begin = kept_from, len(history)
            history += part.tolist()
            ring[np.arange(begin, len(history)) % CAPACITY] = part
            count_tokens(table, ring, begin, len(history), 1)
            twin.count_tokens(history, begin, len(history), 1)
            assert np.array_equal(table, twin.as_table())
            truth = true_counts(history, counted_from, len(history), num_sets)
            assert all(count <= truth[key] for key, count in counts_in(table).items())
        full += bool((table != 0).all())
        count_tokens(table, ring, counted_from, len(history), -1)
        assert not table.any()
    assert full > NUM_SEEDS / 10


@pytest.mark.seeds
def test_counts_are_exact_while_no_set_is_full() -> None:
    rng = np.random.default_rng(62)
    for _ in range(NUM_SEEDS // 10):
        tokens = rng.integers(-1, 3, 500).astype(np.int32)
        table, ring = live_table(1 << 13), np.append(tokens, np.zeros(12, np.int32))
        count_tokens(table, ring, 0, len(tokens), 1)
        truth = true_counts(tokens.tolist(), 0, len(tokens), len(table))
        assert counts_in(table) == dict(truth)


def test_counts_end_at_what_an_entry_holds() -> None:
    table = np.zeros((1, WAYS), np.int64)
    tokens = np.full(1 << 16, 7, np.int32)
    count_tokens(table, tokens, 0, len(tokens), 1)
    assert set(counts_in(table).values()) == {MAX_COUNT}
    count_tokens(table, tokens, 0, MAX_COUNT + 2, -1)
    assert set(counts_in(table).values()) == {1}


def live_counts(generations: Generations) -> dict[tuple[tuple[int, int], int], int]:
    return counts_in(generations.live)


def follows(generations: Generations, tokens: TokenIds) -> int:
    """How many of the successors inside some tokens are in the live table."""
    counts = live_counts(generations)
    every = successors(tokens.tolist(), 0, len(tokens))
    return sum(
        (place_of(context, len(generations.live)), token) in counts for context, token in every
    )


@pytest.mark.seeds
@pytest.mark.parametrize("max_age_s", [float("inf"), 40.0])
@pytest.mark.parametrize("longest", [20, 300, 2500])
def test_what_generations_count_is_what_they_hold(max_age_s: float, longest: int) -> None:
    """While rings grow, are overwritten and expire; but for the few that are next to go."""
    rng = np.random.default_rng(63)
    now = 0.0
    generations = Generations(1024, max_age_s, clock=lambda: now)
    for number in range(cases(80, of=150)):
        now += float(rng.choice([0, 1, 30], p=[0.5, 0.45, 0.05]))
        sizes = rng.integers(1, longest, int(rng.integers(1, 4)))
        outputs = [rng.integers(1, 4, int(size)).astype(np.int32) for size in sizes]
        generations.extend([Output(output, now) for output in outputs])
        if number % 4 and not draws_all_cases():
            continue  # what is counted wrongly stays so for a while
        held = [SEPARATOR]
        for each in generations.outputs():
            held += [*each.tokens.tolist(), SEPARATOR]
        truth = true_counts(held, 1, len(held), len(generations.live))
        counts = live_counts(generations)
        assert all(count <= truth[key] for key, count in counts.items())
        assert sum(counts.values()) >= sum(truth.values()) - 2 * 12


@pytest.mark.parametrize("num_later", [0, 1, 100, 5000])
def test_expired_outputs_leave_nothing_in_the_live_table(num_later: int) -> None:
    """However the ring grew since: a marker's successors are there until its time is over."""
    now = 0.0
    generations = Generations(1 << 13, 60, clock=lambda: now)
    rng = np.random.default_rng(64)
    early = [rng.integers(100, 1000, 30).astype(np.int32) for _ in range(5)]
    marker = np.arange(5000, 5030, dtype=np.int32)
    for output in (*early, marker, marker):
        generations.add(output)
        now += 1
    now = 30
    assert follows(generations, marker) > 50  # of 55: a set may be full
    if num_later:
        generations.add(rng.integers(0, 3, num_later).astype(np.int32))
    now = 65.5  # the marker's first occurrence ended at 5
    assert generations.num_tokens == (num_later + 1 if num_later else 0) + len(marker) + 1
    assert follows(generations, marker) > 50
    now = 66.5
    generations.add(np.array([1, 2, 3], np.int32))
    assert follows(generations, marker) == 0
    assert all(follows(generations, output) == 0 for output in early)


def test_the_first_tokens_of_a_grown_ring_have_no_context() -> None:
    """What stood before them has expired and was left behind."""
    now = 0.0
    generations = Generations(1 << 13, 60, clock=lambda: now)
    generations.add(np.array([1, 2, 3], np.int32))
    now = 50
    generations.add(np.array([4, 5, 6], np.int32))
    now = 70
    generations.add(np.zeros(1, np.int32))
    generations.add(np.tile(np.array([7, 8], np.int32), 1000))  # the ring grows
    for context, token in (((0, 0), 4), ((0, 4), 5), ((0, 0, 4), 5)):
        place = place_of(context, len(generations.live))
        assert (place, token) not in live_counts(generations)
    assert (place_of((4, 5), len(generations.live)), 6) in live_counts(generations)
