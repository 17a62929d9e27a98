"""What holds for every rule that drafts from texts alone."""

import numpy as np
import pytest

from benchmarks.papers import DRAFTERS
from retriever.drafter import DraftRequest, SequenceOptions
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


@pytest.mark.parametrize("name", NAMES)
def test_finished_outputs_serve_later_sequences(name: str) -> None:
    drafter = DRAFTERS[name]([], [], 8)
    output = list(range(1, 30))
    for remember, expected in ((False, []), (True, [5, 6, 7])):
        drafter.open("s", ids(40), SequenceOptions(remember=remember))
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
