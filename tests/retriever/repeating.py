"""Tokens that repeat earlier ones, and an index of them."""

from pathlib import Path

import numpy as np

from indexer.build import build_from_tokens
from indexer.reader import Vocabulary

NUM_TOKENS = 40


def text(rng: np.random.Generator, length: int) -> list[int]:
    """Return tokens that repeat earlier ones, with errors, as edits do."""
    tokens: list[int] = rng.integers(0, NUM_TOKENS, 24).tolist()
    while len(tokens) < length:
        begin = int(rng.integers(0, len(tokens) - 12))
        piece = tokens[begin : begin + int(rng.integers(3, 12))]
        tokens += piece if rng.random() < 0.7 else [*piece[:-1], int(rng.integers(NUM_TOKENS))]
    return tokens[:length]


def index_of_text(path: Path, rng: np.random.Generator) -> Path:
    """Build an index of four documents; return its path."""
    documents = [(str(number), text(rng, 300)) for number in range(4)]
    build_from_tokens(documents, path, Vocabulary(NUM_TOKENS, "ab" * 32))
    return path
