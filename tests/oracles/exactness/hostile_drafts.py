"""Drafts that are right, wrong, random, doubled or far too many, for a known continuation."""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from retriever.drafter import DEFAULT, DraftRequest, SequenceOptions, TokenIds
from retriever.tree import ROOT, DraftTree, Source
from tests.oracles.exactness.tiny_models import FIRST_FREE, VOCABULARY

_DEPTH: Final = 6
_MANY: Final = 200

Edge = tuple[int, int]
"""Parent and token of a node."""


def _tree(edges: Sequence[Edge]) -> DraftTree:
    """Return a tree that is not checked: siblings may carry one token."""
    return DraftTree(
        np.array([token for _, token in edges], np.int32),
        np.array([parent for parent, _ in edges], np.int32),
        np.linspace(0.9, 0.1, len(edges), dtype=np.float32),
        np.full(len(edges), Source.MODEL, np.uint8),
    )


def right_chain(tokens: list[int]) -> DraftTree:
    """Return a draft of these tokens, one after the other."""
    return _tree([(at - 1, token) for at, token in enumerate(tokens)])


def _other(token: int, by: int) -> int:
    """Return another token."""
    return FIRST_FREE + (token - FIRST_FREE + by) % (VOCABULARY - FIRST_FREE)


def right(truth: list[int], _: np.random.Generator) -> list[Edge]:
    """Draft what comes, behind a wrong branch at every depth: its rows move when it is kept."""
    edges: list[Edge] = []
    last = ROOT
    for token in truth[:_DEPTH]:
        edges += [(last, _other(token, 1)), (last, token)]
        last = len(edges) - 1
    return edges


def wrong(truth: list[int], _: np.random.Generator) -> list[Edge]:
    """Draft all that comes two tokens late, and what never comes."""
    edges: list[Edge] = []
    for by in (1, 2, 3):
        parent = ROOT
        for token in truth[:_DEPTH]:
            edges.append((parent, _other(token, by)))
            parent = len(edges) - 1
    return edges


def at_random(_: list[int], rng: np.random.Generator) -> list[Edge]:
    """Draft any tree of two dozen tokens."""
    edges: list[Edge] = []
    while len(edges) < 4 * _DEPTH:
        edge = int(rng.integers(-1, len(edges))), int(rng.integers(FIRST_FREE, VOCABULARY))
        if edge not in edges:
            edges.append(edge)
    return edges


def doubled(truth: list[int], _: np.random.Generator) -> list[Edge]:
    """Draft every right token twice under each of the two before it."""
    edges: list[Edge] = []
    parents = [ROOT, ROOT]
    for token in truth[: _DEPTH // 2]:
        start = len(edges)
        edges += [(parent, token) for parent in dict.fromkeys(parents) for _ in range(2)]
        parents = list(range(start, len(edges)))[:2]
    return edges


def many(truth: list[int], rng: np.random.Generator) -> list[Edge]:
    """Draft two hundred tokens, the right ones among them."""
    edges: list[Edge] = []
    right_nodes = [ROOT]
    while len(edges) < _MANY:
        depth = len(right_nodes) - 1
        parent = int(rng.integers(-1, len(edges)))
        edge = parent, int(rng.integers(FIRST_FREE, VOCABULARY))
        if depth < len(truth) and rng.random() < len(right_nodes) / _DEPTH / 2:
            edge = right_nodes[-1], truth[depth]
        if edge in edges:
            continue
        edges.append(edge)
        if depth < len(truth) and edge == (right_nodes[-1], truth[depth]):
            right_nodes.append(len(edges) - 1)
    return edges


Guess = Callable[[list[int], np.random.Generator], list[Edge]]

HOSTILE: Final[dict[str, Guess]] = {
    "right": right,
    "wrong": wrong,
    "random": at_random,
    "doubled": doubled,
    "many": many,
}


class Foreteller:
    """A drafter of one sequence whose end it knows.

    Args:
        truth: prompt and output.
        guess: makes a draft of what is left of it.
    """

    def __init__(self, truth: list[int], guess: Guess) -> None:
        self._truth, self._guess = truth, guess
        self._rng = np.random.default_rng(0)
        self._length = 0

    def open(self, session: str, prompt: TokenIds, options: SequenceOptions = DEFAULT) -> None:  # noqa: ARG002  it has no sessions
        """See `Drafter`."""
        self._length = len(prompt)

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """See `Drafter`."""
        return [
            _tree(self._guess(self._truth[request.length :], self._rng)) for request in requests
        ]

    def close(self, session: str, new_tokens: TokenIds | None = None) -> None:
        """See `Drafter`."""
