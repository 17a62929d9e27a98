"""A pass's logits after processors, each row with the path that led to it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessor

from decoder.sampling.constraint import Constraint, ConstraintMemory, masked
from decoder.sampling.processors import (
    Warping,
    applied,
    count_penalties_of,
    penalties_of,
)
from decoder.sampling.settings import SamplingSettings
from decoder.sampling.verification import Place
from retriever.tree import ROOT, DraftTree


class Processing:
    """What happens to the target's logits before a token is chosen.

    The order is transformers': repetition penalty, frequency and presence penalty, the caller's
    processors, the constraint, then temperature, top-k, top-p and min-p.

    Args:
        settings: which penalties and which of sampling's processors there are.
        processors: more of them; each a function of its arguments, without memory.
        constraint: which tokens may be chosen.
    """

    def __init__(
        self,
        settings: SamplingSettings,
        processors: Sequence[LogitsProcessor],
        constraint: Constraint[Any] | None,
    ) -> None:
        self._penalties = penalties_of(settings)
        self._count_penalties = count_penalties_of(settings)
        self._processors = processors
        self.after_constraint = Warping(settings)
        self.memory = None if constraint is None else ConstraintMemory(constraint)
        self.looks_at_tokens = bool(self._penalties or self._count_penalties or processors)

    @property
    def is_empty(self) -> bool:
        """Whether logits stay as they are."""
        return self.memory is None and not self.all_processors

    @property
    def all_processors(self) -> list[LogitsProcessor]:
        """What is applied, but for the constraint."""
        return [
            *self._penalties,
            *self._count_penalties,
            *self._processors,
            *self.after_constraint.processors,
        ]

    def before_constraint(
        self, tokens: torch.Tensor, scores: torch.Tensor, num_prompt_tokens: int
    ) -> torch.Tensor:
        """Apply what looks at tokens.

        Args:
            tokens: int64[rows, n], what precedes each row.
            scores: float32[rows, vocabulary]; may be written to.
            num_prompt_tokens: how many of the tokens are the prompt's.
        """
        scores = applied(self._penalties, tokens, scores)
        scores = applied(self._count_penalties, tokens[:, num_prompt_tokens:], scores)
        return applied(self._processors, tokens, scores)


class PathScores:
    """One pass's processed logits, made row by row or level by level when they are asked for.

    Args:
        processing: what is done to them.
        tree: N nodes.
        logits: [1 + N, vocabulary], the target's; they stay as they are.
        place: where the tree's first tokens stand.
    """

    def __init__(
        self, processing: Processing, tree: DraftTree, logits: torch.Tensor, place: Place
    ) -> None:
        self._processing = processing
        self._tree = tree
        self._logits = logits
        self._place = place
        self._committed: torch.Tensor | None = None
        self._states: dict[int, Any] = {}

    def one(self, row: int) -> torch.Tensor:
        """Return float32[1, vocabulary], the logits after the last token (0) or node row - 1.

        Where there is a constraint, the row of the node's parent was asked for before.
        """
        scores = self._copied(slice(row, row + 1))
        if self._processing.looks_at_tokens:
            scores = self._processing.before_constraint(
                self._paths([row]), scores, self._place.num_prompt_tokens
            )
        if self._processing.memory is not None:
            allowed = self._processing.memory.constraint.allowed(self._state(row))
            scores = masked(scores, allowed)
        return self._processing.after_constraint(scores)

    def all(self) -> torch.Tensor:
        """Return float32[1 + N, vocabulary]; not for constraints, whose states are few."""
        scores = self._copied(slice(None))
        if self._processing.looks_at_tokens:
            depths = np.concatenate(([0], self._tree.depths()))
            for depth in range(int(depths.max()) + 1):
                rows = np.flatnonzero(depths == depth)
                scores[rows] = self._processing.before_constraint(
                    self._paths(rows.tolist()), scores[rows], self._place.num_prompt_tokens
                )
        return self._processing.after_constraint(scores)

    def _copied(self, rows: slice) -> torch.Tensor:
        return self._logits[rows].to(torch.float32, copy=True)

    def _paths(self, rows: Sequence[int]) -> torch.Tensor:
        """Return int64[rows, n], all tokens before each of some rows of equal depth."""
        if self._committed is None:
            tokens = torch.from_numpy(self._place.tokens.astype(np.int64))
            self._committed = tokens.to(self._logits.device)
        paths = [self._tree.token_ids[self._tree.path_to(row - 1)] for row in rows]
        ends = torch.from_numpy(np.stack(paths).astype(np.int64)).to(self._logits.device)
        return torch.cat([self._committed.expand(len(rows), -1), ends], dim=1)

    def _state(self, row: int) -> Any:
        memory = self._processing.memory
        if memory is None:
            return None
        if row == ROOT + 1:
            state = memory.state(self._place)
        else:
            node = row - 1
            before = self._states[int(self._tree.parents[node]) + 1]
            state = memory.constraint.advance(before, int(self._tree.token_ids[node]))
        self._states[row] = state
        return state
