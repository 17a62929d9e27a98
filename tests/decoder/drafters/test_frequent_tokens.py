"""Frequent tokens are those that indexes count most often."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from decoder.drafters.draft_model import frequent_tokens
from indexer.build import build_from_tokens
from indexer.reader import Index, Vocabulary
from retriever.errors import InvalidRequestError


@pytest.fixture
def vocabulary() -> Vocabulary:
    return Vocabulary(50, "ab" * 32)


def test_tokens_are_ranked_over_all_indexes(tmp_path: Path, vocabulary: Vocabulary) -> None:
    rng = np.random.default_rng(0)
    occurrences: Counter[int] = Counter()
    indexes = []
    for number in range(2):
        tokens = (rng.geometric(0.3, 120) + 5 * number).clip(max=45).tolist()
        occurrences.update(tokens)
        path = tmp_path / str(number)
        build_from_tokens([("a", tokens)], path, vocabulary)
        indexes.append(Index.open(path))
    ranked = sorted(occurrences, key=lambda token: (-occurrences[token], token))
    for size in (1, 3, 6):
        found = frequent_tokens(indexes, size)
        assert found.dtype == np.int32
        # Counts above 16 are rounded, so that neighbours in rank may change places.
        least = 0.85 * occurrences[ranked[size - 1]]
        assert all(occurrences[token] >= least for token in found.tolist())
        assert len(found) == size
    assert set(frequent_tokens(indexes, 1000).tolist()) == set(occurrences)
    assert len(frequent_tokens([], 5)) == 0


def test_indexes_of_several_vocabularies_are_refused(
    tmp_path: Path, vocabulary: Vocabulary
) -> None:
    indexes = []
    for number, each in enumerate((vocabulary, Vocabulary(60, "cd" * 32))):
        build_from_tokens([("a", [1, 2])], tmp_path / str(number), each)
        indexes.append(Index.open(tmp_path / str(number)))
    with pytest.raises(InvalidRequestError, match="another tokenizer"):
        frequent_tokens(indexes, 5)
