"""A key-value cache for trees: it grows in place, and keeps any path of the last pass.

It has a place for each of the sequences that are decoded together. Places are equally long and lie
one after another in one buffer, so one pass can write to all of them and read neighbours at once.
Layers may lie on several devices: each takes indices on its own. What sequences that are over held
is kept for those that begin alike, which need not read it again.
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
"""Some 10,000 tokens of a small model, 2,000 of one of 8B."""

_LEAST_TOKENS: Final = 32
"""Shorter ones are read again in less time than it takes to look after them."""

LayerStates = Mapping[int, tuple[torch.Tensor, torch.Tensor]]
"""Keys and values by the number of their layer, [1, heads, n, size] each."""

_MIN_CAPACITY = 256
"""Slots of the first buffers: growing copies, and smaller buffers would grow within a few lines."""

_ANY_STATE = 0.01  # pages that were never written to are all one page, and quicker to read
_STANDING_OUT = 3000.0
"""Values that show in a context of hundreds of others whether a token was seen."""


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """The slots that a pass writes, and the keys that it is shown.

    Attributes:
        slots: int64[rows], where the rows' states go, counted over all places.
        num_keys: first slots of the buffers that it is shown, used or not, `None` for all; its
            mask hides those that a row must not see.
        length: int64[], tokens before the rows, told to a model that makes its masks itself; `None`
            where they are given.
    """

    slots: torch.Tensor
    num_keys: int | None = None
    length: torch.Tensor | None = None


class GrowingLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # not typed there
    """One layer's keys and values, in places of powers of two that grow when full.

    The time to append or to keep a path depends on the new tokens, not on the context. A sliding
    layer holds every token, too, so that a rejected draft pushes no token out of a window; a pass
    is only shown the tokens that some row of it can see.

    Args:
        window: positions that a token looks back over, itself included; `None` for all.

    Attributes:
        place: of the sequence that is meant where none is named.
        frame: of the pass that is run, where it names its slots: it does not count as appended.
        num_growths: how often the buffers were replaced by longer ones.
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
        """Memory of a token's keys and values."""
        buffers = (self._key_buffer, self._value_buffer)
        return sum(each[..., :1, :].numel() * each.element_size() for each in buffers)

    @property
    def capacity(self) -> int:
        """Slots of each place."""
        return self._key_buffer.shape[-2] // len(self._lengths) if self.is_initialized else 0

    @property
    def lengths(self) -> list[int]:
        """How many tokens each place holds."""
        return list(self._lengths)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take shapes, dtype and device from the first states."""
        self.dtype, self.device = key_states.dtype, key_states.device
        with torch.inference_mode(False):
            self._key_buffer = torch.empty_like(key_states[..., :0, :])
            self._value_buffer = torch.empty_like(value_states[..., :0, :])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append states and return all that these can see, [batch, heads, keys, head size]."""
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
        """Return keys and values of all tokens, [batch, heads, length, head size]."""
        keys, values = self._of_place()
        length = self._lengths[self.place]
        return keys[..., :length, :], values[..., :length, :]

    @torch.no_grad()
    def put_back(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Hold tokens whose states were held before, [1, heads, n, size] each, and no others."""
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
        """Move the tokens in `slots`, int64[n] at or past `start`, to `start`; drop the rest."""
        if not self.is_initialized:
            return
        end = start + len(slots)
        for states in self._of_place():
            states[..., start:end, :] = states.index_select(-2, slots)
        self._lengths[self.place] = end

    def move(self, slots: torch.Tensor, destinations: torch.Tensor) -> None:
        """Copy the tokens in `slots` to `destinations`, int64[n] each, counted over all places."""
        if not self.is_initialized:
            return
        for buffer in (self._key_buffer, self._value_buffer):
            buffer.index_copy_(-2, destinations, buffer.index_select(-2, slots))

    def hold(self, length: int, place: int | None = None) -> None:
        """Count the first `length` slots of a place as held: they were written to in place."""
        self._lengths[self.place if place is None else place] = length

    @torch.no_grad()
    def pretend(self, length: int) -> None:
        """Hold `length` tokens with states of no meaning."""
        if not self.is_initialized:
            return
        self.reserve(length)
        for states in self._of_place():
            states[..., :length, :] = _ANY_STATE
        self._lengths[self.place] = length

    @torch.no_grad()
    def mark(self, slots: torch.Tensor) -> None:
        """Give the tokens in `slots`, int64[n], values that stand out, each its own."""
        if not self.is_initialized:
            return
        _, values = self._of_place()
        shape = (*values.shape[:-2], len(slots), values.shape[-1])
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        values[..., slots, :] = (drawn * _STANDING_OUT).to(values)

    def reset(self) -> None:
        """Forget all tokens; the buffers stay for the next sequence."""
        self._lengths[self.place] = 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys a query of this length sees, and the first one's slot."""
        if self.frame is not None and self.frame.num_keys is not None:
            return self.frame.num_keys, 0
        first = self._first_seen()
        return self._lengths[self.place] - first + query_length, first

    def get_seq_length(self) -> int:
        """Return the number of tokens held; that of a frame is a tensor, as in static caches."""
        if self.frame is not None and self.frame.length is not None:
            return self.frame.length  # type: ignore[return-value]  # nor does transformers say so
        return self._lengths[self.place]

    def get_max_length(self) -> int:
        """Return -1: there is no maximum."""
        return -1

    def reserve(self, length: int) -> None:
        """Make room for `length` tokens in each place; where that fails, the layer is as it was."""
        if not self.is_initialized or length <= self.capacity:
            return
        try:
            self.grow(max(1 << length.bit_length(), _MIN_CAPACITY))
        except (MemoryError, RuntimeError):
            self.grow(length)  # a smaller buffer may still fit

    def put(
        self, frame: Frame, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write states to a frame's slots and return all of its keys and values."""
        self._key_buffer.index_copy_(-2, frame.slots, key_states)
        self._value_buffer.index_copy_(-2, frame.slots, value_states)
        shown = slice(frame.num_keys)  # all where it names no number
        return self._key_buffer[..., shown, :], self._value_buffer[..., shown, :]

    def grow(self, capacity: int) -> None:
        """Move what is held to places of `capacity` tokens; where that fails, it stays."""
        self._rebuild(capacity, self._lengths)

    def make_places(self, count: int) -> None:
        """Have at least `count` places; where that fails, there are as many as before."""
        lengths = [*self._lengths, *[0] * (count - len(self._lengths))]
        if self.is_initialized and len(lengths) > len(self._lengths):
            self._rebuild(self.capacity, lengths)
        self._lengths = lengths

    def _rebuild(self, capacity: int, lengths: list[int]) -> None:
        """Replace the buffers by others with a place for each length, and move what is held."""
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
        """Return views of the keys and values in the slots of the place."""
        start, end = self.place * self.capacity, (self.place + 1) * self.capacity
        return self._key_buffer[..., start:end, :], self._value_buffer[..., start:end, :]

    def _resized(self, buffer: torch.Tensor, capacity: int, num_places: int) -> torch.Tensor:
        shape = (*buffer.shape[:-2], num_places * capacity, buffer.shape[-1])
        with torch.inference_mode(False):  # passes of either mode write to it
            grown = buffer.new_zeros(shape)
        before = self.capacity
        for place, length in enumerate(self._lengths):
            start, held = place * capacity, place * before
            grown[..., start : start + length, :] = buffer[..., held : held + length, :]
        return grown


class TreeCache(Cache):
    """Keys and values of all layers; every layer holds every token.

    Layers that attend to the keys of earlier ones never appear, and stay empty.

    Args:
        windows: of each layer, `None` where attention is full.

    Attributes:
        place: of the sequence that is meant where none is named.
    """

    def __init__(self, windows: Sequence[int | None]) -> None:
        self.growing_layers = [GrowingLayer(window) for window in windows]
        self.place = 0
        super().__init__(layers=list(self.growing_layers))

    def at(self, place: int) -> Self:
        """Mean the sequence in a place from now on."""
        if place != self.place:
            self.place = place
            for layer in self.growing_layers:
                layer.place = place
        return self

    def make_places(self, count: int) -> None:
        """Have at least `count` places."""
        for layer in self.growing_layers:
            layer.make_places(count)

    @contextmanager
    def written(self) -> Iterator[Self]:
        """Give the cache for a pass to write to; truncating undoes a pass that fails halfway."""
        yield self

    @property
    def bytes_per_token(self) -> int:
        """Memory of a token's states in all layers."""
        layers = (layer for layer in self.growing_layers if layer.is_initialized)
        return sum(layer.bytes_per_token for layer in layers)

    def held(self, length: int) -> LayerStates:
        """Return copies of the states of the first `length` tokens; layers without any give none.

        Raises:
            OutOfMemoryError, RuntimeError: there is no room.
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
        """Hold the first `length` of tokens whose states were held before."""
        for number, (keys, values) in states.items():
            self.growing_layers[number].put_back(keys[..., :length, :], values[..., :length, :])

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens."""
        for layer in self.growing_layers:
            layer.truncate(length)

    def keep(self, start: int, slots: torch.Tensor) -> None:
        """Move the tokens in `slots`, int64[n], to `start` and drop what lies behind them."""
        for layer, own in self._on_devices(slots):
            layer.keep(start, own)

    @contextmanager
    def framed(self, frame: Frame) -> Iterator[Self]:
        """Give the cache for a pass that names its slots to write to; `hold` counts its tokens."""
        try:
            for layer, slots in self._on_devices(frame.slots):
                layer.frame = frame if slots is frame.slots else replace(frame, slots=slots)
            yield self
        finally:
            for layer in self.growing_layers:
                layer.frame = None

    @property
    def capacity(self) -> int:
        """Slots that all layers have room for."""
        appeared = (layer.capacity for layer in self.growing_layers if layer.is_initialized)
        return min(appeared, default=0)

    @property
    def lengths(self) -> list[int]:
        """How many tokens each place holds, committed or not."""
        first = next((each for each in self.growing_layers if each.is_initialized), None)
        return [] if first is None else first.lengths

    @property
    def num_growths(self) -> int:
        """How often buffers were replaced by longer ones."""
        return sum(layer.num_growths for layer in self.growing_layers)

    def reserve(self, length: int) -> None:
        """Make room for `length` tokens in each place, once the layers have appeared."""
        for layer in self.growing_layers:
            layer.reserve(length)

    def hold(self, length: int, place: int | None = None) -> None:
        """Count the first `length` slots of a place as held: they were written to in place."""
        for layer in self.growing_layers:
            layer.hold(length, place)

    def move(self, slots: torch.Tensor, destinations: torch.Tensor) -> None:
        """Copy the tokens in `slots` to `destinations`, int64[n] each, counted over all places."""
        for layer in self.growing_layers:
            layer.move(slots, destinations)

    def pretend(self, length: int) -> None:
        """Hold `length` tokens with states of no meaning, once the layers have appeared."""
        for layer in self.growing_layers:
            layer.pretend(length)

    def mark(self, slots: torch.Tensor) -> None:
        """Give the tokens in `slots`, int64[n], values that stand out, each its own."""
        for layer, own in self._on_devices(slots):
            layer.mark(own)

    def _on_devices(self, slots: torch.Tensor) -> Iterator[tuple[GrowingLayer, torch.Tensor]]:
        """Return the layers, each with the slots on its device: copied where devices change."""
        for layer in self.growing_layers:
            if layer.is_initialized and slots.device != layer.device:
                slots = slots.to(layer.device)
            yield layer, slots


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """A sequence's tokens, and what the target keeps of them.

    Attributes:
        tokens: int32[n].
        states: of the n tokens.
    """

    tokens: TokenIds
    states: LayerStates

    @property
    def num_bytes(self) -> int:
        """Memory that the states take."""
        return sum(each.nbytes for layer in self.states.values() for each in layer)


class PrefixStore:
    """Keeps the latest prefixes within so many bytes.

    Args:
        max_bytes: of all states; 0 to keep nothing.
    """

    def __init__(self, max_bytes: int = DEFAULT_PREFIX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._kept: list[Prefix] = []  # the latest last

    def __iter__(self) -> Iterator[Prefix]:
        return iter(self._kept)

    @property
    def num_bytes(self) -> int:
        """Memory that is taken now."""
        return sum(prefix.num_bytes for prefix in self._kept)

    def wants(self, num_tokens: int, num_new: int, bytes_per_token: int) -> bool:
        """Return whether to keep a prefix, so many tokens of which would else be lost."""
        return num_new >= _LEAST_TOKENS and num_tokens * bytes_per_token <= self._max_bytes

    def put(self, prefix: Prefix) -> None:
        """Keep a prefix in place of those that it begins with; the oldest give way."""
        self._kept = [each for each in self._kept if not _begins(prefix.tokens, each.tokens)]
        self._kept.append(prefix)
        while self.num_bytes > self._max_bytes:
            self._kept.pop(0)

    def best(self, tokens: TokenIds, beyond: int) -> tuple[Prefix, int] | None:
        """Return the prefix that shares most with a sequence, and how many tokens that is.

        Args:
            tokens: int32[n], the sequence.
            beyond: tokens that need not be read anyway; a few more are not worth it.
        """
        shared = [num_shared(prefix.tokens, tokens) for prefix in self._kept]
        most = max(shared, default=0)
        if most - beyond < _LEAST_TOKENS:
            return None
        found = self._kept.pop(shared.index(most))
        if len(found.tokens) - most >= _LEAST_TOKENS:  # else it goes on elsewhere
            self._kept.append(found)
        return found, most

    def clear(self) -> None:
        """Forget all."""
        self._kept.clear()


def num_shared(one: TokenIds, other: TokenIds) -> int:
    """Return how many first tokens of int32[n] and int32[m] are the same."""
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length


def _begins(longer: TokenIds, shorter: TokenIds) -> bool:
    return num_shared(longer, shorter) == len(shorter)


def num_seen(past: int, window: int | None) -> int:
    """Return how many of `past` tokens lie in the window of the token behind them."""
    return past if window is None else min(past, window - 1)
