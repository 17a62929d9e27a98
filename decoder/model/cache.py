"""A KV cache for trees: it grows in place, and can keep any path of the last pass.

It has a place for each sequence that is decoded at the same time. Places have equal length and lie
one after another in one buffer. So one pass can write to all places and read neighbouring places
together. Layers may be on several devices; each needs indices on its own device. Keys and values of
finished sequences are stored for later sequences with the same prefix.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, Self

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from retriever.drafter import TokenIds

DEFAULT_PREFIX_BYTES: Final = 256 << 20
"""Bytes for stored prefixes: room for 10,000 tokens of a small model, or 2,000 of an 8B model."""

_LEAST_TOKENS: Final = 32
"""Least length of a stored prefix: reading a shorter prefix again takes less time than storing
it."""

LayerStates = Mapping[int, tuple[torch.Tensor, torch.Tensor]]
"""Keys and values by layer number, each [1, heads, n, size]."""

_MIN_CAPACITY = 256
"""Number of slots in the first buffers. Growing copies the buffers, and smaller ones would have to
grow after a few lines of text."""

_ANY_STATE = 0.01  # non-zero, because memory that was never written is faster to read
_STANDING_OUT = 3000.0
"""Scale of values that show whether a token was visible among hundreds of others."""


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """The slots to which a pass writes, and the keys that it sees.

    Attributes:
        slots: int64[rows], the slots for the rows' keys and values, counted over all places.
        num_keys: number of slots, from the start of the buffers, that the pass reads, used or not;
            `None` for all. The mask hides the slots that a row must not see.
        length: int64[], number of tokens before the rows, for a model that builds its own masks;
            `None` if masks are given.
    """

    slots: torch.Tensor
    num_keys: int | None = None
    length: torch.Tensor | None = None


class GrowingLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # not typed there
    """One layer's keys and values, in places whose capacity, a power of two, grows when needed.

    The time to append tokens or to keep a path depends on the new tokens, not on the context. A
    sliding layer also holds every token, so that a rejected draft pushes no token out of a window.
    A pass gets only the tokens that at least one of its rows can see.

    Args:
        window: number of positions that a token sees, itself included; `None` for all.

    Attributes:
        place: current place, for calls that name no place.
        frame: frame of the current pass, if the pass names its slots instead of appending tokens.
        num_growths: number of times that the buffers were replaced by larger buffers.
    """

    is_croppable = True

    def __init__(self, window: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # nor is this
        self.is_sliding = window is not None
        self._window = window
        self._lengths = [0]
        self.place = 0
        self.frame: Frame | None = None
        self.num_growths = 0

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values."""
        buffers = (self._key_buffer, self._value_buffer)
        return sum(each[..., :1, :].numel() * each.element_size() for each in buffers)

    @property
    def capacity(self) -> int:
        """Number of slots in each place."""
        return self._key_buffer.shape[-2] // len(self._lengths) if self.is_initialized else 0

    @property
    def lengths(self) -> list[int]:
        """Number of tokens in each place."""
        return list(self._lengths)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate empty buffers with the shapes, dtype and device of the first keys and values."""
        self.dtype, self.device = key_states.dtype, key_states.device
        with torch.inference_mode(False):
            self._key_buffer = torch.empty_like(key_states[..., :0, :])
            self._value_buffer = torch.empty_like(value_states[..., :0, :])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values; return all visible ones, [batch, heads, keys, head size]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.frame is not None:
            return self.put(self.frame, key_states, value_states)
        first, start = self._first_seen(), self._lengths[self.place]
        end = start + key_states.shape[-2]
        self.reserve(end)
        keys, values = self._of_place()
        keys[..., start:end, :] = key_states
        values[..., start:end, :] = value_states
        self._lengths[self.place] = end
        return keys[..., first:end, :], values[..., first:end, :]

    def held(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of all tokens, each [batch, heads, length, head size]."""
        keys, values = self._of_place()
        length = self._lengths[self.place]
        return keys[..., :length, :], values[..., :length, :]

    @torch.no_grad()
    def put_back(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Replace the place's contents by keys and values, each [1, heads, n, size]."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        length = keys.shape[-2]
        self.reserve(length)
        for states, given in zip(self._of_place(), (keys, values), strict=True):
            states[..., :length, :] = given
        self._lengths[self.place] = length

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens."""
        self._lengths[self.place] = min(length, self._lengths[self.place])

    def keep(self, start: int, slots: torch.Tensor) -> None:
        """Move the tokens in `slots`, int64[n] from `start` on, to `start`; drop the rest."""
        if not self.is_initialized:
            return
        end = start + len(slots)
        for states in self._of_place():
            states[..., start:end, :] = states.index_select(-2, slots)
        self._lengths[self.place] = end

    def move(self, slots: torch.Tensor, destinations: torch.Tensor) -> None:
        """Copy the tokens in `slots` to `destinations`, each int64[n], counted over all places."""
        if not self.is_initialized:
            return
        for buffer in (self._key_buffer, self._value_buffer):
            buffer.index_copy_(-2, destinations, buffer.index_select(-2, slots))

    def hold(self, length: int, place: int | None = None) -> None:
        """Set the length of a place whose first `length` slots were already written."""
        self._lengths[self.place if place is None else place] = length

    @torch.no_grad()
    def pretend(self, length: int) -> None:
        """Hold `length` tokens with meaningless states."""
        if not self.is_initialized:
            return
        self.reserve(length)
        for states in self._of_place():
            states[..., :length, :] = _ANY_STATE
        self._lengths[self.place] = length

    @torch.no_grad()
    def mark(self, slots: torch.Tensor) -> None:
        """Give the tokens in `slots`, int64[n], distinct values that stand out."""
        if not self.is_initialized:
            return
        _, values = self._of_place()
        shape = (*values.shape[:-2], len(slots), values.shape[-1])
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        values[..., slots, :] = (drawn * _STANDING_OUT).to(values)

    def reset(self) -> None:
        """Drop all tokens; the buffers stay allocated for the next sequence."""
        self._lengths[self.place] = 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys a query of this length sees, and the slot of the first key."""
        if self.frame is not None and self.frame.num_keys is not None:
            return self.frame.num_keys, 0
        first = self._first_seen()
        return self._lengths[self.place] - first + query_length, first

    def get_seq_length(self) -> int:
        """Return the number of tokens; with a frame it is a tensor, as in static caches."""
        if self.frame is not None and self.frame.length is not None:
            return self.frame.length  # type: ignore[return-value]  # transformers declares int, too
        return self._lengths[self.place]

    def get_max_length(self) -> int:
        """Return -1: there is no maximum."""
        return -1

    def reserve(self, length: int) -> None:
        """Make room for `length` tokens in each place; if that fails, the layer is unchanged."""
        if not self.is_initialized or length <= self.capacity:
            return
        try:
            self.grow(max(1 << length.bit_length(), _MIN_CAPACITY))
        except (MemoryError, RuntimeError):
            self.grow(length)  # a smaller buffer may still fit

    def put(
        self, frame: Frame, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values to a frame's slots; return all that the pass reads."""
        self._key_buffer.index_copy_(-2, frame.slots, key_states)
        self._value_buffer.index_copy_(-2, frame.slots, value_states)
        shown = slice(frame.num_keys)  # all if `num_keys` is None
        return self._key_buffer[..., shown, :], self._value_buffer[..., shown, :]

    def grow(self, capacity: int) -> None:
        """Move the contents to places of `capacity` tokens; if that fails, nothing changes."""
        self._rebuild(capacity, self._lengths)

    def make_places(self, count: int) -> None:
        """Ensure at least `count` places; if that fails, their number is unchanged."""
        lengths = [*self._lengths, *[0] * (count - len(self._lengths))]
        if self.is_initialized and len(lengths) > len(self._lengths):
            self._rebuild(self.capacity, lengths)
        self._lengths = lengths

    def _rebuild(self, capacity: int, lengths: list[int]) -> None:
        """Copy the contents to new buffers with a place for each length."""
        grown = (
            self._resized(self._key_buffer, capacity, len(lengths)),
            self._resized(self._value_buffer, capacity, len(lengths)),
        )
        self._key_buffer, self._value_buffer = grown
        self.num_growths += 1

    def _first_seen(self) -> int:
        """Return the first slot that the next token can see."""
        length = self._lengths[self.place]
        return length - num_seen(length, self._window)

    def _of_place(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of the keys and values in the current place's slots."""
        start, end = self.place * self.capacity, (self.place + 1) * self.capacity
        return self._key_buffer[..., start:end, :], self._value_buffer[..., start:end, :]

    def _resized(self, buffer: torch.Tensor, capacity: int, num_places: int) -> torch.Tensor:
        shape = (*buffer.shape[:-2], num_places * capacity, buffer.shape[-1])
        with torch.inference_mode(False):  # passes in and outside inference mode write to it
            grown = buffer.new_zeros(shape)
        before = self.capacity
        for place, length in enumerate(self._lengths):
            start, held = place * capacity, place * before
            grown[..., start : start + length, :] = buffer[..., held : held + length, :]
        return grown


class TreeCache(Cache):
    """The keys and values of all layers; every layer holds every token.

    Layers that use the keys of earlier layers have no keys of their own and stay empty.

    Args:
        windows: window of each layer; `None` for full attention.

    Attributes:
        place: current place, for calls that name no place.
    """

    def __init__(self, windows: Sequence[int | None]) -> None:
        self.growing_layers = [GrowingLayer(window) for window in windows]
        self.place = 0
        super().__init__(layers=list(self.growing_layers))

    def at(self, place: int) -> Self:
        """Make a place the current place, and return the cache."""
        if place != self.place:
            self.place = place
            for layer in self.growing_layers:
                layer.place = place
        return self

    def make_places(self, count: int) -> None:
        """Ensure at least `count` places."""
        for layer in self.growing_layers:
            layer.make_places(count)

    @contextmanager
    def written(self) -> Iterator[Self]:
        """Provide the cache to a pass; `truncate` undoes a pass that failed halfway."""
        yield self

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        layers = (layer for layer in self.growing_layers if layer.is_initialized)
        return sum(layer.bytes_per_token for layer in layers)

    def held(self, length: int) -> LayerStates:
        """Return copies of the first `length` tokens' keys and values, for layers with any.

        Raises:
            OutOfMemoryError, RuntimeError: there is not enough memory.
        """
        held = {
            number: layer.held()
            for number, layer in enumerate(self.growing_layers)
            if layer.is_initialized
        }
        return {
            number: (keys[..., :length, :].clone(), values[..., :length, :].clone())
            for number, (keys, values) in held.items()
        }

    def put_back(self, states: LayerStates, length: int) -> None:
        """Replace the place's contents by the first `length` tokens of stored keys and values."""
        for number, (keys, values) in states.items():
            self.growing_layers[number].put_back(keys[..., :length, :], values[..., :length, :])

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens."""
        for layer in self.growing_layers:
            layer.truncate(length)

    def keep(self, start: int, slots: torch.Tensor) -> None:
        """Move the tokens in `slots`, int64[n], to `start`, and drop everything after them."""
        for layer, own in self._on_devices(slots):
            layer.keep(start, own)

    @contextmanager
    def framed(self, frame: Frame) -> Iterator[Self]:
        """Provide the cache to a pass that names its slots; `hold` then sets the length."""
        try:
            for layer, slots in self._on_devices(frame.slots):
                layer.frame = frame if slots is frame.slots else replace(frame, slots=slots)
            yield self
        finally:
            for layer in self.growing_layers:
                layer.frame = None

    @property
    def capacity(self) -> int:
        """Number of slots per place for which all layers have room."""
        appeared = (layer.capacity for layer in self.growing_layers if layer.is_initialized)
        return min(appeared, default=0)

    @property
    def lengths(self) -> list[int]:
        """Number of tokens in each place, committed or not."""
        first = next((each for each in self.growing_layers if each.is_initialized), None)
        return [] if first is None else first.lengths

    @property
    def num_growths(self) -> int:
        """Number of times that buffers were replaced by larger buffers."""
        return sum(layer.num_growths for layer in self.growing_layers)

    def reserve(self, length: int) -> None:
        """Make room for `length` tokens in each place, in the layers that have buffers."""
        for layer in self.growing_layers:
            layer.reserve(length)

    def hold(self, length: int, place: int | None = None) -> None:
        """Set the length of a place whose first `length` slots were already written."""
        for layer in self.growing_layers:
            layer.hold(length, place)

    def move(self, slots: torch.Tensor, destinations: torch.Tensor) -> None:
        """Copy the tokens in `slots` to `destinations`, each int64[n], counted over all places."""
        for layer in self.growing_layers:
            layer.move(slots, destinations)

    def pretend(self, length: int) -> None:
        """Hold `length` tokens with meaningless values, in the layers that have buffers."""
        for layer in self.growing_layers:
            layer.pretend(length)

    def mark(self, slots: torch.Tensor) -> None:
        """Give the tokens in `slots`, int64[n], distinct values that stand out."""
        for layer, own in self._on_devices(slots):
            layer.mark(own)

    def _on_devices(self, slots: torch.Tensor) -> Iterator[tuple[GrowingLayer, torch.Tensor]]:
        """Yield each layer with the slots on its device."""
        for layer in self.growing_layers:
            if layer.is_initialized and slots.device != layer.device:
                slots = slots.to(layer.device)
            yield layer, slots


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """The first tokens of a sequence, with their keys and values.

    Attributes:
        tokens: int32[n], ids of the tokens.
        states: keys and values of the n tokens, by layer.
    """

    tokens: TokenIds
    states: LayerStates

    @property
    def num_bytes(self) -> int:
        """Bytes of the keys and values."""
        return sum(each.nbytes for layer in self.states.values() for each in layer)


class PrefixStore:
    """Stores the latest prefixes, within `max_bytes`.

    Args:
        max_bytes: most bytes of all keys and values; 0 to store nothing.
    """

    def __init__(self, max_bytes: int = DEFAULT_PREFIX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._kept: list[Prefix] = []  # the latest last

    def __iter__(self) -> Iterator[Prefix]:
        return iter(self._kept)

    @property
    def num_bytes(self) -> int:
        """Bytes in use."""
        return sum(prefix.num_bytes for prefix in self._kept)

    def wants(self, num_tokens: int, num_new: int, bytes_per_token: int) -> bool:
        """Return whether to store a prefix, of which `num_new` tokens would otherwise be lost."""
        return num_new >= _LEAST_TOKENS and num_tokens * bytes_per_token <= self._max_bytes

    def put(self, prefix: Prefix) -> None:
        """Add a prefix, and drop shorter prefixes of it; evict the oldest prefixes if needed."""
        self._kept = [each for each in self._kept if not _begins(prefix.tokens, each.tokens)]
        self._kept.append(prefix)
        while self.num_bytes > self._max_bytes:
            self._kept.pop(0)

    def best(self, tokens: TokenIds, beyond: int) -> tuple[Prefix, int] | None:
        """Return the prefix that shares most tokens with a sequence, and the number of them.

        Args:
            tokens: int32[n], the sequence's tokens.
            beyond: number of tokens that need not be read in any case; a prefix must share at least
                32 tokens more, otherwise the result is `None`.
        """
        shared = [num_shared(prefix.tokens, tokens) for prefix in self._kept]
        most = max(shared, default=0)
        if most - beyond < _LEAST_TOKENS:
            return None
        found = self._kept.pop(shared.index(most))
        if len(found.tokens) - most >= _LEAST_TOKENS:  # else the sequence continues the prefix
            self._kept.append(found)
        return found, most

    def clear(self) -> None:
        """Drop all prefixes."""
        self._kept.clear()


def num_shared(one: TokenIds, other: TokenIds) -> int:
    """Return the length of the common prefix of int32[n] and int32[m]."""
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length


def _begins(longer: TokenIds, shorter: TokenIds) -> bool:
    return num_shared(longer, shorter) == len(shorter)


def num_seen(past: int, window: int | None) -> int:
    """Return how many of `past` tokens lie in the window of the next token."""
    return past if window is None else min(past, window - 1)
