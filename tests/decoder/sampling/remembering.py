"""A logits processor that shows where it was called once too often, or with other tokens."""

import torch
from transformers import LogitsProcessor

from tests.decoder.decoding import VOCABULARY


class Remembering(LogitsProcessor):
    """Prefers tokens by how often it was called and by the sum of all that it was shown.

    Attributes:
        seen: the tokens of every row that it was shown.
    """

    def __init__(self) -> None:
        self.seen: list[list[int]] = []
        self._sum = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        rows = input_ids.cpu().tolist()
        self.seen += rows
        self._sum += sum(map(sum, rows))
        preferred = [(self._sum + 7 * len(self.seen) + step) % VOCABULARY for step in (0, 5, 11)]
        change = torch.zeros(VOCABULARY)
        change[preferred] = 3.0
        return scores + change.to(scores.device)
