"""The accept rule of one call of `model.generate`."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LogitsProcessorList

from decoder.sampling.verification import (
    Acceptance,
    AcceptRule,
    Place,
    accept_greedy,
    draw,
    uniforms,
)
from retriever.tree import ROOT, DraftTree


def rule_of(processors: LogitsProcessorList, *, do_sample: bool) -> AcceptRule:
    """Return the rule by which `model.generate` itself would choose tokens.

    Args:
        processors: of the call, its warpers included.
        do_sample: whether to draw; the seed is drawn from torch's own generator.
    """
    if not do_sample and not processors:
        return accept_greedy
    return ProcessedRule(processors, int(torch.randint(2**63 - 1, ())) if do_sample else None)


@dataclass(frozen=True, slots=True, eq=False)
class ProcessedRule:
    """Follows the target's choices after processors, which see the tokens of the path so far.

    Attributes:
        processors: functions of tokens and logits; they are applied as far as the path goes.
        seed: of the random numbers; `None` takes the most probable token.
    """

    processors: LogitsProcessorList
    seed: int | None

    def __call__(self, tree: DraftTree, logits: torch.Tensor, place: Place) -> Acceptance:
        """Accept the path that the choices follow."""
        edges = zip(tree.parents.tolist(), tree.token_ids.tolist(), strict=True)
        children = {edge: node for node, edge in enumerate(edges)}
        numbers = None if self.seed is None else uniforms(self.seed, place, len(tree) + 1)
        tokens: Any = torch.from_numpy(place.tokens.astype(np.int64))[None].to(logits.device)
        path: list[int] = []
        node: int | None = ROOT
        while node is not None:
            scores = logits[node + 1][None].to(torch.float32, copy=True)
            chosen = _choice(self.processors(tokens, scores), numbers, len(path))
            tokens = torch.cat([tokens, tokens.new_tensor([[chosen]])], dim=-1)
            node = children.get((node, chosen))
            path += [] if node is None else [node]
        return np.array(path, np.int64), chosen


def _choice(scores: torch.Tensor, numbers: NDArray[np.float64] | None, depth: int) -> int:
    if numbers is None:
        return int(scores.argmax())
    point = torch.from_numpy(numbers[depth : depth + 1])
    return int(draw(torch.softmax(scores, dim=-1), point))
