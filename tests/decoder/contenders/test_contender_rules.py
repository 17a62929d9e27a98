"""Each rule on an example that can be followed by hand, and against a twin or its original."""

from fractions import Fraction

import numpy as np
import pytest

from decoder.contenders.kernels import scanning
from decoder.contenders.prompt_lookup import PromptLookup
from decoder.contenders.suffix_decoding import BEST_TREE, MAX_DEPTH, Settings, SuffixDecoding
from retriever.drafter import DraftRequest
from tests.benchmarks.drafting import draft_for, ids, paths
from tests.decoder.contenders.contender_twins import (
    best_tree_score,
    longest_repeat,
    substring_counts,
)
from tests.suite_parts import cases


@pytest.mark.seeds
def test_longest_repeat_equals_its_twin() -> None:
    rng = np.random.default_rng(1)
    for _ in range(cases(300, of=2000)):
        tokens = rng.integers(0, int(rng.integers(1, 6)), int(rng.integers(1, 40)))
        max_length = int(rng.integers(1, 12))
        found = scanning.longest_repeat(tokens.astype(np.int32), max_length)
        assert found == longest_repeat(tokens.tolist(), max_length)


def test_prompt_lookup_takes_the_first_match_of_the_longest_end() -> None:
    context = [7, 2, 9, 1, 2, 3, 4, 1, 2, 5, 1, 2]
    assert draft_for(PromptLookup(1), context, 2).token_ids.tolist() == [9, 1]
    assert draft_for(PromptLookup(2), context, 3).token_ids.tolist() == [3, 4, 1]
    assert len(draft_for(PromptLookup(2), [1, 2, 3], 3)) == 0


def test_prompt_lookup_equals_that_of_transformers() -> None:
    torch = pytest.importorskip("torch")
    from transformers.generation.candidate_generator import (  # noqa: PLC0415  (it loads torch)
        PromptLookupCandidateGenerator,
    )

    rng = np.random.default_rng(4)
    for _ in range(300):
        context = rng.integers(0, 5, int(rng.integers(2, 40))).tolist()
        size, budget = int(rng.integers(1, 6)), int(rng.integers(1, 12))
        original = PromptLookupCandidateGenerator(
            num_output_tokens=budget, max_matching_ngram_size=size, max_length=1 << 20
        )
        candidates, _ = original.get_candidates(torch.tensor([context]))
        ours = draft_for(PromptLookup(size), context, budget).token_ids.tolist()
        assert ours == candidates[0, len(context) :].tolist()


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
