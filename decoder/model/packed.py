"""One pass for several sequences: their rows are concatenated, and each row sees its own keys.

Products with weights, which take most of a pass's time, are computed for all rows at once, without
padding. For attention, neighbouring places are grouped if padding their rows takes less time than
another call.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from decoder.model.attention import (
    AttendingMask,
    attended_by_group,
    by_place,
    hide,
    lowest,
    refused_options,
    scale_of,
)
from decoder.model.cache import Frame, TreeCache, num_seen
from decoder.model.passes import Read, Reading
from decoder.model.tree_rows import TreeRows
from decoder.model.user_model import UserModel

_CALL: Final = 1000
"""Number of scores of a head (rows times keys) that take as long as one more attention call.
Measured on two cores, a call takes 15 to 30 us, and one score for each of nine heads takes 25
ns."""

_LAUNCHES: Final = 1 << 20
"""The same number on other devices, where a call takes about fifteen launches. On an H200 these
take at least 75 us (750 us on a slow host), and a million scores of nine heads take about 30 us."""


@dataclass(frozen=True, slots=True, eq=False)
class Neighbours:
    """Neighbouring places of a cache whose rows share one attention call in a packed pass.

    Attributes:
        places: the slice of n neighbouring places.
        keys: the slice of slots in each place that contains all keys its rows see.
        rows: int64[n, w], row numbers of each place; -1 for padding.
        mask: additive mask, [n, 1, w, keys]; `None` if a single row sees all keys.
    """

    places: slice
    keys: slice
    rows: NDArray[np.int64]
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class Dealing:
    """How rows are distributed to groups of neighbours, in layers with the same numbers of heads.

    Attributes:
        given: int64[m], for each query of a call, its index among [rows * heads]; the queries of
            heads that share keys form one product.
        sizes: number of queries of each group.
        masks: mask of each group, in the form that the group's calls need.
        taken: int64[rows * heads], index of each row and head's result among the results of all
            calls.
    """

    given: torch.Tensor
    sizes: list[int]
    masks: list[torch.Tensor | None]
    taken: torch.Tensor

    @classmethod
    def of(
        cls, neighbours: Sequence[Neighbours], heads: int, key_heads: int, device: torch.device
    ) -> Self:
        """Compute the distribution for layers with these numbers of query heads and key heads."""
        shared = heads // key_heads
        numbers = np.arange(heads).reshape(key_heads, shared)
        given, taken, masks = [], [], []
        for group in neighbours:
            rows = group.rows[:, None, None, :] * heads
            given.append((np.maximum(rows, 0) + numbers[:, :, None]).ravel())
            # Results have the shape [places, heads that share keys, rows, key heads].
            rows = group.rows[:, None, :, None] * heads
            taken.append(np.where(rows < 0, -1, rows + numbers.T[:, None, :]).ravel())
            mask = None if group.mask is None else group.mask.to(device)
            masks.append(mask if mask is None or shared == 1 else mask.repeat(1, 1, shared, 1))
        sizes = [len(each) for each in given]
        owners = np.concatenate(taken)
        (places,) = np.nonzero(owners >= 0)
        at = np.empty(len(places), np.int64)
        at[owners[places]] = places
        indices = torch.from_numpy(np.concatenate([*given, at])).to(device)
        return cls(indices[: sum(sizes)], sizes, masks, indices[sum(sizes) :])


class PackedMask(AttendingMask):
    """The mask of a packed pass; each layer distributes rows on its own device.

    Attributes:
        neighbours: groups of places; every row is in one group.
        capacity: slots in each place.
    """

    neighbours: Sequence[Neighbours]
    capacity: int
    _dealings: dict[tuple[torch.device, int, int], Dealing]

    @classmethod
    def of(cls, neighbours: Sequence[Neighbours], capacity: int) -> Self:
        """Return a mask; the values of the tensor itself have no meaning."""
        made = torch.zeros(1, 1, 1, 1).as_subclass(cls)
        made.neighbours, made.capacity = neighbours, capacity
        made._dealings = {}  # noqa: SLF001  its own
        return made

    def dealing(self, heads: int, key_heads: int, device: torch.device) -> Dealing:
        """Return the distribution of rows in a layer, computed once for all layers of its kind."""
        key = device, heads, key_heads
        if key not in self._dealings:
            self._dealings[key] = Dealing.of(self.neighbours, heads, key_heads, device)
        return self._dealings[key]

    def attend(  # noqa: PLR0913, PLR0917  the parameters are transformers'
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        dropout: float,
        scaling: float | None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """Compute attention within each group of neighbours; see `AttendingMask.attend`."""
        _, heads, num_rows, size = query.shape
        key_heads, is_folded = key.shape[1], not (dropout or refused_options(options))
        dealing = self.dealing(*((heads, key_heads) if is_folded else (1, 1)), query.device)
        given = query[0].transpose(0, 1).reshape(-1, *(() if is_folded else (heads,)), size)
        keys, values = by_place(key, self.capacity), by_place(value, self.capacity)
        scale = scale_of(query, scaling)
        results = []
        dealt = torch.split(given.index_select(0, dealing.given), dealing.sizes)
        for group, queries, mask in zip(self.neighbours, dealt, dealing.masks, strict=True):
            own_keys = keys[group.places, :, group.keys]
            own_values = values[group.places, :, group.keys]
            if is_folded:
                own = queries.view(len(group.rows), key_heads, -1, size)
                attended = attended_by_group(own, own_keys, own_values, mask, scale)
                results.append(attended.transpose(1, 2).flatten(0, 2))
            else:
                own = queries.view(*group.rows.shape, heads, size).transpose(1, 2)
                attended, _ = sdpa_attention_forward(
                    module, own, own_keys, own_values, mask, dropout, scaling, **options
                )
                results.append(attended.flatten(0, 1))
        taken = torch.cat(results).index_select(0, dealing.taken)
        return taken.view(1, num_rows, heads, -1), None


class PackedPart(NamedTuple):
    """A sequence's part in a packed pass: its reading, and the reading's rows."""

    reading: Reading
    rows: TreeRows


class PackedPasses:
    """Passes over several sequences in the places of one cache.

    Args:
        model: a model whose layers all use `decoder.model.attention.tree_attention`.
        cache: a cache with a place for each sequence, after a first pass over one place.
        windows: window of each of the model's layer types.
    """

    def __init__(
        self, model: UserModel, cache: TreeCache, windows: Mapping[str, int | None]
    ) -> None:
        self._model = model
        self._cache = cache
        self._windows = dict(windows)

    @property
    def is_ready(self) -> bool:
        """Whether all layers have buffers, which a first pass over one place allocates."""
        return self._cache.capacity > 0

    def read(self, readings: Sequence[Reading]) -> list[Read]:
        """Read several sequences' inputs in one pass, after the contents of their places.

        Args:
            readings: readings of distinct places, in the order of the places.
        """
        device, pasts = self._model.device, self._cache.lengths
        parts = [PackedPart(each, each.rows(pasts[each.place])) for each in readings]
        self._cache.reserve(max(part.rows.num_keys for part in parts))
        tokens = torch.from_numpy(np.concatenate([each.tokens for each in readings]))
        positions = torch.from_numpy(np.concatenate([part.rows.positions for part in parts]))
        masks = self._masks(parts)
        with self._cache.framed(Frame(self._slots(parts).to(device))) as states:
            output: Any = self._model.run(
                cache=states,
                input_ids=tokens[None].long().to(device),
                attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
                position_ids=positions[None].to(device),
                logits_to_keep=_wanted(readings).to(device),
            )
        for part in parts:
            self._cache.hold(part.rows.num_keys, part.reading.place)
        return self._taken(readings, output.logits[0])

    def _slots(self, parts: Iterable[PackedPart]) -> torch.Tensor:
        """Return int64[rows], the slots for the rows' keys and values."""
        capacity = self._cache.capacity
        ends = ((part.reading.place * capacity, part.rows) for part in parts)
        slots = [np.arange(first + rows.past, first + rows.num_keys) for first, rows in ends]
        return torch.from_numpy(np.concatenate(slots))

    def _masks(self, parts: Sequence[PackedPart]) -> dict[str, PackedMask]:
        """Return the mask of each layer type."""
        ends = list(accumulate(part.rows.num_read for part in parts))
        starts = dict(zip((part.reading.place for part in parts), [0, *ends], strict=False))
        dtype, device = self._model.dtype, self._model.device
        groups = list(grouped(parts, _CALL if device.type == "cpu" else _LAUNCHES))
        return {
            kind: PackedMask.of(
                [_neighbours(group, starts, window, dtype, device) for group in groups],
                self._cache.capacity,
            )
            for kind, window in self._windows.items()
        }

    def _taken(self, readings: Sequence[Reading], logits: torch.Tensor) -> list[Read]:
        """Return each sequence's logits and tapped hidden states."""
        sizes = [len(each.tokens) for each in readings]
        own = torch.split(logits, [each.num_logits for each in readings])
        split = {number: torch.split(rows, sizes) for number, rows in self._model.states.items()}
        return [
            Read(rows, {number: states[at] for number, states in split.items()})
            for at, rows in enumerate(own)
        ]


def grouped(parts: Iterable[PackedPart], call: int = _CALL) -> Iterator[list[PackedPart]]:
    """Group neighbouring places if that takes less time than separate calls.

    Args:
        parts: parts in the order of their places; a group also reads the keys of places in between.
        call: number of scores of a head that take as long as one more call.
    """
    group: list[PackedPart] = []
    width = keys = 0  # most rows and keys of a place in the group; scores include padding
    for part in parts:
        place, rows = part.reading.place, part.rows
        if group:
            first, last = group[0].reading.place, group[-1].reading.place
            together = max(width, rows.num_read) * max(keys, rows.num_keys) * (place - first + 1)
            apart = width * keys * (last - first + 1) + rows.num_read * rows.num_keys
            if together > apart + call:
                yield group
                group, width, keys = [], 0, 0
        group.append(part)
        width, keys = max(width, rows.num_read), max(keys, rows.num_keys)
    if group:
        yield group


def _wanted(readings: Iterable[Reading]) -> torch.Tensor:
    """Return int64[n], the rows whose logits are needed."""
    wanted, start = [], 0
    for reading in readings:
        end = start + len(reading.tokens)
        wanted.append(np.arange(end - reading.num_logits, end))
        start = end
    return torch.from_numpy(np.concatenate(wanted))


def _neighbours(
    group: Sequence[PackedPart],
    starts: Mapping[int, int],
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Neighbours:
    """Return how a group of places attends.

    Args:
        group: parts of neighbouring places; places in between without a part have no rows.
        starts: number of the first row of each place's part in the pass.
        window: number of positions that a row sees, itself included; `None` for all.
        dtype: dtype of the mask.
        device: device of all tensors.
    """
    first, last = group[0].reading.place, group[-1].reading.place
    width = max(rows.num_read for _, rows in group)
    shown = min(rows.past - num_seen(rows.past, window) for _, rows in group)
    keys = slice(shown, max(rows.num_keys for _, rows in group))
    numbers = np.full((last - first + 1, width), -1, np.int64)
    for reading, rows in group:
        begin = starts[reading.place]
        numbers[reading.place - first, : rows.num_read] = np.arange(begin, begin + rows.num_read)
    if len(group) == 1 and width == 1:
        mask = None  # the only row sees all keys in the slice
    else:
        mask = _mask(group, numbers.shape, keys, window, dtype).to(device)
    return Neighbours(slice(first, last + 1), keys, numbers, mask)


def _mask(
    group: Sequence[PackedPart],
    shape: tuple[int, ...],
    keys: slice,
    window: int | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return dtype[places, 1, rows, keys], an additive mask: zero where attention is allowed.

    Padding rows see all keys, and their results are dropped.
    """
    mask = torch.zeros(*shape, keys.stop - keys.start, dtype=dtype)
    for reading, rows in group:
        own = mask[reading.place - group[0].reading.place, : rows.num_read]
        end = rows.num_keys - keys.start
        own[:, end:] = lowest(dtype)
        hide(own[:, :end], rows, keys.start, window)
    return mask[:, None]
