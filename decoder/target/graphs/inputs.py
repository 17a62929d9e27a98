"""The inputs of passes of one shape, in tensors that stay where they are."""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from decoder.target.cache import num_seen
from decoder.target.passes import Masks
from retriever.drafter import TokenIds

Windows = Mapping[str, int | None]
"""Of each layer type, `None` where attention is full."""


class FixedInputs:
    """Tokens, positions, slots and masks of passes with a fixed number of rows and of keys.

    Rows that a pass does not need repeat its first one, in slots behind its own. That they see
    what it sees keeps them finite; nobody sees them.

    Args:
        num_rows: of every pass.
        num_keys: slots of the cache that every pass is shown.
        windows: of the model's layer types.
        dtype: the model's.
        device: the model's.

    Attributes:
        tokens: int64[1, rows].
        positions: int64[1, rows].
        slots: int64[rows], where the rows' keys and values go.
        masks: dtype[1, 1, rows, keys] for each layer type, zero where attention is allowed.
    """

    def __init__(
        self,
        num_rows: int,
        num_keys: int,
        windows: Windows,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._numbers = torch.zeros(3, num_rows, dtype=torch.int64, device=device)
        self.tokens, self.positions = self._numbers[:1], self._numbers[1:2]
        self.slots = self._numbers[2]
        self._windows = dict(windows)
        self.masks = {
            kind: torch.zeros(1, 1, num_rows, num_keys, dtype=dtype, device=device)
            for kind in windows
        }

    def begin(self, past: int) -> None:
        """Take in a pass of no meaning behind `past` tokens, for `fill` to write over."""
        self.fill(np.zeros(1, np.int32), np.full(1, past), None, past)

    def fill(self, tokens: TokenIds, positions: NDArray[np.int64], masks: Masks, past: int) -> None:
        """Take in one pass behind `past` tokens, see `Passes.read`.

        Without masks it has a single row, which sees all that lies in its window.
        """
        numbers = np.empty(self._numbers.shape, np.int64)
        width = len(tokens)
        numbers[0, :width], numbers[0, width:] = tokens, tokens[0]
        numbers[1, :width], numbers[1, width:] = positions, positions[0]
        numbers[2] = np.arange(past, past + numbers.shape[1])
        self._numbers.copy_(torch.from_numpy(numbers))
        for kind, mask in self.masks.items():
            given = masks[kind] if isinstance(masks, dict) else masks
            _lay(mask, given, width, past, num_seen(past, self._windows[kind]))


def _lay(mask: torch.Tensor, given: torch.Tensor | None, width: int, past: int, seen: int) -> None:
    """Write a mask over the last `seen` tokens and the rows themselves, and hide all else."""
    mask.fill_(torch.finfo(mask.dtype).min)
    shown = mask[:, :, :width, past - seen : past + width]
    if given is None:
        shown.zero_()
    else:
        shown.copy_(given)
    mask[:, :, width:] = mask[:, :, :1]
