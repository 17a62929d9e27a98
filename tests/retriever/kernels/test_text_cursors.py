"""Cursors in predicted texts are kept as their twins keep them."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from retriever.kernels.chains import SEPARATOR
from retriever.kernels.cursors import collect_text_cursors, move_text_cursors, set_text_cursors
from retriever.kernels.layout import MAX_MATCH, Scratch, TextCursors
from retriever.tree import Source
from tests.retriever.kernels.edited_files import rows_in
from tests.retriever.kernels.twins.cursor_twin import LONG, LOST, TextCursorTwin
from tests.suite_parts import cases

NUM_SEEDS = cases(300, of=3000)
MAX_ROWS = 12
MAX_DEPTH = 12


def store_of(rng: np.random.Generator) -> tuple[list[int], list[int]]:
    """Texts with separators behind them, and where each begins."""
    tokens: list[int] = []
    starts = [0]
    for _ in range(int(rng.integers(1, 4))):
        size = int(rng.choice([1, 2, 30, 120]))
        tokens += [*rng.integers(0, int(rng.choice([1, 3, 20])), size).tolist(), SEPARATOR]
        starts.append(len(tokens))
    return tokens, starts


def twins_in(rng: np.random.Generator, starts: Sequence[int]) -> list[TextCursorTwin]:
    """A cursor for each text: at its beginning, somewhere, at its end, or lost."""
    twins = []
    for begin, end in pairwise(starts):
        place = [begin, int(rng.integers(begin, end)), end - 1, None][int(rng.integers(4))]
        misses = int(rng.choice([0, 0, 1, 3, LOST]))
        twins.append(TextCursorTwin(begin, end, place, misses, int(rng.integers(LONG, 40))))
    return twins


def arrays_of(twins: Sequence[TextCursorTwin], starts: Sequence[int]) -> TextCursors:
    cursors = [[-1 if t.place is None else t.place, t.misses, t.agreed] for t in twins]
    return TextCursors(np.array(cursors, np.int64), np.array(starts, np.int64))


def kept_in(cursors: NDArray[np.int64], twins: Sequence[TextCursorTwin]) -> list[TextCursorTwin]:
    """What the kernels have made of cursors."""
    kept = []
    for (place, misses, agreed), twin in zip(cursors.tolist(), twins, strict=True):
        where = None if place < 0 else place
        kept.append(TextCursorTwin(twin.begin, twin.end, where, misses, agreed))
    return kept


def ring_of(rng: np.random.Generator, tokens: Sequence[int]) -> NDArray[np.int32]:
    """The store's array; what lies behind its end looks like more of it."""
    ring = rng.integers(0, 3, 1 << len(tokens).bit_length()).astype(np.int32)
    ring[: len(tokens)] = tokens
    return ring


@pytest.mark.seeds
def test_text_cursors_move_as_their_twins_do() -> None:
    rng = np.random.default_rng(81)
    moved = lost = ended = 0
    for _ in range(NUM_SEEDS):
        tokens, starts = store_of(rng)
        twins = twins_in(rng, starts)
        texts = arrays_of(twins, starts)
        new = rng.integers(0, 3, int(rng.choice([0, 1, 5, LOST + 2]))).tolist()
        begun = next((t.place for t in twins if t.place is not None), None)
        if begun is not None:
            copied = [token for token in tokens[begun : begun + 9] if token != SEPARATOR]
            new = [*copied, *new][: max(len(new), 1)]
        move_text_cursors(texts, ring_of(rng, tokens), np.array(new, np.int32))
        expected = [twin.moved(tokens, new) for twin in twins]
        assert kept_in(texts.cursors, twins) == expected
        pairs = list(zip(twins, expected, strict=True))
        lost += any(after.place is None and before.place is not None for before, after in pairs)
        moved += any(after.place not in (None, before.place) for before, after in pairs)
        ended += any(after.place == after.end - 1 and after.misses for after in expected)
    assert min(moved, lost, ended) > NUM_SEEDS / 20


@pytest.mark.seeds
def test_text_cursors_are_set_as_their_twins_are() -> None:
    """By rows of their own text alone, and not while they agree for longer."""
    rng = np.random.default_rng(82)
    scratch = Scratch(8, max_rows=MAX_ROWS, max_nodes=8)
    jumped = stayed = 0
    for _ in range(NUM_SEEDS):
        _, starts = store_of(rng)
        twins = twins_in(rng, starts)
        texts = arrays_of(twins, starts)
        first, end = sorted(rng.integers(0, MAX_ROWS + 1, 2).tolist())
        longest = int(rng.choice([LONG - 1, LONG, 20, MAX_MATCH]))
        scratch.rows["position"] = rng.integers(0, starts[-1], MAX_ROWS)
        scratch.rows["match"] = rng.integers(longest // 2, longest + 1, MAX_ROWS)
        set_text_cursors(texts, scratch.rows, first, end)
        found = [(int(row["position"]), int(row["match"])) for row in scratch.rows[first:end]]
        expected = [twin.set(found) for twin in twins]
        assert kept_in(texts.cursors, twins) == expected
        jumped += expected != twins
        stayed += expected == twins and any(match >= LONG for _, match in found)
    assert min(jumped, stayed) > NUM_SEEDS / 20


@pytest.mark.seeds
def test_what_predictions_expect_is_collected_as_the_twin_does() -> None:
    """Rows that matches have found stand for cursors at their places; others are added."""
    rng = np.random.default_rng(83)
    scratch = Scratch(MAX_DEPTH, max_rows=MAX_ROWS, max_nodes=8)
    full = marked = blind = 0
    for _ in range(NUM_SEEDS):
        tokens, starts = store_of(rng)
        twins = twins_in(rng, starts)
        texts = arrays_of(twins, starts)
        query = rng.integers(0, 3, int(rng.choice([1, 2, 5]))).astype(np.int32)
        depth, first = int(rng.integers(MAX_DEPTH + 1)), int(rng.choice([0, 1, MAX_ROWS - 3]))
        end = first + int(rng.integers(4))
        places = rng.permutation(max(starts[-1], 8))[: end - first]
        if len(places) and rng.random() < 0.5 and twins[0].place is not None:
            places[0] = twins[0].place
            places[1:][places[1:] == places[0]] = starts[-1]
        scratch.rows["position"][first:end] = places
        scratch.rows["match"][first:end] = rng.integers(1, 12, end - first)
        scratch.rows["count"][first:end] = 1.0
        before = scratch.rows.copy()
        num_rows = collect_text_cursors(
            texts, ring_of(rng, tokens), int(Source.PREDICTIONS), query, depth,
            scratch.found, first, end,
        )  # fmt: skip
        added = []
        for twin in twins:
            at = twin.expected()
            standing = [] if at is None else np.flatnonzero(places == at[0]).tolist()
            if standing and at is not None:
                row = before[first + standing[0]]
                row["match"] = max(int(row["match"]), at[1])
                marked += 1
            else:
                added += twin.rows(tokens, query.tolist(), depth)
        assert np.array_equal(scratch.rows[:end], before[:end])
        assert rows_in(scratch, end, num_rows) == added[: MAX_ROWS - end]
        assert kept_in(texts.cursors, twins) == twins
        full += len(added) > MAX_ROWS - end
        blind += any(row.count < 1 for _, row in added)
    assert min(full, marked, blind) > NUM_SEEDS / 50
