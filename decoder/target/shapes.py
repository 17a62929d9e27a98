"""How a draft is cut to what a target can verify."""

from logging import getLogger
from typing import Final
from weakref import WeakSet

import numpy as np
from transformers import PreTrainedModel

from decoder.drafters.sampled import SampledTree
from decoder.target.compatibility import Capability
from retriever.tree import ROOT, DraftTree

_log = getLogger(__name__)
_told: Final[WeakSet[PreTrainedModel]] = WeakSet()

_MEANING: Final = {
    Capability.CHAINS: "verifies one chain of each draft",
    Capability.PLAIN: "is decoded without drafts",
}


def tell_once(model: PreTrainedModel, capability: Capability, reason: str) -> None:
    """Log that a model cannot verify trees, once for each model."""
    if capability in _MEANING and model not in _told:
        _told.add(model)
        _log.warning("%s %s: %s", type(model).__name__, _MEANING[capability], reason)


def chain_of(tree: DraftTree) -> DraftTree:
    """Return one path of a tree, from the root downwards.

    Of a tree that names its tokens it is the path with the most tokens to be accepted. Nodes that
    were drawn must not be chosen by what was drawn, or else they are no longer distributed as
    their drafter says: there it is the path of first children.
    """
    if not isinstance(tree, SampledTree):
        return tree.best_chain(len(tree))
    kept = np.zeros(len(tree), np.bool_)
    last = ROOT
    for node, parent in enumerate(tree.parents.tolist()):
        if parent == last:
            kept[node] = True
            last = node
    return tree.among(kept)
