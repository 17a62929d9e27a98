"""Prompt lookup by hand, against a twin and its original; and what all such drafters refuse."""

import numpy as np
import pytest

from decoder.plugins.contenders.prompt_lookup import PromptLookup, longest_repeat
from retriever.drafter import DraftRequest
from retriever.errors import OutOfSequenceError, SessionExistsError, UnknownSessionError
from tests.benchmarks.drafting import draft_for, ids
from tests.suite_parts import cases


def longest_repeat_twin(tokens: list[int], max_length: int) -> tuple[int, int]:
    """The longest end that occurred before, and the position after its first occurrence."""
    for length in range(min(max_length, len(tokens) - 1), 0, -1):
        for end in range(length, len(tokens)):
            if tokens[end - length : end] == tokens[-length:]:
                return length, end
    return 0, len(tokens)


@pytest.mark.seeds
def test_longest_repeat_equals_its_twin() -> None:
    rng = np.random.default_rng(1)
    for _ in range(cases(300, of=2000)):
        tokens = rng.integers(0, int(rng.integers(1, 6)), int(rng.integers(1, 40)))
        max_length = int(rng.integers(1, 12))
        found = longest_repeat(tokens.astype(np.int32), max_length)
        assert found == longest_repeat_twin(tokens.tolist(), max_length)


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


def test_misuse_is_refused() -> None:
    drafter = PromptLookup()
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


def test_an_empty_prompt_is_drafted_nothing() -> None:
    assert len(draft_for(PromptLookup(), [], 4)) == 0
