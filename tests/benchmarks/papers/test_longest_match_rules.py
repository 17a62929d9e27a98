"""Each peer on an example that can be followed by hand, and against a twin or its original."""

import numpy as np

from benchmarks.papers.hierarchy import HierarchyDrafting
from benchmarks.papers.longest_match import InfiniGram, Rest
from benchmarks.papers.sam_decoding import SamDecoding
from retriever.tree import Source
from tests.benchmarks.drafting import IndexMaker, draft_for, ids, paths


def test_rest_drafts_the_most_frequent_continuations_of_the_longest_match(
    make_index: IndexMaker,
) -> None:
    """As in section 3.2 of the paper: all continuations into a trie, its top nodes by frequency."""
    index = make_index([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 4, 6], [1, 2, 7], [9, 2, 8, 8])
    tree = draft_for(Rest([index], [ids(1, 2, 3, 4)]), [5, 1, 2], 4)
    assert paths(tree) == [(3,), (3, 4), (7,), (3, 5)]
    assert np.allclose(tree.probabilities, [4 / 5, 3 / 5, 1 / 5, 1 / 5])


def test_rest_reads_shorter_ends_only_where_the_longer_do_not_occur(make_index: IndexMaker) -> None:
    index = make_index([4, 1, 2, 3], [2, 9], [2, 9], [2, 9])
    assert paths(draft_for(Rest([index], []), [4, 1, 2], 1)) == [(3,)]
    assert paths(draft_for(Rest([index], []), [5, 5, 2], 1)) == [(9,)]


def test_infini_gram_takes_the_longest_end_of_whatever_length(make_index: IndexMaker) -> None:
    long = list(range(10, 49))
    index = make_index([*long, 1], [*long[-20:], 2], [*long[-20:], 2], [48, 3])
    assert paths(draft_for(InfiniGram([index], []), [9, *long], 1)) == [(1,)]
    assert paths(draft_for(InfiniGram([index], []), [9, *long[-20:]], 2)) == [(2,), (1,)]
    assert paths(draft_for(InfiniGram([index], []), [9, 48], 1)) == [(2,)]
    assert len(draft_for(InfiniGram([index], []), [4, 5], 1)) == 0


def test_infini_gram_takes_seven_bytes_a_token(make_index: IndexMaker) -> None:
    index = make_index([1, 2, 3, 4] * 250)
    assert InfiniGram([index], []).num_bytes == 7 * 1000 + 2  # and the separator


def test_hierarchy_asks_its_databases_in_order(make_index: IndexMaker) -> None:
    """As in section 3 of the paper: the context, then the model's outputs, then the corpus."""
    index = make_index([8, 1, 30, 31, 32, 33], [5, 1, 40, 41, 42, 43])
    drafter = HierarchyDrafting([index], [ids(1, 20, 21, 22, 23)], 16)
    tree = draft_for(drafter, [1, 10, 11, 12, 13, 8, 1], 16)
    assert paths(tree)[3::4] == [
        (10, 11, 12, 13),
        (20, 21, 22, 23),
        (30, 31, 32, 33),  # after the last two tokens
        (40, 41, 42, 43),  # after the last
    ]
    assert tree.sources[::4].tolist() == [
        Source.CONTEXT,
        Source.GENERATIONS,
        Source.CORPUS,
        Source.CORPUS,
    ]
    assert len(draft_for(drafter, [1, 10, 11, 12, 13, 8, 1], 6)) == 6


def test_hierarchy_keeps_the_most_recent_of_the_context() -> None:
    drafts = [[1, 10 * i, 2, 3, 4] for i in range(1, 5)]
    context = [token for draft in [*drafts, drafts[0]] for token in draft] + [1]
    tree = draft_for(HierarchyDrafting([], [], 8), context, 8)
    assert paths(tree)[3::4] == [(10, 2, 3, 4), (40, 2, 3, 4)]


def test_hierarchy_ranks_the_model_s_drafts_by_the_outputs_that_hold_them() -> None:
    rare, common = ids(1, 2, 3, 4, 5), ids(1, 6, 7, 8, 9)
    outputs = [np.concatenate([rare, rare, rare]), common, common]
    tree = draft_for(HierarchyDrafting([], outputs, 4), [0, 1], 4)
    assert tree.token_ids.tolist() == [6, 7, 8, 9]


def test_sam_decoding_prefers_the_longer_match(make_index: IndexMaker) -> None:
    index = make_index([1, 2, 3, 4, 40, 41, 42])
    context = [3, 4, 30, 31, 1, 2, 3, 4]
    assert draft_for(SamDecoding([index], []), context, 2).token_ids.tolist() == [40, 41]
    biased = SamDecoding([index], [], length_bias=2)
    assert draft_for(biased, context, 2).token_ids.tolist() == [30, 31]


def test_sam_decoding_drafts_after_the_first_occurrence() -> None:
    outputs = [ids(1, 2, 9, 9), ids(1, 2, 8, 8)]
    assert draft_for(SamDecoding([], outputs), [5, 1, 2], 9).token_ids.tolist() == [9, 9]
    assert draft_for(SamDecoding([], []), [1, 7, 1, 8, 1], 2).token_ids.tolist() == [7, 1]
