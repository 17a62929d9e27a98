"""A key-value cache for trees: it grows in place and keeps any path of what it took last."""

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

_MIN_CAPACITY = 256
_ANY_STATE = 0.01  # pages that were never written to are all one page, and quicker to read


class GrowingLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # not typed there
    """One layer's keys and values, in buffers that double when full.

    Appending costs the new tokens, not the context, and so does keeping a path. Sliding
    layers use it too: their window is the mask's doing, and nothing that a rejected draft
    pushed out of a window is lost.

    Attributes:
        keys: [batch, heads, length, head size], a view of the buffer.
        values: the same for the values.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # nor is this
        self._length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take shapes, dtype and device from the first states."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self._key_buffer = key_states[..., :0, :]
        self._value_buffer = value_states[..., :0, :]
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append states and return all of them, [batch, heads, length, head size]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, end = self._length, self._length + key_states.shape[-2]
        self._reserve(end)
        self._key_buffer[..., start:end, :] = key_states
        self._value_buffer[..., start:end, :] = value_states
        self.truncate(end)
        return self._key_buffer[..., :end, :], self._value_buffer[..., :end, :]

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens."""
        self._length = length
        if self.is_initialized:
            self.keys = self._key_buffer[..., :length, :]
            self.values = self._value_buffer[..., :length, :]

    def keep(self, start: int, slots: torch.Tensor) -> None:
        """Move the tokens in `slots`, int64[n] at or past `start`, to `start`; drop the rest."""
        end = start + len(slots)
        for buffer in (self._key_buffer, self._value_buffer):
            buffer[..., start:end, :] = buffer.index_select(-2, slots)
        self.truncate(end)

    @torch.inference_mode()
    def pretend(self, length: int) -> None:
        """Hold `length` tokens with states of no meaning."""
        self._reserve(length)
        for buffer in (self._key_buffer, self._value_buffer):
            buffer[..., :length, :] = _ANY_STATE
        self.truncate(length)

    def reset(self) -> None:
        """Forget all tokens; the buffers stay for the next sequence."""
        self.truncate(0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys a query of this length sees, and the first one's slot."""
        return self._length + query_length, 0

    def get_seq_length(self) -> int:
        """Return the number of tokens held."""
        return self._length

    def get_max_length(self) -> int:
        """Return -1: there is no maximum."""
        return -1

    def _reserve(self, length: int) -> None:
        if length <= self._key_buffer.shape[-2]:
            return
        capacity = max(2 * length, _MIN_CAPACITY)
        self._key_buffer = self._grown(self._key_buffer, capacity)
        self._value_buffer = self._grown(self._value_buffer, capacity)

    def _grown(self, buffer: torch.Tensor, capacity: int) -> torch.Tensor:
        grown = buffer.new_zeros((*buffer.shape[:-2], capacity, buffer.shape[-1]))
        grown[..., : self._length, :] = buffer[..., : self._length, :]
        return grown


class TreeCache(Cache):
    """Keys and values of all layers; every layer holds every token."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=GrowingLayer)

    @property
    def growing_layers(self) -> list[GrowingLayer]:
        """The layers, which appear when first written to."""
        return [layer for layer in self.layers if isinstance(layer, GrowingLayer)]

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens."""
        for layer in self.growing_layers:
            layer.truncate(length)

    def keep(self, start: int, slots: torch.Tensor) -> None:
        """Move the tokens in `slots`, int64[n], to `start` and drop what lies behind them."""
        for layer in self.growing_layers:
            layer.keep(start, slots)

    def pretend(self, length: int) -> None:
        """Hold `length` tokens with states of no meaning, once the layers have appeared."""
        for layer in self.growing_layers:
            layer.pretend(length)
