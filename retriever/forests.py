"""The draft trees of one message, checked and made together."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from retriever.tree import PROBABILITY_SLACK, DraftTree, Source
from retriever.v1 import retriever_pb2 as pb

_MAX_TOKEN_ID: Final = (1 << 31) - 1
_HIGHEST_SOURCE: Final = int(max(Source))
_UNSPECIFIED: Final = int(Source.UNSPECIFIED)


def are_trees(messages: Sequence[pb.DraftTree]) -> bool:
    """Tell whether each message is a tree by the rules of `DraftTree.checked`.

    Trees have a few dozen nodes: over so few, Python is done before numpy has begun.
    """
    return all(map(_is_tree, messages))


def make_trees(messages: Sequence[pb.DraftTree]) -> list[DraftTree]:
    """Return the trees of messages that `are_trees`; their arrays share memory.

    Sources that this version does not know are unspecified.
    """
    token_ids: list[int] = []
    parents: list[int] = []
    probabilities: list[float] = []
    sources: list[int] = []
    for message in messages:
        token_ids += message.token_ids
        parents += message.parents
        probabilities += message.probabilities
        sources += message.sources
    if sources and not 0 <= min(sources) <= max(sources) <= _HIGHEST_SOURCE:
        sources = [each if 0 <= each <= _HIGHEST_SOURCE else _UNSPECIFIED for each in sources]
    whole = DraftTree(
        np.array(token_ids, np.int32),
        np.array(parents, np.int32),
        np.array(probabilities, np.float32),
        np.array(sources, np.uint8),
    )
    begin, trees = 0, []
    for message in messages:
        part = slice(begin, begin := begin + len(message.token_ids))
        trees.append(
            DraftTree(
                whole.token_ids[part],
                whole.parents[part],
                whole.probabilities[part],
                whole.sources[part],
            )
        )
    return trees


def _is_tree(message: pb.DraftTree) -> bool:
    size = len(message.token_ids)
    if not size == len(message.parents) == len(message.probabilities) == len(message.sources):
        return False
    most = 1.0
    children = set()
    nodes = zip(message.token_ids, message.parents, message.probabilities, strict=True)
    for node, (token, parent, probability) in enumerate(nodes):
        if not (-1 <= parent < node and 0 <= probability <= most + PROBABILITY_SLACK):
            return False
        if token > _MAX_TOKEN_ID:
            return False
        most = probability
        children.add((parent, token))
    return len(children) == size
