"""The draft trees of one message, checked and made together."""

from collections.abc import Sequence
from itertools import pairwise
from operator import ge, lt
from typing import Final

import numpy as np

from retriever.tree import DraftTree, Source
from retriever.v1 import retriever_pb2 as pb

_MAX_TOKEN_ID: Final = (1 << 31) - 1
_HIGHEST_SOURCE: Final = int(max(Source))
_UNSPECIFIED: Final = int(Source.UNSPECIFIED)


def clear_trees(messages: Sequence[pb.DraftTree]) -> list[DraftTree] | None:
    """Return the trees of messages, None where it is not clear that each is one.

    What is clear is a tree by the rules of `DraftTree.checked`; where probabilities rise by a
    rounding, or anything is wrong, that has to decide. The arrays of the trees share memory, and
    sources that this version does not know are unspecified.

    Trees have a few dozen nodes: over so few, Python is done before numpy has begun.
    """
    token_ids: list[int] = []
    parents: list[int] = []
    probabilities: list[float] = []
    sources: list[int] = []
    ends = [0]
    for message in messages:
        tokens, above, falling = message.token_ids[:], message.parents[:], message.probabilities[:]
        if len(message.sources) != len(tokens) or not _is_clear(tokens, above, falling):
            return None
        token_ids += tokens
        parents += above
        probabilities += falling
        sources += message.sources
        ends.append(len(token_ids))
    if sources and not 0 <= min(sources) <= max(sources) <= _HIGHEST_SOURCE:
        sources = [each if 0 <= each <= _HIGHEST_SOURCE else _UNSPECIFIED for each in sources]
    whole = DraftTree(
        np.array(token_ids, np.int32),
        np.array(parents, np.int32),
        np.array(probabilities, np.float32),
        np.array(sources, np.uint8),
    )
    return [whole] if len(messages) == 1 else _divided(whole, ends)


def _is_clear(token_ids: list[int], parents: list[int], probabilities: list[float]) -> bool:
    size = len(token_ids)
    if not size == len(parents) == len(probabilities):
        return False
    return not size or (
        min(parents) >= -1
        and all(map(lt, parents, range(size)))
        and max(token_ids) <= _MAX_TOKEN_ID
        and probabilities[0] <= 1
        and all(map(ge, probabilities, probabilities[1:]))
        and probabilities[-1] >= 0
        and len(set(zip(parents, token_ids, strict=True))) == size
    )


def _divided(whole: DraftTree, ends: Sequence[int]) -> list[DraftTree]:
    return [
        DraftTree(
            whole.token_ids[begin:end],
            whole.parents[begin:end],
            whole.probabilities[begin:end],
            whole.sources[begin:end],
        )
        for begin, end in pairwise(ends)
    ]
