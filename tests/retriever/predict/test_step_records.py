"""What a sequence keeps between steps: refused as a whole, grown with what is asked, its own."""

import os
from collections.abc import Callable
from threading import Thread
from typing import Any

import numpy as np
import pytest

from retriever.drafter import DraftRequest, SequenceOptions, TokenIds
from retriever.errors import InvalidRequestError, LimitExceededError, OutOfSequenceError
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.tree import DraftTree
from tests.retriever import repeating
from tests.retriever.token_ids import ids

MANY = 64


def text(seed: int, length: int) -> TokenIds:
    return np.array(repeating.text(np.random.default_rng(seed), length), np.int32)


def as_bytes(tree: DraftTree) -> tuple[bytes, ...]:
    arrays = (tree.token_ids, tree.parents, tree.probabilities, tree.sources)
    return tuple(array.tobytes() for array in arrays)


def opened(threads: int = 2, *, learns: bool = True) -> EmbeddedDrafter:
    drafter = EmbeddedDrafter(threads=threads)
    drafter.remember(text(1, 400))
    for number in range(MANY):
        drafter.open(str(number), text(number, 60), SequenceOptions(remember=learns))
    return drafter


def step_of(new: Callable[[int], TokenIds], length: int, budget: int = 8) -> list[DraftRequest]:
    return [DraftRequest(str(n), new(n), length, budget) for n in range(MANY)]


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"length": 70}, OutOfSequenceError, "40"),
    ({"new_tokens": ids(-3)}, InvalidRequestError, "-3"),
    ({"budget_nodes": 5000}, LimitExceededError, "max_budget_nodes"),
    ({"budget_nodes": -1}, InvalidRequestError, "negative"),
    ({"min_probability": float("nan")}, InvalidRequestError, "nan"),
    ({"budget_nodes": "8"}, TypeError, "str"),
    ({"session": "41"}, InvalidRequestError, "twice"),
]


@pytest.mark.parametrize(("wrong", "error", "says"), WRONG)
def test_of_a_step_with_one_request_that_does_not_fit_nothing_is_kept(
    wrong: dict[str, Any], error: type[Exception], says: str
) -> None:
    drafter, whole = opened(), opened()
    for each in (drafter, whole):
        each.draft(step_of(lambda _: ids(), 60))
    requests = step_of(lambda n: text(n, 61)[60:], 61)
    requests[40] = requests[40]._replace(**wrong)
    before = drafter.state.draft_counts.by_accepted.tolist()
    with pytest.raises(error, match=says):
        drafter.draft(requests)
    assert drafter.state.draft_counts.by_accepted.tolist() == before
    for each in (drafter, whole):
        each.draft(step_of(lambda n: text(n, 61)[60:], 61))
    found, expected = (each.draft(step_of(lambda _: ids(), 61)) for each in (drafter, whole))
    assert [*map(as_bytes, found)] == [*map(as_bytes, expected)]
    assert (
        drafter.state.draft_counts.by_accepted.tolist()
        == whole.state.draft_counts.by_accepted.tolist()
    )


@pytest.mark.parametrize(("wrong", "error", "says"), WRONG[:-1])
def test_one_request_that_does_not_fit_is_refused_with_the_reason(
    wrong: dict[str, Any], error: type[Exception], says: str
) -> None:
    drafter = opened()
    request = DraftRequest("40", text(40, 61)[60:], 61, 8)
    with pytest.raises(error, match=says.replace("40", "session")):
        drafter.draft([request._replace(**wrong)])
    assert len(drafter.draft([request])[0]) > 0


def test_a_tree_larger_than_any_before_leaves_the_last_ones_outcome_to_be_counted() -> None:
    drafter = opened()
    (small,) = drafter.draft([DraftRequest("1", ids(), 60, 8)])
    (large,) = drafter.draft([DraftRequest("1", small.token_ids[:1], 61, 200)])
    assert drafter.state.draft_counts.by_accepted[1] == 1
    kept = as_bytes(large)
    (again,) = drafter.draft([DraftRequest("1", large.token_ids[:1], 62, 8)])
    assert drafter.state.draft_counts.by_accepted[1] == 2
    assert as_bytes(large) == kept  # a tree is a value: later steps leave it as it is
    assert len(again) == 8 < len(large)


def test_sequences_that_outgrow_their_stores_while_others_are_drafted_for() -> None:
    alone, drafter = opened(learns=False), opened(learns=False)
    lengths = (61, 900, 905, 2400, 2404)

    def run(drafter: EmbeddedDrafter, number: int, trees: dict[int, list[Any]]) -> None:
        done, whole = 60, text(number, lengths[-1])
        for length in lengths:
            request = DraftRequest(str(number), whole[done:length], length, 16)
            trees[number].append(as_bytes(drafter.draft([request])[0]))
            done = length

    expected, found = ({number: list[Any]() for number in range(8)} for _ in range(2))
    for number in range(8):
        run(alone, number, expected)
    threads = [Thread(target=run, args=(drafter, number, found)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_between_two_steps_drafts_on_as_its_parent_does() -> None:
    drafter = opened(threads=1)
    drafter.draft([DraftRequest("3", ids(), 60, 8)])
    request = DraftRequest("3", text(3, 62)[60:], 62, 32)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, b"".join(as_bytes(drafter.draft([request])[0])))
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading, "rb") as file:
        assert file.read() == b"".join(as_bytes(drafter.draft([request])[0]))
