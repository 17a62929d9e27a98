import numpy as np
import torch

from benchmarks.papers.token_recycling import NUM_KEPT, TokenRecycling
from decoder.drafters.following import Verified
from retriever.drafter import DraftRequest
from retriever.tree import ROOT, DraftTree
from tests.benchmarks.drafting import draft_for, ids, paths
from tests.decoder.decoding import tree_of

VOCABULARY = 40


def ranked(*rows: list[int]) -> torch.Tensor:
    """Logits of which these tokens are the likeliest, in this order."""
    logits = torch.full((len(rows), VOCABULARY), -9.0)
    for row, tokens in enumerate(rows):
        for rank, token in enumerate(tokens):
            logits[row, token] = float(len(tokens) - rank)
    return logits


def passed(last: int, tree: DraftTree, logits: torch.Tensor) -> Verified:
    return Verified(last, tree, logits, np.empty(0, np.int64), 0)


def test_rows_of_drafts_are_kept_under_their_own_tokens_rejected_or_not() -> None:
    drafter = TokenRecycling(VOCABULARY)
    drafter.open("s", ids(9))
    tree = tree_of([(ROOT, 1), (ROOT, 2)])
    rows = [[*range(1, 9)], [*range(11, 19)], [*range(21, 29)]]
    drafter.learn("s", passed(5, tree, ranked(*rows)))
    after_5 = drafter.draft([DraftRequest("s", ids(5), 2, 80)])[0]
    found = paths(after_5)
    assert [path for path in found if len(path) == 1] == [(token,) for token in range(1, 9)]
    assert {path for path in found if path[:1] == (1,)} == {(1,), *((1, t) for t in range(11, 19))}
    assert {path for path in found if path[:1] == (2,)} == {(2,), *((2, t) for t in range(21, 25))}
    drafter.learn("s", passed(5, DraftTree.empty(), ranked([*range(30, 38)])))
    assert paths(drafter.draft([DraftRequest("s", ids(), 2, 1)])[0]) == [(30,)]


def test_the_shape_is_the_published_one_and_each_prefix_is_a_tree() -> None:
    drafter = TokenRecycling(VOCABULARY)
    drafter.open("s", ids(0))
    tokens = [*range(NUM_KEPT)]
    for token in tokens:
        drafter.learn("s", passed(token, DraftTree.empty(), ranked(tokens)))
    whole = drafter.draft([DraftRequest("s", ids(), 1, 200)])[0]
    depths = np.bincount([len(path) for path in paths(whole)]).tolist()
    assert depths == [0, 8, 21, 25, 15, 8, 3]
    for budget in (1, 5, 16, 79):
        tree = drafter.draft([DraftRequest("s", ids(), 1, budget)])[0]
        assert paths(tree) == paths(whole)[:budget]
    DraftTree.checked(whole.token_ids, whole.parents, whole.probabilities, whole.sources)


def test_nothing_is_drafted_after_a_token_that_no_pass_has_seen() -> None:
    assert len(draft_for(TokenRecycling(VOCABULARY), [1, 2, 3], 16)) == 0
