"""Where a sequence ends by the stopping criteria of transformers."""

from collections.abc import Sequence

import torch
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteriaList,
)

from decoder.stopping import StopRule


class Ending:
    """Stopping criteria as a decoder takes them.

    Lengths and stop tokens, which nearly every call has, become those of the decoder; only
    others are asked after every token.

    Args:
        criteria: of one call; one of them states a length, as `model.generate` sees to.
        input_ids: int64[1, n], the prompt.

    Attributes:
        max_new_tokens: most tokens to generate.
        stop_ids: tokens that end the sequence.
        rule: the other criteria, if there are any.
    """

    def __init__(self, criteria: StoppingCriteriaList, input_ids: torch.Tensor) -> None:
        lengths = [c.max_length for c in criteria if type(c) is MaxLengthCriteria]
        stops = [c.eos_token_id for c in criteria if type(c) is EosTokenCriteria]
        others = [c for c in criteria if type(c) not in {MaxLengthCriteria, EosTokenCriteria}]
        self.max_new_tokens = min(lengths) - input_ids.shape[1]
        self.stop_ids: set[int] = {token for ids in stops for token in ids.tolist()}
        self.rule: StopRule | None = None
        if others:
            self.rule = CriteriaRule(StoppingCriteriaList(others), input_ids)


class CriteriaRule:
    """Asks criteria after every token, as `model.generate` does: a `StopRule`.

    Args:
        criteria: whatever their memory, they see each token once.
        input_ids: int64[1, n], the prompt.
    """

    def __init__(self, criteria: StoppingCriteriaList, input_ids: torch.Tensor) -> None:
        self._criteria = criteria
        self._ids = input_ids

    def num_kept(self, tokens: Sequence[int]) -> int | None:
        """Add tokens up to the first with which a criterion is met; see `StopRule`."""
        for count, token in enumerate(tokens, 1):
            self._ids = torch.cat([self._ids, self._ids.new_tensor([[token]])], dim=-1)
            met: torch.Tensor = self._criteria(self._ids, None)
            if met.any():
                return count
        return None
