"""A cursor is kept as its twin keeps it, and lets copying go on after an edit."""

import numpy as np
import pytest
from numpy.typing import NDArray

from retriever.drafter import DraftRequest, TokenIds
from retriever.kernels.cursors import (
    collect_cursor,
    collect_trail,
    move_cursor,
    set_cursor,
    set_trail,
)
from retriever.kernels.layout import MAX_MATCH, Chains, Scratch
from retriever.predict.context import Context
from retriever.predict.stores import CONTEXT_LIMITS, ChainStore
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.tree import DraftTree, Source
from tests.retriever.kernels.edited_files import (
    AHEAD,
    EDITS,
    NEWLINE,
    NUM_FILES,
    edited,
    random_file,
    rows_in,
)
from tests.retriever.kernels.stages import collect_sequence
from tests.retriever.kernels.twins.cursor_twin import (
    LONG,
    LOST,
    MOST_EDITS,
    CursorTwin,
    Edit,
    TrailTwin,
    without_cursor,
)
from tests.suite_parts import cases

NUM_SEEDS = cases(300, of=3000)
NUM_TALKS = cases(6, of=300)
MAX_ROWS = 12
MAX_DEPTH = 12


def sequence_in(rng: np.random.Generator, tokens: TokenIds) -> Chains:
    """A store of the sequence; what lies behind its end looks like more of it."""
    capacity = 1 << (len(tokens) - 1).bit_length()
    ring = rng.integers(0, int(tokens.max()) + 1, capacity).astype(np.int32)
    ring[: len(tokens)] = tokens
    none = np.empty((0, 0), np.int32)
    return Chains(ring, none, none, np.array([len(tokens), 0, 0]), np.empty(0, np.int32))


def random_sequence(rng: np.random.Generator) -> TokenIds:
    """Up to 256 tokens, which sometimes fill a ring to its end."""
    size = int(rng.choice([1, 2, 30, 64, 128, 200, 256]))
    return rng.integers(0, int(rng.choice([1, 2, 4, 20])), size).astype(np.int32)


def array_of(twin: CursorTwin) -> NDArray[np.int64]:
    return np.array([-1 if twin.place is None else twin.place, twin.misses])


def twin_of(cursor: NDArray[np.int64]) -> CursorTwin:
    place, misses = cursor.tolist()
    return CursorTwin(None if place < 0 else place, misses)


@pytest.mark.seeds
def test_cursors_move_as_their_twins_do() -> None:
    """Over tokens that are copied, for a while, from where the cursor stands."""
    rng = np.random.default_rng(71)
    moved = lost = parted = 0
    for _ in range(NUM_SEEDS):
        tokens = random_sequence(rng)
        begin = int(rng.integers(len(tokens) + 1))
        place = int(rng.integers(begin)) if begin else None
        if place is not None:
            for offset in range(min(int(rng.integers(40)), len(tokens) - begin)):
                tokens[begin + offset] = tokens[place + offset]
        misses = int(rng.choice([0, 0, 1, 5, LOST]))
        twin = CursorTwin(place if rng.random() > 0.05 else None, misses)
        cursor = array_of(twin)
        move_cursor(cursor, sequence_in(rng, tokens), begin)
        expected = twin.moved(tokens.tolist(), begin)
        assert twin_of(cursor) == expected
        lost += twin.place is not None and expected.place is None
        moved += expected.place not in (None, twin.place)
        parted += expected.misses > twin.misses == 0
    assert min(moved, lost, parted) > NUM_SEEDS / 20


@pytest.mark.seeds
def test_cursors_are_set_as_their_twins_are() -> None:
    rng = np.random.default_rng(72)
    scratch = Scratch(8, max_rows=MAX_ROWS, max_nodes=8)
    jumped = kept = 0
    for _ in range(NUM_SEEDS):
        num_rows = int(rng.choice([0, 1, 2, 5, MAX_ROWS]))
        places = rng.permutation(20)[:MAX_ROWS] + 8
        longest = int(rng.choice([LONG - 1, LONG, LONG + 1, MAX_MATCH]))
        matches = rng.integers(longest // 2, longest + 1, MAX_ROWS)
        scratch.rows["position"], scratch.rows["match"] = places, matches
        place = int(rng.choice(places[: num_rows + 1])) if rng.random() > 0.1 else None
        twin = CursorTwin(place, int(rng.choice([0, 0, 1])))
        cursor = array_of(twin)
        set_cursor(cursor, scratch.rows, num_rows)
        found = list(zip(places.tolist(), matches.tolist(), strict=True))[:num_rows]
        expected = twin.set(found)
        assert twin_of(cursor) == expected
        jumped += expected != twin
        kept += expected == twin and max(matches[:num_rows], default=0) >= LONG
    assert min(jumped, kept) > NUM_SEEDS / 20


@pytest.mark.seeds
def test_what_may_follow_an_edit_is_collected_as_the_twin_does() -> None:
    """From a cursor at the first token to one at the last; into rows that fill up."""
    rng = np.random.default_rng(73)
    scratch = Scratch(MAX_DEPTH, max_rows=MAX_ROWS, max_nodes=8)
    full = blind = 0
    for _ in range(NUM_SEEDS):
        tokens = random_sequence(rng)
        query = tokens[len(tokens) - int(rng.choice([0, 1, 1, 2, MAX_MATCH])) :][-MAX_MATCH:]
        last = len(tokens) - 1
        place = [None, 0, last, int(rng.integers(len(tokens)))][int(rng.integers(4))]
        twin = CursorTwin(place, int(rng.choice([0, 1, 1, 2, 5, LOST])))
        cursor = array_of(twin)
        depth, first = int(rng.integers(MAX_DEPTH + 1)), int(rng.integers(MAX_ROWS + 1))
        before = scratch.rows[:first].copy()
        num_rows = collect_cursor(
            cursor, sequence_in(rng, tokens), query, depth,
            scratch.rows, scratch.continuations, first,
        )  # fmt: skip
        expected = twin.rows(tokens.tolist(), query.tolist(), depth, MAX_ROWS - first)
        assert rows_in(scratch, first, num_rows) == expected
        assert np.array_equal(scratch.rows[:first], before)
        assert twin_of(cursor) == twin
        full += num_rows == MAX_ROWS > first
        blind += any(row.count < 1 for _, row in expected)
    assert min(full, blind) > NUM_SEEDS / 20


def drafts_after(file: list[int], before: list[int], after: list[int]) -> list[DraftTree]:
    """What is drafted right after the edit, and after each of three tokens more."""
    drafter = EmbeddedDrafter()
    prompt = [1000, 1001, *file, 1002]
    drafter.open("s", np.array(prompt, np.int32))
    output, trees, known = before + after, [], 0
    for end in [40, *range(90, len(before) + 4)]:
        new = np.array(output[known:end], np.int32)
        trees += drafter.draft([DraftRequest("s", new, len(prompt) + end, 32)])
        known = end
    return trees[-4:]


def num_right(edit: str) -> NDArray[np.int64]:
    """int64[files, 4], tokens of the best chain that come next, after 0 to 3 tokens."""
    rng = np.random.default_rng(74)
    right = np.zeros((NUM_FILES, 4), np.int64)
    for number in range(NUM_FILES):
        file = random_file(rng)
        before, after = edited(rng, file, edit)
        for later, tree in enumerate(drafts_after(file, before, after)):
            chain = tree.best_chain(AHEAD)
            right[number, later] = len(chain.follow(np.array(after[later:], np.int32)))
    return right


@pytest.mark.parametrize("edit", EDITS)
def test_copying_goes_on_after_an_edit(edit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tokens after it in most files, where words are ambiguous, and earlier than otherwise.

    After three tokens it mostly does without cursors as well.
    """
    right = num_right(edit)
    without_cursor(monkeypatch)
    right_without = num_right(edit)
    whole, whole_without = (right == AHEAD).sum(axis=0), (right_without == AHEAD).sum(axis=0)
    assert whole[2] >= 0.7 * NUM_FILES
    assert whole[3] >= 0.9 * NUM_FILES
    assert whole[1] > whole_without[1]
    assert whole[2] >= whole_without[2]
    assert right.sum(axis=0)[1] > right_without.sum(axis=0)[1]
    assert right.sum(axis=0)[2] >= right_without.sum(axis=0)[2]
    assert whole[3] >= whole_without[3]


@pytest.mark.parametrize("edit", ["one token replaced", "three tokens inserted"])
def test_copying_is_offered_before_any_token_agrees(
    edit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that stands in the file was written since the edit; its old place is enough."""
    rng = np.random.default_rng(75)
    for _ in range(NUM_FILES):
        file = (rng.permutation(300) + 1).tolist()
        begin = int(rng.integers(100, 200))
        num_old, new = EDITS[edit]
        before, after = file[:begin] + new, file[begin + (num_old or 0) :]
        wanted = np.array(after[:AHEAD], np.int32)
        with monkeypatch.context() as patch:
            assert len(drafts_after(file, before, after)[0].follow(wanted)) == AHEAD
            without_cursor(patch)
            assert len(drafts_after(file, before, after)[0].follow(wanted)) == 0


def collect(context: Context, scratch: Scratch) -> int:
    return collect_sequence(context, AHEAD, scratch)


def test_a_cursor_outlives_the_store_it_was_set_in() -> None:
    file = np.arange(500, dtype=np.int32)
    context = Context(file)
    context.commit(np.append(np.arange(2000, 2300), file[:222]).astype(np.int32))
    capacity, scratch = len(context.chains.tokens), Scratch(AHEAD)
    collect(context, scratch)
    context.commit(np.array([901, 902, 903], np.int32))
    assert len(context.chains.tokens) > capacity
    num_rows = collect(context, scratch)
    found = [(place, row.continuation) for place, row in rows_in(scratch, 0, num_rows)]
    assert found == [(place, tuple(range(place, place + AHEAD))) for place in (222, 225)]
    context.commit(file[230:231])
    num_rows = collect(context, scratch)
    assert 231 in [place for place, row in rows_in(scratch, 0, num_rows) if row.count > 1]


def test_a_cursor_is_given_up_after_long_disagreement() -> None:
    context, scratch = Context(np.arange(500, dtype=np.int32)), Scratch(AHEAD)
    context.commit(np.arange(100, dtype=np.int32))
    collect(context, scratch)
    context.commit(np.arange(1000, 1000 + LOST, dtype=np.int32))
    assert collect(context, scratch) == 2
    context.commit(np.array([2000], np.int32))
    assert collect(context, scratch) == 0


def trail_of(store: ChainStore) -> TrailTwin:
    """What the kernels have made of the trail of a sequence."""
    place, misses, agreed, noted = store.cursor.trail[:4].tolist()
    tokens, edits = store.chains.tokens, store.cursor.edits.tolist()
    in_order = [edits[number % MOST_EDITS] for number in range(max(0, noted - MOST_EDITS), noted)]
    found = tuple(
        Edit(
            tuple(tokens[old : old + old_length].tolist()),
            tuple(tokens[new : new + new_length].tolist()),
            trust,
        )
        for old, old_length, new, new_length, trust in in_order
    )
    num_buckets = store.chains.heads.shape[1]
    return TrailTwin(num_buckets, None if place < 0 else place, misses, agreed, found)


def rewritten(rng: np.random.Generator, source: list[int]) -> list[int]:
    """A source with some of its tokens replaced, mostly, and others put between."""
    replaced = {
        int(token): rng.integers(200, 206, int(rng.integers(1, 7))).tolist()
        for token in rng.choice(200, int(rng.integers(1, 40)))
    }
    written: list[int] = []
    for token in source:
        is_kept = rng.random() < 0.1
        written += [token] if is_kept else replaced.get(token, [token])
        if rng.random() < 0.01:
            written += rng.integers(0, 206, int(rng.choice([1, 3, 12, LOST + 9]))).tolist()
    return written


@pytest.mark.seeds
def test_trails_are_kept_as_their_twins_keep_them() -> None:
    """Through whole sequences that are rewritten, in steps, with rows found at some of them."""
    rng = np.random.default_rng(76)
    scratch = Scratch(MAX_DEPTH, max_rows=MAX_ROWS, max_nodes=8)
    edited = begun = full = lost = 0
    for _ in range(NUM_TALKS):
        source = rng.integers(0, 200, int(rng.choice([20, 400]))).tolist()
        tokens = [*source, *rewritten(rng, source)]
        store = ChainStore(len(tokens), CONTEXT_LIMITS, Source.CONTEXT)
        store.append(np.array(source, np.int32))
        end, twin = len(source), trail_of(store)
        while end < len(tokens):
            is_first = end == len(source)
            num_rows = 1 if is_first else int(rng.choice([0] * 20 + [1, 3]))
            places = rng.integers(0, 1 if is_first else end, MAX_ROWS)
            if twin.place is not None and rng.random() < 0.8:
                places[0] = min(twin.place + int(rng.integers(10)), end - 1)
            matches = rng.integers(LONG - 3 * (not is_first), LONG + 3, MAX_ROWS)
            scratch.rows["position"], scratch.rows["match"] = places, matches
            set_trail(*store.cursor[1:], store.chains, scratch.rows, num_rows)
            found = list(zip(places.tolist(), matches.tolist(), strict=True))[:num_rows]
            twin = twin.set(tokens[:end], found)
            depth, first = int(rng.integers(MAX_DEPTH + 1)), int(rng.integers(MAX_ROWS + 1))
            last = collect_trail(*store.cursor[1:], store.chains, depth, scratch.found, first)
            row = twin.row(tokens[:end], depth) if first < MAX_ROWS else None
            assert rows_in(scratch, first, last) == ([] if row is None else [(twin.place, row)])
            edited += row is not None
            begun += row is not None and twin.misses > 0
            was, begin = twin.place, end
            end = min(len(tokens), end + int(rng.integers(1, 8)))
            store.extend(np.array(tokens[begin:end], np.int32))
            twin = twin.moved(tokens[:end], begin)
            assert trail_of(store) == twin
            lost += was is not None and twin.place is None
            full += store.cursor.trail[3] > MOST_EDITS
    assert min(edited, 3 * begun) > NUM_TALKS
    assert min(full, lost) > NUM_TALKS / 10


QUOTED = {0: [701, 702], 1: [703]}
"""What a token of a file becomes where it is written in a string: as a newline, or a quote."""


def test_text_is_copied_past_edits_that_were_made_before() -> None:
    """Once two lines were written with escapes, the next ones are drafted with them."""
    rng = np.random.default_rng(77)
    for _ in range(NUM_FILES):
        words = (rng.permutation(400) + 2).tolist()
        lines = [[1, *words[begin : begin + 9], 1, NEWLINE] for begin in range(0, 360, 9)]
        escaped = [[t for token in line for t in QUOTED.get(token, [token])] for line in lines]
        prompt = np.array([t for line in lines for t in line] + [1000], np.int32)
        written = np.array([t for line in escaped for t in line], np.int32)
        drafter, known, steps = EmbeddedDrafter(), 0, 0
        drafter.open("s", prompt)
        committed = written[:0]
        while known < len(written):
            request = DraftRequest("s", committed, len(prompt) + known, 32)
            path = drafter.draft([request])[0].follow(written[known:])
            committed = written[known : known + len(path) + 1]
            known, steps = known + len(committed), steps + 1
        # Three edits to be seen, and then whole lines at once: 20 tokens a step and more.
        assert steps <= 12 + len(written) // 20


def test_what_is_supposed_leaves_no_trail() -> None:
    file = np.arange(200, dtype=np.int32)
    context, scratch = Context(file), Scratch(AHEAD)
    context.commit(file[20:40])
    collect(context, scratch)
    before = [array.copy() for array in context.cursor]
    with context.supposing(np.array([901, *range(41, 50)], np.int32)):
        assert collect(context, scratch)
        assert context.cursor.trail[3] == 1
    assert all(map(np.array_equal, context.cursor, before))
