"""A step's trees, and what is learned from them, do not depend on threads."""

from collections.abc import Iterator
from pathlib import Path
from threading import Thread, enumerate as enumerate_threads
from typing import Any

import numpy as np
import pytest

from retriever.drafter import DraftRequest, Prediction, SequenceOptions, TokenIds
from retriever.kernels.compiling import kernel, take_number
from retriever.kernels.entries import CONTEXT, CORPUS, GENERATIONS, TREE, step_sequences
from retriever.predict import draft
from retriever.predict.databases import Run
from retriever.predict.draft import LEAST_SEQUENCES
from retriever.predict.phrases import ListedPhrases
from retriever.predict.question import Question
from retriever.sessions.service_face import ServiceFace
from retriever.tree import DraftTree
from tests.retriever import repeating
from tests.retriever.open_sessions import WatchedDrafter
from tests.retriever.token_ids import ids

SESSIONS = 24


def text(seed: int, length: int) -> list[int]:
    return repeating.text(np.random.default_rng(seed), length)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parallel")
    return repeating.index_of_text(folder / "index", np.random.default_rng(0))


def drafter_of(
    index: Path, threads: int, *, with_phrases: bool = False, with_predictions: bool = True
) -> WatchedDrafter:
    phrases = ListedPhrases([tuple(text(7, 30)[:length]) for length in (3, 6, 9, 30)])
    drafter = WatchedDrafter.open_indexes(
        [index], threads=threads, phrases=phrases if with_phrases else None
    )
    for number in range(SESSIONS):
        prompt = text(number % 9, 20 + number) if number != 5 else []
        expected = [Prediction(np.array(text(number % 9, 200), np.int32))] * (
            with_predictions and number % 6 == 4
        )
        drafter.open(
            str(number),
            prompt,
            SequenceOptions(
                tenant="ab"[number % 5 == 3], remember=number % 7 != 6, predictions=tuple(expected)
            ),
        )
    return drafter


def steps() -> Iterator[list[tuple[str, TokenIds, int, int, float]]]:
    """Yield steps of all sequences or of some: name, new tokens, length, budget, probability."""
    rng = np.random.default_rng(11)
    texts = [[*text(number % 9, 20 + number), *text(number, 400)] for number in range(SESSIONS)]
    lengths = [20 + number if number != 5 else 0 for number in range(SESSIONS)]
    for step in range(40):
        asked = []
        for number in rng.permutation(SESSIONS)[: SESSIONS if step % 3 else 5].tolist():
            new = texts[number][lengths[number] :][: int(rng.integers(0, 6))]
            lengths[number] += len(new)
            budget, least = int(rng.choice([0, 1, 8, 32])), float(rng.choice([0, 0, 0.01]))
            asked.append((str(number), np.array(new, np.int32), lengths[number], budget, least))
        yield asked


def as_lists(tree: DraftTree) -> list[Any]:
    return [tree.token_ids.tolist(), tree.parents.tolist(), tree.probabilities.tolist(),
            tree.sources.tolist()]  # fmt: skip


@pytest.mark.parametrize("with_phrases", [False, True])
def test_trees_and_weights_are_those_of_one_draft_after_the_other(
    index: Path,
    with_phrases: bool,  # noqa: FBT001
) -> None:
    """Of the last sequence of a step is learned, whichever thread drafted for it."""
    alone = drafter_of(index, 1, with_phrases=with_phrases)
    several = [drafter_of(index, threads, with_phrases=with_phrases) for threads in (1, 2, 3, 5)]
    num_nodes = 0
    for asked in steps():
        requests = [DraftRequest(*each) for each in asked]
        committed: Any = ServiceFace(alone.state).commit_each(requests, "")
        expected = [as_lists(ServiceFace(alone.state).draft_each([step])[0]) for step in committed]
        num_nodes += sum(len(tokens) for tokens, *_ in expected)
        for drafter in several:
            assert [as_lists(tree) for tree in drafter.draft(requests)] == expected
    assert num_nodes > 3000
    for tenant in ("a", "b"):
        pool = alone.state.pool(tenant)
        assert pool.learned > 0
        for drafter in several:
            other = drafter.state.pool(tenant)
            assert other.learned == pool.learned
            assert other.weights.tobytes() == pool.weights.tobytes()


def test_a_step_of_one_sequence_is_its_commit_and_its_draft(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trees, weights and counts are the same, in one call of a kernel and in several."""
    calls: list[int] = []

    def counting(*arguments: Any) -> Any:
        calls.append(1)
        return step_sequences(*arguments)

    monkeypatch.setattr(draft, "step_sequences", counting)
    whole, parts = (drafter_of(index, 1, with_predictions=False) for _ in range(2))
    num_steps = 0
    for asked in steps():
        for each in asked:
            request = DraftRequest(*each)
            committed: Any = ServiceFace(parts.state).commit_each([request], "")
            (expected,) = ServiceFace(parts.state).draft_each(committed)
            calls.clear()
            (tree,) = whole.draft([request])
            assert len(calls) == 1
            assert as_lists(tree) == as_lists(expected)
            num_steps += request.budget_nodes > 0 and request.length > 0
    assert num_steps > 400
    for session in range(SESSIONS):  # more tokens than there is room for, and then again a few
        for new in (text(session, 1000), [1, 2]):
            done = len(whole.session(str(session)).databases.context)
            request = DraftRequest(str(session), np.array(new, np.int32), done + len(new), 8)
            committed = ServiceFace(parts.state).commit_each([request], "")
            (expected,), (tree,) = (
                ServiceFace(parts.state).draft_each(committed),
                whole.draft([request]),
            )
            assert as_lists(tree) == as_lists(expected)
    assert counted(whole) == counted(parts)


def counted(drafter: WatchedDrafter) -> list[Any]:
    """Return all that steps leave behind."""
    counts = drafter.state.draft_counts
    pools = [drafter.state.pool(tenant) for tenant in ("a", "b")]
    sequences = [each.databases for each in drafter.open_sessions()]
    return [
        counts.by_source.tolist(),
        counts.by_accepted.tolist(),
        counts.num_outcomes,
        counts.num_committed,
        [each.num_accepted for each in drafter.stats().index_outcomes],
        [each.num_drafted for each in drafter.stats().index_outcomes],
        [(pool.learned > 0, pool.learned, pool.weights.tobytes()) for pool in pools],
        [each.context.last(2000).tolist() for each in sequences],
        drafter.predictor.num_rows,
    ]


class Silent:
    """A database that finds nothing."""

    def collect(self, question: Question, row: int) -> int:  # noqa: ARG002
        return row

    def commit(self, tokens: TokenIds) -> None:
        """Note nothing."""


def test_stages_that_are_done_one_by_one_draft_the_same_tree(index: Path) -> None:
    whole, parts = (drafter_of(index, 1) for _ in range(2))
    seen = set[int]()
    for each in (whole, parts):
        each.remember(text(4, 300), tenant="a")
    for asked in steps():
        for name, new, length, budget, _ in asked:
            request = DraftRequest(name, new, length, budget)
            databases = parts.session(name).databases
            if databases.is_compiled:
                databases.runs = [
                    *(Run(stage, Silent()) for stage in (CONTEXT, GENERATIONS, CORPUS)),
                    Run(TREE, None),
                ]
                databases.is_compiled = databases.appends = False
            (expected,), (tree,) = whole.draft([request]), parts.draft([request])
            assert as_lists(tree) == as_lists(expected)
            seen.update(tree.sources.tolist())
    assert seen == {1, 2, 3, 4, 6}


def test_helpers_draft_where_a_step_has_enough_sequences(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each thread that drafts calls the kernel once."""
    calls: list[int] = []

    def counting(*arguments: Any) -> Any:
        calls.append(1)
        return step_sequences(*arguments)

    monkeypatch.setattr(draft, "step_sequences", counting)
    drafter = drafter_of(index, 3, with_predictions=False)
    for count, helpers in ((2 * LEAST_SEQUENCES - 1, 0), (2 * LEAST_SEQUENCES, 1), (SESSIONS, 2)):
        chosen = [number for number in range(SESSIONS) if number % 5 not in {0, 3}][:count]
        requests = [DraftRequest(str(each), ids(), 20 + each, 8) for each in chosen]
        calls.clear()
        assert len(drafter.draft(requests)) == len(chosen)
        expected = min(helpers, len(chosen) // LEAST_SEQUENCES - 1)
        assert len(calls) == 1 + max(0, expected)


def test_one_sequence_wakes_no_thread(index: Path) -> None:
    drafter, before = drafter_of(index, 4), set(enumerate_threads())
    drafter.draft([DraftRequest("1", ids(), 21, 32)])
    assert set(enumerate_threads()) <= before


@kernel()
def taken(counter: Any, numbers: Any) -> int:
    """Take numbers and count each, until there are no more."""
    while True:
        number = take_number(counter)
        if number >= numbers.shape[0]:
            return 0
        numbers[number] += 1


def test_every_number_is_taken_once() -> None:
    counter, numbers = np.zeros(1, np.int64), np.zeros(300_000, np.int64)
    taken(counter, numbers[:0])
    counter[:] = 0
    threads = [Thread(target=taken, args=(counter, numbers)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (numbers == 1).all()
    assert counter[0] == len(numbers) + len(threads)
