"""Segments with keys of their suffixes and without find the same."""

from pathlib import Path

import numpy as np
import pytest

from indexer.build import BuildOptions, build_from_tokens
from indexer.change.verifying import verify_index
from indexer.reader import Index, Vocabulary
from retriever.drafter import DraftRequest
from retriever.sessions.embedded import EmbeddedDrafter
from tests.retriever.repeating import text

SESSIONS = 8


def built(path: Path, vocabulary_size: int) -> Path:
    """Build an index of two segments, in which few tokens occur often."""
    rng = np.random.default_rng(1)
    documents = [
        (str(number), [token % 7 for token in text(rng, 2000)] + text(rng, 1000))
        for number in range(4)
    ]
    options = BuildOptions(segment_tokens=7000)
    build_from_tokens(documents, path, Vocabulary(vocabulary_size, "ab" * 32), options)
    return path


def drafted(path: Path, threads: int) -> list[tuple[list[int], list[float], list[int]]]:
    """Draft for sequences of several steps together; return all trees."""
    rng = np.random.default_rng(2)
    drafter = EmbeddedDrafter.open_indexes([path], threads=threads)
    texts = []
    for number in range(SESSIONS):
        tokens = np.array(text(rng, 200), np.int32)
        texts.append(tokens % 7 if number % 2 else tokens)
        drafter.open(str(number), texts[-1][:20])
    trees = []
    for end in range(20, 200, 9):
        begin = max(20, end - 9)
        requests = [
            DraftRequest(str(number), each[begin:end], end, 24) for number, each in enumerate(texts)
        ]
        trees += [
            (tree.token_ids.tolist(), tree.probabilities.tolist(), tree.sources.tolist())
            for tree in drafter.draft(requests)
        ]
    return trees


@pytest.mark.parametrize("vocabulary_size", [40, 70_000])  # a key tells ten tokens, or three
def test_drafts_are_the_same_with_keys_and_without(
    vocabulary_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = built(tmp_path / "plain", vocabulary_size)
    monkeypatch.setattr("indexer.stages.segments.MIN_KEYED_SUFFIXES", 1)
    keyed = built(tmp_path / "keyed", vocabulary_size)
    for path, has_keys in ((plain, False), (keyed, True)):
        with Index.open(path) as index:
            assert [len(each.keys) > 100 for each in index.segments] == [has_keys] * 2
        assert verify_index(path).findings == ()
    expected = drafted(plain, 1)
    assert drafted(keyed, 1) == expected
    assert drafted(keyed, 2) == expected
    assert max(len(tokens) for tokens, _, _ in expected) == 24
