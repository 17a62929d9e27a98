"""A draft model's cache of one sequence, with the branches that it expanded behind it."""

import numpy as np
import torch

from decoder.drafters.draft_model import DraftModel
from decoder.target.layout import TreeLayout
from retriever.drafter import TokenIds
from retriever.tree import ROOT


class BranchCache:
    """Keeps in step with one sequence: what was drafted and came true is not read again.

    Args:
        model: whose keys and values these are.
    """

    def __init__(self, model: DraftModel) -> None:
        self._model = model
        self._cache = model.new_cache()
        self._length = 0
        self._drop_branches()

    @torch.inference_mode()
    def catch_up(self, tokens: TokenIds) -> torch.Tensor:
        """Read what is new of the sequence.

        Branches that it followed stay, all others go.

        Args:
            tokens: int32[n], the whole sequence, at least one token; it begins with what was
                given the last time.

        Returns:
            [1, C], the logits after its last token.
        """
        kept = self._followed(tokens[self._length : -1])
        self._keep(kept, min(self._length, len(tokens) - 1))
        logits = self._model.read(self._cache, tokens[self._length :], self._length)
        self._length = len(tokens)
        return logits

    def expand(self, tokens: list[int], parents: list[int]) -> torch.Tensor:
        """Read nodes behind the sequence in one pass.

        Args:
            tokens: of n nodes.
            parents: their parents, numbered in the order in which they were read since the last
                `catch_up`, or `ROOT`.

        Returns:
            [n, C], the logits after each node.
        """
        layout = self._extended(parents)
        ids = np.array(tokens, np.int32)
        logits = self._model.expand(self._cache, ids, layout, self._length)
        self._layout = layout
        self._parents.extend(parents)
        self._tokens.extend(tokens)
        return logits

    def _drop_branches(self) -> None:
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._layout = TreeLayout(np.zeros((0, 0), np.bool_), np.zeros(0, np.int64))

    def _followed(self, tokens: TokenIds) -> list[int]:
        """Return the rows of the branch that tokens behind the sequence went along."""
        rows = {edge: row for row, edge in enumerate(zip(self._parents, self._tokens, strict=True))}
        path: list[int] = []
        row = ROOT
        for token in tokens.tolist():
            found = rows.get((row, token))
            if found is None:
                break
            path.append(row := found)
        return path

    def _keep(self, path: list[int], length: int) -> None:
        """Keep the first `length` tokens, and behind them the rows of a path."""
        if path:
            device = self._cache.growing_layers[0].device
            self._cache.keep(length, torch.tensor(path, device=device) + length)
        else:
            self._cache.truncate(length)
        self._length = length + len(path)
        self._drop_branches()

    def _extended(self, parents: list[int]) -> TreeLayout:
        """Return the layout of all rows, those of new nodes last."""
        before, after = len(self._parents), len(self._parents) + len(parents)
        visible = np.eye(after, dtype=np.bool_)
        visible[:before, :before] = self._layout.visible
        for row, parent in enumerate(parents, start=before):
            if parent != ROOT:
                visible[row] |= visible[parent]
        return TreeLayout(visible, visible.sum(axis=1) - 1)
