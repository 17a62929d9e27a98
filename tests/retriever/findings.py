"""Findings that are told from one another, and what is kept of them."""

import numpy as np

from retriever.drafter import NUM_FOUND, Findings, FindingsStore

MODEL, OTHER = "ab" * 32, "cd" * 32


def findings(first: int, count: int = 5, seed: int = 0) -> Findings:
    """Return findings of the contexts `2 * first + 1` and on, as odd as real ones."""
    rng = np.random.default_rng(seed)
    return Findings(
        2 * np.arange(first, first + count, dtype=np.int64) + 1,
        rng.integers(0, 50, (count, NUM_FOUND), np.int32),
        rng.normal(0, 3, (count, NUM_FOUND)).clip(-7, 7).astype(np.float32),
    )


def rows(found: Findings) -> dict[int, tuple[list[int], list[float]]]:
    """Return what is said of each context; the last counts."""
    parts = (found.contexts.tolist(), found.tokens.tolist(), found.log_odds.tolist())
    return {context: (tokens, odds) for context, tokens, odds in zip(*parts, strict=True)}


def all_of(store: FindingsStore, model: str = MODEL) -> Findings:
    """Fetch every page; the oldest stand first."""
    pages, before = [], 0
    while True:
        page = store.fetch_findings(model, before)
        pages.append(page.findings)
        before = page.before
        if not before:
            return Findings.joined(pages[::-1])
