"""What a drafter learns: from the last draft's sequence, for its tenant alone, and for good."""

from pathlib import Path

import numpy as np
import pytest

from retriever.drafter import FORGOTTEN, DraftRequest, SequenceOptions, TokenIds
from retriever.predict.weights import Weights, from_bytes, prior_weights, to_bytes, values_of
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.tree import DraftTree
from tests.retriever.log.state_folders import drafter_on, log_on, output
from tests.retriever.predict.blank import blank_weights
from tests.retriever.token_ids import ids

PROMPT = ids(1, 2, 3, 4, 1, 2, 3, 4, 1, 2)


def draft(
    drafter: EmbeddedDrafter, session: str, new: TokenIds, length: int, budget: int = 8
) -> DraftTree:
    return drafter.draft([DraftRequest(session, new, length, budget)])[0]


def is_prior(weights: Weights) -> bool:
    return weights.tobytes() == prior_weights().tobytes()


def learn_something(drafter: EmbeddedDrafter, session: str, tenant: str = "") -> None:
    drafter.open(session, PROMPT, SequenceOptions(tenant=tenant))
    draft(drafter, session, ids(), len(PROMPT))
    draft(drafter, session, ids(3, 4, 9), len(PROMPT) + 3, budget=0)


def test_what_came_next_is_learned_once() -> None:
    drafter = EmbeddedDrafter()
    learn_something(drafter, "s")
    learned = drafter.state.pool("").weights.copy()
    assert not is_prior(learned)
    assert drafter.state.pool("").learned == 3
    draft(drafter, "s", ids(1, 2), len(PROMPT) + 5, budget=0)  # of no draft
    assert np.array_equal(drafter.state.pool("").weights, learned)


def test_the_end_of_a_sequence_is_learned_from() -> None:
    drafter = EmbeddedDrafter()
    drafter.open("s", PROMPT)
    draft(drafter, "s", ids(), len(PROMPT))
    drafter.close("s", ids(3, 4))
    assert drafter.state.pool("").learned == 2


def test_only_the_last_draft_is_learned_from() -> None:
    drafter = EmbeddedDrafter()
    for session in ("first", "last"):
        drafter.open(session, PROMPT, SequenceOptions(tenant=session))
        draft(drafter, session, ids(), len(PROMPT))
    drafter.close("first", ids(3, 4))
    assert is_prior(drafter.state.pool("first").weights)
    drafter.close("last", ids(3, 4))  # what others committed since does not matter
    assert not is_prior(drafter.state.pool("last").weights)


def test_a_step_of_several_sequences_learns_from_the_last_of_them() -> None:
    drafter = EmbeddedDrafter()
    sessions = ("a", "b", "c")
    for session in sessions:
        drafter.open(session, PROMPT, SequenceOptions(tenant=session))
    for new, length in ((ids(), len(PROMPT)), (ids(3), len(PROMPT) + 1)):
        drafter.draft([DraftRequest(session, new, length, 8) for session in sessions])
    assert [drafter.state.pool(session).learned for session in sessions] == [0, 0, 1]


def test_a_bare_context_takes_the_place_of_the_last_draft() -> None:
    drafter = EmbeddedDrafter()
    drafter.open("s", PROMPT)
    draft(drafter, "s", ids(), len(PROMPT))
    drafter.draft_context(ids(7, 8, 7), 8)
    drafter.close("s", ids(3, 4))
    assert is_prior(drafter.state.pool("").weights)


def test_sequences_that_opted_out_teach_nothing() -> None:
    drafter = EmbeddedDrafter()
    drafter.open("s", PROMPT, FORGOTTEN)
    draft(drafter, "s", ids(), len(PROMPT))
    draft(drafter, "s", ids(3), len(PROMPT) + 1)
    drafter.close("s", ids(4))
    assert is_prior(drafter.state.pool("").weights)
    assert drafter.state.pool("").learned == 0


def test_no_tenant_learns_from_another() -> None:
    drafter = EmbeddedDrafter()
    learn_something(drafter, "one", "a")
    learned = drafter.state.pool("a").weights.copy()
    assert is_prior(drafter.state.pool("b").weights)
    learn_something(drafter, "two", "b")
    drafter.close("two", ids(5))
    assert np.array_equal(drafter.state.pool("a").weights, learned)


def test_sessions_of_a_deleted_tenant_teach_nothing() -> None:
    drafter = EmbeddedDrafter()
    drafter.open("s", PROMPT, SequenceOptions(tenant="a"))
    pool = drafter.state.pool("a")
    draft(drafter, "s", ids(), len(PROMPT))
    draft(drafter, "s", ids(3), len(PROMPT) + 1)
    assert not is_prior(pool.weights)
    drafter.delete("a")
    draft(drafter, "s", ids(4), len(PROMPT) + 2)
    drafter.close("s", ids(1))
    assert is_prior(pool.weights)


def test_learning_changes_what_is_drafted() -> None:
    """A copy that never goes on as drafted is trusted less and less."""
    drafter = EmbeddedDrafter()
    drafter.state.pool("").weights[:] = blank_weights()
    first = []
    for number in range(30):
        drafter.open(str(number), PROMPT)
        tree = draft(drafter, str(number), ids(), len(PROMPT))
        first.append(float(tree.probabilities[tree.token_ids.tolist().index(3)]))
        drafter.close(str(number), ids(50 + number))
    assert first[-1] < first[0] - 0.1


def test_warming_teaches_and_remembers_nothing() -> None:
    drafter = EmbeddedDrafter()
    drafter.warm()
    assert is_prior(drafter.state.pool("").weights)
    assert drafter.state.pool("").generations.num_tokens == 0


def test_weights_come_back_with_outputs_and_alone(tmp_path: Path) -> None:
    with drafter_on(tmp_path) as drafter:
        learn_something(drafter, "s", "a")
        drafter.close("s")
        with_output = drafter.state.pool("a").weights.copy()
        learn_something(drafter, "t", "b")  # still open at the end
        alone = drafter.state.pool("b").weights.copy()
        drafter.remember(output(1), tenant="c")
    with drafter_on(tmp_path) as drafter:
        assert np.array_equal(drafter.state.pool("a").weights, with_output)
        assert np.array_equal(drafter.state.pool("b").weights, alone)
        assert is_prior(drafter.state.pool("c").weights)


@pytest.mark.parametrize(
    "kept",
    [
        None,
        b"",
        b"another layout",
        to_bytes(prior_weights())[:-4],
        to_bytes(prior_weights()) + b"more",
        b"weights0" + prior_weights().tobytes(),
        to_bytes(prior_weights())[:-4] + np.array([np.nan], "<f4").tobytes(),
        to_bytes(prior_weights())[:-4] + np.array([np.inf], "<f4").tobytes(),
    ],
)
def test_what_cannot_be_kept_weights_begins_anew(tmp_path: Path, kept: bytes | None) -> None:
    assert is_prior(from_bytes(kept))
    if kept is not None:
        with log_on(tmp_path) as log:
            log.put_statistics("a", kept)
        with drafter_on(tmp_path) as drafter:
            assert is_prior(drafter.state.pool("a").weights)


def test_kept_weights_are_the_same() -> None:
    weights = prior_weights()
    weights.view(np.float32)[:] += np.arange(weights.nbytes // 4, dtype=np.float32)
    assert np.array_equal(values_of(from_bytes(to_bytes(weights))), values_of(weights))
