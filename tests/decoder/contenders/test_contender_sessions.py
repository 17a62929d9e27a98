"""What holds for every peer as a `Drafter`."""

import numpy as np
import pytest

from decoder.contenders.drafting_rules import DRAFTERS
from retriever.commands.factories import own_drafter
from retriever.drafter import DraftRequest
from retriever.errors import OutOfSequenceError, SessionExistsError, UnknownSessionError
from retriever.tree import DraftTree
from tests.benchmarks.drafting import IndexMaker, draft_for, ids

NAMES = sorted(DRAFTERS)


@pytest.mark.parametrize("name", NAMES)
def test_trees_are_valid_and_within_budget(name: str, make_index: IndexMaker) -> None:
    rng = np.random.default_rng(6)
    documents = [rng.integers(0, 6, 60).tolist() for _ in range(5)]
    outputs = [rng.integers(0, 6, 40).astype(np.int32) for _ in range(5)]
    drafter = DRAFTERS[name]([make_index(*documents)], outputs, 16)
    nodes = 0
    for _ in range(5):
        drafter.open("s", rng.integers(0, 6, 30).astype(np.int32))
        length, new = 30, ids()
        for _ in range(20):
            budget = int(rng.integers(0, 17))
            tree = drafter.draft([DraftRequest("s", new, length, budget)])[0]
            DraftTree.checked(tree.token_ids, tree.parents, tree.probabilities, tree.sources)
            assert len(tree) <= budget
            nodes += len(tree)
            new = rng.integers(0, 6, int(rng.integers(1, 6))).astype(np.int32)
            length += len(new)
        drafter.close("s", new)
    assert nodes > 100


@pytest.mark.parametrize("name", [name for name in NAMES if name != "prompt-lookup"])
def test_finished_outputs_serve_later_sequences(name: str) -> None:
    drafter = DRAFTERS[name]([], [], 8)
    output = list(range(1, 30))
    for remember, expected in ((False, []), (True, [5, 6, 7])):
        drafter.open("s", ids(40), remember=remember)
        drafter.close("s", ids(*output))
        assert draft_for(drafter, [41, 3, 4], 3).token_ids.tolist() == expected


@pytest.mark.parametrize("name", NAMES)
def test_sessions_run_beside_one_another(name: str) -> None:
    """What one sequence is drafted does not hang on whose turn came first."""
    sequences = {"a": list(range(1, 20)) * 2, "b": list(range(20, 40)) * 2}
    alone = {}
    for session, tokens in sequences.items():
        alone[session] = draft_for(DRAFTERS[name]([], [], 8), tokens[:25], 4).token_ids.tolist()
    drafter = DRAFTERS[name]([], [], 8)
    for session, tokens in sequences.items():
        drafter.open(session, ids(*tokens[:23]))
    together = drafter.draft(
        [DraftRequest(s, ids(*tokens[23:25]), 25, 4) for s, tokens in sequences.items()]
    )
    assert [tree.token_ids.tolist() for tree in together] == list(alone.values())


@pytest.mark.parametrize("name", NAMES)
def test_misuse_is_refused(name: str) -> None:
    drafter = DRAFTERS[name]([], [], 8)
    drafter.open("s", ids(1, 2))
    with pytest.raises(SessionExistsError):
        drafter.open("s", ids(1))
    with pytest.raises(OutOfSequenceError):
        drafter.draft([DraftRequest("s", ids(3), 2, 4)])
    with pytest.raises(UnknownSessionError):
        drafter.draft([DraftRequest("t", ids(), 0, 4)])
    drafter.close("s")
    with pytest.raises(UnknownSessionError):
        drafter.close("s")


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_prompt_is_drafted_nothing(name: str) -> None:
    assert len(draft_for(DRAFTERS[name]([], [], 8), [], 4)) == 0


def test_our_own_drafter_remembers_outputs() -> None:
    drafter = own_drafter([], [ids(1, 2, 3, 4, 5, 6)], 8)
    assert draft_for(drafter, [9, 1, 2, 3], 1).token_ids.tolist() == [4]
