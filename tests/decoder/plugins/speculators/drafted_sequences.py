"""A target that decodes whatever a test says, and a head that reads along."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from decoder.drafters.following import Verified
from decoder.drafters.readers import SequenceReader, TreeReader
from decoder.model.states import FINAL
from decoder.model.target import Target
from retriever.sequences import TokenSequence
from retriever.tree import ROOT, DraftTree
from tests.decoder.decoding import VOCABULARY, random_tree
from tests.decoder.plugins.speculators.published_heads import SIZE, Published, TargetParts
from tests.decoder.rounding import OPERATIONS_OF_A_LAYER, Rounding


def parts_of(model: PreTrainedModel, tokens: list[int]) -> TargetParts:
    """Return the states of a fresh pass of transformers over all tokens but the last."""
    loaded: Any = model
    with torch.inference_mode():
        output = loaded.model(torch.tensor([tokens[:-1]]), output_hidden_states=True)
    hidden = [each[0].clone() for each in output.hidden_states]
    # transformers gives the last one behind the norm, and the others as layers take them.
    states = dict(enumerate(hidden[:-1])) | {FINAL: output.last_hidden_state[0].clone()}
    return TargetParts(
        loaded.model.embed_tokens.weight.detach(), loaded.lm_head.weight.detach(), states
    )


def rounding_of(made: Published, model: PreTrainedModel, depth: int) -> Rounding:
    """Return what rounds on the way to a head's logits: the target's layers, then, depth by depth,
    its own. The widest sums are over the states of three layers.
    """
    layer = made.config.get("transformer_layer_config") or made.config
    at_each = OPERATIONS_OF_A_LAYER * layer.get("num_hidden_layers", 1) + 3
    behind = Rounding.of(model)
    return Rounding(
        behind.dtype, max(behind.width, 3 * SIZE), behind.operations + at_each * (1 + depth)
    )


@dataclass
class ReadTree:
    """A tree that was read: the logits after the last token and after each node."""

    tree: DraftTree
    root: torch.Tensor
    nodes: torch.Tensor

    def path_to(self, node: int) -> list[int]:
        path: list[int] = []
        while node != ROOT:
            path.append(node)
            node = int(self.tree.parents[node])
        return path[::-1]


class Reading:
    """A sequence of which a target verifies random trees, and a head reads them.

    Which path is accepted is drawn, so that states of all kinds of passes come.
    """

    def __init__(
        self, reader: TreeReader, model: PreTrainedModel, prompt: list[int], seed: int = 0
    ) -> None:
        self._rng = np.random.default_rng(seed)
        self.target = Target(model, states=reader.states)
        self.sequence = TokenSequence(np.array(prompt, np.int32))
        self.reader: SequenceReader = reader.follow(self.sequence)
        self._max_depth = reader.max_depth
        logits = self.target.prefill(self.sequence.tokens)
        self._learn(DraftTree.empty(), logits, np.zeros(0, np.int64))

    @property
    def tokens(self) -> list[int]:
        tokens: list[int] = self.sequence.tokens.tolist()
        return tokens

    def draft(self, num_nodes: int = 12) -> ReadTree:
        """Have the head read a random tree, depth by depth in batches."""
        root = self.reader.begin()
        assert root is not None
        tree = random_tree(self._rng, num_nodes)
        if self._max_depth is not None:
            tree = tree.among(tree.depths() <= self._max_depth)
        nodes = torch.zeros(len(tree), root.shape[1])
        order: dict[int, int] = {ROOT: ROOT}
        for batch in _batches(tree, self._rng):
            parents = [order[int(tree.parents[node])] for node in batch]
            nodes[batch] = self.reader.read(tree.token_ids[batch].tolist(), parents).float()
            for node in batch:
                order[node] = len(order) - 1
        return ReadTree(tree, root[0].float(), nodes)

    def verify(self, num_nodes: int = 12, *, is_shown: bool = True) -> None:
        """Have the target verify a random tree and accept a path of it."""
        tree = random_tree(self._rng, num_nodes)
        logits = self.target.verify(self.tokens[-1], tree)
        path, node = [], int(self._rng.integers(-1, len(tree)))
        while node != ROOT:
            path.append(node)
            node = int(tree.parents[node])
        accepted = np.array(path[::-1], np.int64)
        self.target.commit(accepted)
        self._learn(tree, logits, accepted, is_shown=is_shown)

    def _learn(
        self, tree: DraftTree, logits: torch.Tensor, path: Any, *, is_shown: bool = True
    ) -> None:
        next_token = int(self._rng.integers(0, VOCABULARY))
        last = self.tokens[-1]
        if is_shown:
            self.reader.learn(Verified(last, tree, logits, path, next_token, self.target.states))
        came = [*tree.token_ids[path].tolist(), next_token]
        self.sequence.extend(np.array(came, np.int32))


def _batches(tree: DraftTree, rng: np.random.Generator) -> Iterator[list[int]]:
    """Split nodes into batches of which none holds a node and its parent."""
    waiting = list(range(len(tree)))
    done = {ROOT}
    while waiting:
        ready = [node for node in waiting if int(tree.parents[node]) in done]
        batch = ready[: int(rng.integers(1, len(ready) + 1))]
        yield batch
        done.update(batch)
        waiting = [node for node in waiting if node not in done]
