"""Asking a drafter once, and reading what it answers."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from indexer.build import BuildOptions, build_from_tokens
from indexer.reader import Index, Vocabulary
from retriever.drafter import FORGOTTEN, Drafter, DraftRequest
from retriever.tree import DraftTree

IndexMaker = Callable[..., Index]


def index_maker(path: Path) -> IndexMaker:
    """Makes an index of lists of token ids, at one place."""

    def make(*documents: list[int]) -> Index:
        named = [(f"document-{i}", document) for i, document in enumerate(documents)]
        options = BuildOptions(keep_duplicates=True)
        build_from_tokens(named, path, Vocabulary(50, "ab" * 32), options)
        return Index.open(path)

    return make


def ids(*tokens: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(tokens, np.int32)


def draft_for(drafter: Drafter, context: list[int], budget: int) -> DraftTree:
    """The draft of a sequence that begins with the context."""
    drafter.open("asked once", ids(*context), FORGOTTEN)
    request = DraftRequest("asked once", ids(), len(context), budget)
    tree = drafter.draft([request])[0]
    drafter.close("asked once")
    return tree


def paths(tree: DraftTree) -> list[tuple[int, ...]]:
    """Every node as the tokens that lead to it, in the tree's order."""
    return [tuple(tree.token_ids[tree.path_to(node)].tolist()) for node in range(len(tree))]
