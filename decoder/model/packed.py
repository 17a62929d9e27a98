"""One pass for many sequences: their rows lie one after another, each sees its own keys.

Products of weights are made for all rows at once, without padding: they are what a pass costs. For
attention, neighbouring places are taken together where padding their rows to as many costs less
than a call of its own.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from decoder.model.attention import Neighbours, PackedMask
from decoder.model.cache import Frame, TreeCache, num_seen
from decoder.model.passes import TreeLayout
from decoder.model.states import States
from decoder.model.user_model import UserModel
from retriever.drafter import TokenIds

_CALL: Final = 1000
"""Scores of a head (rows times keys) that take as long as one more call of the attention: measured
on two cores, a call takes 15 to 30 us and a score of nine heads 25 ns."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What one sequence reads in a pass: a piece of its prompt, or its last token and a tree.

    Attributes:
        place: of its keys and values in the cache.
        past: tokens that the place holds.
        tokens: int32[n], at least one.
        layout: how they see each other; `None` where each sees those before it.
        num_logits: after how many of the last tokens logits are wanted.
    """

    place: int
    past: int
    tokens: TokenIds
    layout: TreeLayout | None
    num_logits: int

    @property
    def positions(self) -> NDArray[np.int64]:
        """int64[n], of each token in its sequence."""
        offsets = np.arange(len(self.tokens)) if self.layout is None else self.layout.depths
        return offsets + self.past

    @property
    def num_keys(self) -> int:
        """Slots of the place that some row sees."""
        return self.past + len(self.tokens)


class PackedPasses:
    """Passes of many sequences over the places of one cache.

    Args:
        model: one whose layers all attend by `decoder.model.attention.tree_attention`.
        cache: with a place for each sequence, after a first pass over one of them.
        windows: of the model's layer types.
    """

    def __init__(
        self, model: UserModel, cache: TreeCache, windows: Mapping[str, int | None]
    ) -> None:
        self._model = model
        self._cache = cache
        self._windows = dict(windows)

    @property
    def is_ready(self) -> bool:
        """Whether all layers hold buffers: a first pass over one place makes them."""
        return self._cache.capacity > 0

    def read(self, parts: Sequence[Part]) -> list[tuple[torch.Tensor, States]]:
        """Run all parts through the model, in one pass.

        Args:
            parts: of distinct places, in their order.

        Returns:
            For each its logits, [num_logits, vocabulary], and the states that are tapped.
        """
        device = self._model.device
        self._cache.reserve(max(part.num_keys for part in parts))
        tokens = torch.from_numpy(np.concatenate([part.tokens for part in parts]).astype(np.int64))
        positions = torch.from_numpy(np.concatenate([part.positions for part in parts]))
        masks = self._masks(parts)
        with self._cache.framed(Frame(self._slots(parts).to(device))) as states:
            output: Any = self._model.run(
                cache=states,
                input_ids=tokens[None].to(device),
                attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
                position_ids=positions[None].to(device),
                logits_to_keep=_wanted(parts).to(device),
            )
        for part in parts:
            self._cache.hold(part.num_keys, part.place)
        logits = torch.split(output.logits[0], [part.num_logits for part in parts])
        return list(zip(logits, self._tapped(parts), strict=True))

    def _slots(self, parts: Iterable[Part]) -> torch.Tensor:
        """Return int64[rows], where the rows' keys and values go."""
        capacity = self._cache.capacity
        starts = ((part.place * capacity + part.past, len(part.tokens)) for part in parts)
        return torch.from_numpy(np.concatenate([np.arange(s, s + n) for s, n in starts]))

    def _masks(self, parts: Sequence[Part]) -> dict[str, PackedMask]:
        """Return who sees whom, for each layer type."""
        ends = list(accumulate(len(part.tokens) for part in parts))
        starts = dict(zip((part.place for part in parts), [0, *ends], strict=False))
        groups = list(grouped(parts))
        dtype, device = self._model.dtype, self._model.device
        return {
            kind: PackedMask.of(
                [_neighbours(group, starts, window, dtype, device) for group in groups],
                self._cache.capacity,
            )
            for kind, window in self._windows.items()
        }

    def _tapped(self, parts: Sequence[Part]) -> list[States]:
        sizes = [len(part.tokens) for part in parts]
        split = {number: torch.split(rows, sizes) for number, rows in self._model.states.items()}
        return [{number: rows[at] for number, rows in split.items()} for at in range(len(parts))]


def grouped(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Put neighbouring places together where that costs less than calls of their own.

    Args:
        parts: in the order of their places; the keys of places between two of them are read, too.
    """
    group: list[Part] = []
    for part in parts:
        together = [*group, part]
        if group and _scores(together) > _scores(group) + _scores([part]) + _CALL:
            yield group
            group = []
        group.append(part)
    if group:
        yield group


def _scores(group: Sequence[Part]) -> int:
    """Return the scores of a head, padding included."""
    num_places = group[-1].place - group[0].place + 1
    return num_places * max(len(p.tokens) for p in group) * max(p.num_keys for p in group)


def _wanted(parts: Iterable[Part]) -> torch.Tensor:
    """Return int64[n], the rows whose logits are wanted."""
    wanted, start = [], 0
    for part in parts:
        end = start + len(part.tokens)
        wanted.append(np.arange(end - part.num_logits, end))
        start = end
    return torch.from_numpy(np.concatenate(wanted))


def _neighbours(
    group: Sequence[Part],
    starts: Mapping[int, int],
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Neighbours:
    """Return how a group of places attends.

    Args:
        group: parts of neighbouring places; a place between them that has none has no rows.
        starts: first row of each place's part in the pass.
        window: positions that a layer looks back over, itself included; `None` for all.
        dtype: of the mask.
        device: of all.
    """
    first, last = group[0].place, group[-1].place
    width = max(len(part.tokens) for part in group)
    start = min(part.past - num_seen(part.past, window) for part in group)
    keys = slice(start, max(part.num_keys for part in group))
    rows = np.full((last - first + 1, width), -1, np.int64)
    for part in group:
        begin = starts[part.place]
        rows[part.place - first, : len(part.tokens)] = np.arange(begin, begin + len(part.tokens))
    if len(group) == 1 and width == 1:
        mask = None  # the one row sees all keys that it is shown
    else:
        mask = _mask(group, first, rows.shape, keys, window, dtype).to(device)
    return Neighbours(slice(first, last + 1), keys, rows, mask)


def _mask(  # noqa: PLR0913, PLR0917  as above
    group: Sequence[Part],
    first: int,
    shape: tuple[int, ...],
    keys: slice,
    window: int | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return dtype[places, 1, rows, keys], zero where attention is allowed.

    Rows that only pad see all keys: what they give is dropped.
    """
    lowest = torch.finfo(dtype).min
    mask = torch.zeros(*shape, keys.stop - keys.start, dtype=dtype)
    for part in group:
        own = mask[part.place - first, : len(part.tokens)]
        behind = part.past - keys.start
        own[:, behind:] = lowest
        among = own[:, behind : behind + len(part.tokens)]
        among.masked_fill_(torch.from_numpy(_visible(part)), 0.0)
        if window is not None:
            rows = torch.from_numpy(part.positions)
            columns = torch.cat([torch.arange(keys.start, part.past), rows])
            hidden = rows[:, None] - columns[None, :] >= window
            own[:, : len(columns)].masked_fill_(hidden, lowest)
    return mask[:, None]


def _visible(part: Part) -> NDArray[np.bool_]:
    if part.layout is not None:
        return part.layout.visible
    return np.tri(len(part.tokens), dtype=np.bool_)
