import time

import numpy as np
import pytest

from retriever.drafter import DraftRequest
from retriever.kernels.layout import MAX_MATCH, Scratch
from retriever.kernels.phrase_matching import MAX_BEGINNINGS
from retriever.plugins.replay.replay import replay
from retriever.predict.phrases import MAX_PHRASE_ROWS, ListedPhrases, Phrase, PhraseCursor
from retriever.predict.question import Question
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.traces.traces import Trace
from retriever.tree import Source
from tests.retriever.kernels.twins import row_twins as twins
from tests.retriever.token_ids import ids
from tests.suite_parts import cases

NUM_SEEDS = cases(200, of=2000)
# Ids that share their low or high bits: to the automaton each is two symbols.
ALPHABET = (3, 259, 256, 70_003)


def asked(depth: int, scratch: Scratch) -> Question:
    """A question by which phrases are found: they are not searched by the last tokens."""
    return Question(ids(), np.empty(0, np.float32), depth, scratch)


def rows_at(
    cursor: PhraseCursor, depth: int = 8, max_rows: int = 64, first: int = 0
) -> list[twins.Row]:
    scratch = Scratch(depth, max_rows=max_rows, max_nodes=1)
    end = cursor.collect(asked(depth, scratch), first)
    return [
        twins.Row(
            tuple(scratch.continuations[row, : scratch.rows[row]["length"]].tolist()),
            int(scratch.rows[row]["match"]),
            float(scratch.rows[row]["count"]),
            int(scratch.rows[row]["source"]),
            similarity=float(scratch.rows[row]["similarity"]),
        )
        for row in range(first, end)
    ]


def random_phrases(rng: np.random.Generator) -> list[Phrase]:
    """Phrases that overlap, begin others, repeat themselves, or are single tokens."""
    alphabet = rng.choice(ALPHABET, int(rng.integers(1, 4)), replace=False)
    phrases: list[Phrase] = []
    for _ in range(int(rng.integers(1, 30))):
        longest = 50 if rng.random() < 0.05 else 9
        phrase = tuple(rng.choice(alphabet, int(rng.integers(1, longest))).tolist())
        if phrases and rng.random() < 0.3:
            phrase = phrases[int(rng.integers(len(phrases)))] + phrase
        phrases.append(phrase)
    return phrases


def random_session(rng: np.random.Generator, phrases: list[Phrase]) -> list[int]:
    """Phrases whole and in part, with other tokens between some of them."""
    session: list[int] = []
    while len(session) < 80:
        phrase = phrases[int(rng.integers(len(phrases)))]
        session += phrase[: int(rng.integers(1, len(phrase) + 1))]
        session += rng.choice(ALPHABET, int(rng.integers(0, 3))).tolist()
    return session


@pytest.mark.seeds
def test_cursor_finds_what_brute_force_finds_at_every_step() -> None:
    rng = np.random.default_rng(11)
    found = {"rows": 0, "shorter": 0, "capped": 0}
    for _ in range(NUM_SEEDS):
        phrases = random_phrases(rng)
        session = random_session(rng, phrases)
        listed = ListedPhrases(phrases)
        done = int(rng.integers(0, 40))
        cursor = listed.cursor(ids(*session[:done]))
        depth, max_rows = int(rng.integers(1, 60)), int(rng.integers(1, 40))
        for _ in range(4):
            step = int(rng.integers(0, 9))
            cursor.commit(ids(*session[done : done + step]))
            done += step
            rows = rows_at(cursor, depth, max_rows + 2, first=2)
            room = min(max_rows, MAX_PHRASE_ROWS)
            assert rows == twins.phrase_rows(phrases, session[:done], max_rows=room, depth=depth)
            assert rows == rows_at(listed.cursor(ids(*session[:done])), depth, max_rows)
            found["rows"] += len(rows)
            found["shorter"] += len({row.match for row in rows}) > 1
            found["capped"] += any(row.match == MAX_MATCH for row in rows)
    assert found["rows"] > 10 * NUM_SEEDS
    assert found["shorter"] > NUM_SEEDS
    assert found["capped"] > NUM_SEEDS // 200


def test_a_phrase_of_one_token_over_and_over_is_found_once_at_each_length() -> None:
    phrases = [tuple([7] * length) for length in range(1, 100)]
    rows = rows_at(ListedPhrases(phrases).cursor(ids(*[7] * 60)), depth=3)
    assert rows == twins.phrase_rows(phrases, [7] * 60, max_rows=MAX_PHRASE_ROWS, depth=3)
    loop = ListedPhrases([tuple([7] * 900), (7, 8)]).cursor(ids(*[7] * 800))
    assert [row.match for row in rows_at(loop)] == [MAX_MATCH]  # (7, 8) is beyond what is looked at
    short = ListedPhrases([tuple([7] * 900), (7, 8)]).cursor(ids(*[7] * (MAX_BEGINNINGS)))
    assert [row.continuation for row in rows_at(short)] == [(7,) * 8, (8,)]


def test_a_beginning_counts_once_however_many_share_it() -> None:
    listed = ListedPhrases([(1, 2, n) for n in range(100, 110)])
    rows = rows_at(listed.cursor(ids(9, 1, 2)))
    assert [row.continuation for row in rows] == [(n,) for n in range(100, 110)]
    assert sum(row.count for row in rows) == pytest.approx(1)
    many = ListedPhrases([(1, 2, n) for n in range(5000)])
    rows = rows_at(many.cursor(ids(1, 2)))
    assert len(rows) == MAX_PHRASE_ROWS
    assert sum(row.count for row in rows) == pytest.approx(1)
    assert rows[-1].continuation[0] > 4500  # an even sample, not the first


def test_asking_again_changes_nothing() -> None:
    cursor = ListedPhrases([(1, 2, 3, 4), (3, 5)]).cursor(ids(1, 2))
    assert rows_at(cursor) == rows_at(cursor) == [twins.Row((3, 4), 2, 1.0, Source.PHRASES)]
    cursor.commit(ids())
    assert rows_at(cursor) == [twins.Row((3, 4), 2, 1.0, Source.PHRASES)]
    cursor.commit(ids(3))
    assert [row.continuation for row in rows_at(cursor)] == [(4,), (5,)]


def test_nothing_is_listed_or_nothing_can_be_found() -> None:
    for phrases in ([], [(5,), (6,)]):
        listed = ListedPhrases(phrases)
        assert len(listed) == listed.num_tokens == len(phrases)
        listed.warm()
        cursor = listed.cursor(ids(5, 6))
        cursor.commit(ids(5))
        assert rows_at(cursor) == []
    assert EmbeddedDrafter(phrases=ListedPhrases([])).draft_context([5], 4).token_ids.size == 0


def test_two_sessions_do_not_disturb_each_other() -> None:
    phrases = ListedPhrases([(1, 2, 3, 4), (5, 6, 7, 8)])
    drafter = EmbeddedDrafter(phrases=phrases)
    drafter.open("one", ids(90, 1))
    drafter.open("two", ids(91, 5))
    requests = [DraftRequest("one", ids(2), 3, 8), DraftRequest("two", ids(6), 3, 8)]
    trees = drafter.draft(requests)
    assert [tree.token_ids.tolist() for tree in trees] == [[3, 4], [7, 8]]
    again = [DraftRequest(name, ids(), 3, 8) for name in ("two", "one")]
    assert [tree.token_ids.tolist() for tree in drafter.draft(again)] == [[7, 8], [3, 4]]
    assert set(trees[0].sources.tolist()) == {Source.PHRASES}


def test_listed_template_is_drafted_whole_from_its_first_words() -> None:
    rng = np.random.default_rng(5)
    template = rng.integers(0, 1000, 30)
    phrases = [tuple(template.tolist()), *map(tuple, rng.integers(0, 1000, (500, 20)).tolist())]
    output = np.concatenate([rng.integers(1000, 2000, 5), template, [2001]]).astype(np.int32)
    trace = Trace(ids(2000), output)
    assert replay(EmbeddedDrafter(), [trace], 32).steps == 36
    alone = replay(EmbeddedDrafter(phrases=ListedPhrases(phrases[:1])), [trace], 32)
    assert alone.steps == 5 + 1 + 1  # what is new, the template's first token, all the rest
    assert dict(alone.accepted_by_source) == {Source.PHRASES: 29}
    # Others begin with the same token, so that the second is needed to be sure.
    assert replay(EmbeddedDrafter(phrases=ListedPhrases(phrases)), [trace], 32).steps <= 5 + 2 + 1


@pytest.mark.soak
def test_cost_does_not_grow_with_the_list() -> None:
    """Bounds are generous: the machine may be busy."""
    rng = np.random.default_rng(8)
    words = rng.zipf(1.3, (50_000, 20)) % 49_152
    began = time.perf_counter()
    phrases = ListedPhrases(map(tuple, words.tolist()))
    phrases.warm()
    assert time.perf_counter() - began < 120
    assert phrases.num_bytes < 200 * phrases.num_tokens
    stream = words[rng.integers(0, 50_000, 500)].ravel().astype(np.int32)
    scratch = Scratch(64)
    cursor = phrases.cursor(stream[:0])
    commit_s, collect_s, num_rows = [], [], 0
    for at in range(len(stream)):
        times = [time.perf_counter()]
        cursor.commit(stream[at : at + 1])
        times.append(time.perf_counter())
        num_rows += cursor.collect(asked(32, scratch), 0)
        times.append(time.perf_counter())
        commit_s.append(times[1] - times[0])
        collect_s.append(times[2] - times[1])
    assert num_rows > len(stream)
    assert np.median(commit_s) < 20e-6
    assert np.median(collect_s) < 50e-6
