import numpy as np
import pytest

from benchmarks.papers.rasd import RasdDrafter, merge, pruned
from decoder.drafters.draft_model import DraftModel, ModelReader
from retriever.drafter import Drafter
from retriever.errors import DrafterUnavailableError
from retriever.sequences import TokenSequence
from retriever.tree import DraftTree
from tests.decoder.decoding import ScriptedDrafter, nothing, prompt_of, random_tree
from tests.decoder.drafters.draft_models import llama, most_probable_prefixes
from tests.decoder.drafters.drafted_chains import LIMITS, paths_of, saying
from tests.decoder.drafters.scripted_readers import ScriptedReader, Unavailable, counting
from tests.suite_parts import cases


def drafted(
    retrieval: Drafter, reader: ScriptedReader, budget: int = 8, top_k: int = 2
) -> DraftTree:
    drafter = RasdDrafter(retrieval, reader, LIMITS, top_k=top_k)
    tree = drafter.follow(TokenSequence(np.array([3], np.int32))).draft(budget)
    assert len(tree) <= budget
    return DraftTree.checked(tree.token_ids, tree.parents, tree.probabilities, tree.sources)


def test_retrieved_branches_that_begin_unlikely_are_pruned_with_all_below() -> None:
    retrieval = saying(([20, 4, 5], 0.9), ([5, 30, 31], 0.3), ([6], 0.2))
    paths = set(paths_of(drafted(retrieval, ScriptedReader(counting))))
    assert {(5,), (5, 30), (5, 30, 31), (4,), (4, 5)} <= paths
    assert not any(path[0] in {20, 6} for path in paths)
    more = set(paths_of(drafted(retrieval, ScriptedReader(counting), 12, top_k=10)))
    assert (5, 30) in more


def test_no_more_than_half_is_retrieved_where_the_model_has_enough() -> None:
    retrieval = saying(([4, 20, 21, 22, 23, 24, 25], 0.9))
    paths = set(paths_of(drafted(retrieval, ScriptedReader(counting))))
    assert {(4, 20, 21, 22), (4, 5), (5,)} <= paths
    assert (4, 20, 21, 22, 23) not in paths
    assert len(paths) == 8


@pytest.mark.seeds
def test_merged_trees_hold_the_paths_of_both() -> None:
    for seed in range(cases(50, of=200)):
        rng = np.random.default_rng(seed)
        first, second = (random_tree(rng, int(rng.integers(0, 15)), 6) for _ in range(2))
        ways = set(paths_of(first)) | set(paths_of(second))
        merged = merge(first, second, 99)
        checked = DraftTree.checked(
            merged.token_ids, merged.parents, merged.probabilities, merged.sources
        )
        assert sorted(paths_of(checked)) == sorted(ways)
        shares = dict(zip(paths_of(merged), merged.probabilities.tolist(), strict=True))
        for tree in (first, second):
            for path, share in zip(paths_of(tree), tree.probabilities.tolist(), strict=True):
                assert shares[path] >= share
        cut = paths_of(merge(first, second, len(first) + 3))
        assert set(paths_of(first)) <= set(cut) <= ways
        assert len(cut) <= len(first) + 3


def test_pruning_keeps_what_begins_with_a_likely_token() -> None:
    rng = np.random.default_rng(0)
    tree = random_tree(rng, 30, 6)
    likely = np.array([1, 4], np.int32)
    assert paths_of(pruned(tree, likely)) == [p for p in paths_of(tree) if p[0] in {1, 4}]


def test_without_retrieval_it_drafts_the_models_own_best_tree() -> None:
    model, tokens = llama(), prompt_of(9)
    reader = ModelReader(DraftModel(model))
    drafter = RasdDrafter(ScriptedDrafter(nothing), reader, LIMITS)
    tree = drafter.follow(TokenSequence(np.array(tokens, np.int32))).draft(6)
    best = most_probable_prefixes(model, tokens, 6)
    shares = dict(zip(paths_of(tree), tree.probabilities.tolist(), strict=True))
    assert shares == pytest.approx(best, rel=1e-4)


def test_where_the_model_is_not_available_retrieval_goes_on_whole() -> None:
    retrieval = saying(([20, 4, 5], 0.9))
    reader = Unavailable(3, DrafterUnavailableError("too long"))
    assert paths_of(drafted(retrieval, reader)) == [(20,), (20, 4), (20, 4, 5)]
