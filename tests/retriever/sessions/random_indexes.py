"""Indexes of random documents, and whether a drafter knows one of these."""

from pathlib import Path

import numpy as np

from indexer.build import build_from_tokens
from indexer.reader import Vocabulary
from retriever.sessions.embedded import EmbeddedDrafter

VOCABULARY = Vocabulary(1000, "ab" * 32)
NUM_DOCUMENTS, LENGTH = 120, 600
"""Some 72,000 tokens: their files are larger than what is read instead of mapped."""


def document(seed: int, number: int) -> np.ndarray:
    return np.random.default_rng([seed, number]).integers(1, VOCABULARY.size, LENGTH)


def build(path: Path, seed: int = 1) -> Path:
    documents = ((f"{seed}/{i}", document(seed, i)) for i in range(NUM_DOCUMENTS))
    build_from_tokens(documents, path, VOCABULARY)
    return path


def is_known(drafter: EmbeddedDrafter, seed: int, number: int = 7) -> bool:
    tokens = document(seed, number)
    return len(drafter.draft_context(tokens[:12], 16).follow(tokens[12:].astype(np.int32))) > 3
