"""SuffixDecoding on examples that can be followed by hand, and against a twin."""

from fractions import Fraction

import numpy as np
import pytest

from benchmarks.papers.suffix_decoding import BEST_TREE, MAX_DEPTH, Settings, SuffixDecoding
from retriever.drafter import DraftRequest
from tests.benchmarks.drafting import draft_for, ids, paths
from tests.benchmarks.papers.paper_twins import best_tree_score, substring_counts


@pytest.mark.programs
def test_suffix_decoding_weighs_a_tree_by_counts() -> None:
    """Counts as in figure 2 of the paper: after 1 2, three times 3 and once 4."""
    outputs = [ids(1, 2, 3, 5), ids(1, 2, 3, 5), ids(1, 2, 3, 6), ids(1, 2, 4, 7)]
    drafter = SuffixDecoding(outputs, 8, BEST_TREE)
    tree = draft_for(drafter, [9, 1, 2], 5)
    assert paths(tree) == [(3,), (3, 5), (4,), (3, 6), (4, 7)]
    assert np.allclose(tree.probabilities, [3 / 4, 2 / 4, 1 / 4, 1 / 4, 1 / 4])
    likely = SuffixDecoding(outputs, 8, Settings(0, 8, 0.3, use_tree_spec=True))
    assert paths(draft_for(likely, [9, 1, 2], 5)) == [(3,), (3, 5)]


def test_suffix_decoding_s_path_follows_the_most_frequent_child_as_far_as_the_match_allows() -> (
    None
):
    outputs = [ids(1, 2, 3, 5, 6, 7), ids(1, 2, 3, 5, 6, 7), ids(1, 2, 4, 7)]
    drafter = SuffixDecoding(outputs, 8, Settings(1.0, 1.0, 0.1, use_tree_spec=False))
    assert draft_for(drafter, [9, 1, 2], 8).token_ids.tolist() == [3, 5, 6]


@pytest.mark.programs
def test_suffix_decoding_scores_equal_counted_substrings() -> None:
    """While a sequence runs: its own tree and the shared one, which holds its output already."""
    rng = np.random.default_rng(5)
    for _ in range(40):
        outputs = [rng.integers(0, 4, int(rng.integers(1, 30))) for _ in range(3)]
        settings = Settings(0.0, 99.0, 0.05, use_tree_spec=True)
        drafter = SuffixDecoding([o.astype(np.int32) for o in outputs], 8, settings)
        prompt = rng.integers(0, 4, int(rng.integers(1, 90))).tolist()
        written: list[int] = []
        new: list[int] = []
        drafter.open("s", ids(*prompt))
        for _ in range(8):
            sequence = prompt + written
            tree = drafter.draft([DraftRequest("s", ids(*new), len(sequence), 8)])[0]
            expected = max(
                best_tree_score(
                    substring_counts(documents, MAX_DEPTH),
                    sequence[-MAX_DEPTH:],
                    8,
                    Fraction(1, 20),
                )
                for documents in ([sequence], [*(o.tolist() for o in outputs), written])
            )
            assert float(tree.probabilities.sum()) == pytest.approx(float(expected), abs=1e-4)
            new = rng.integers(0, 4, int(rng.integers(1, 5))).tolist()
            written += new
