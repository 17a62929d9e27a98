"""Passes of a few fixed shapes, each captured once and then replayed; prompts are read eagerly.

A pass is one upload, one launch and one download, however many sequences it serves: who sees whom,
the target's choices, accepted paths and likely tokens are computed in the captured function.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from logging import getLogger
from types import MappingProxyType
from typing import Any, Final, Protocol, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from decoder.model.attention import (
    AttendingMask,
    additive,
    by_place,
    refused_options,
    scale_of,
    score_products,
)
from decoder.model.cache import Frame, TreeCache
from decoder.model.passes import Read, Reading
from decoder.model.stamp import Recorded
from decoder.model.states import States
from decoder.model.user_model import UserModel
from decoder.sampling.verification import Choices, ChoiceTable, Drawing
from indexer.errors import reason_of
from retriever.drafter import NUM_FOUND

_WARM_UPS: Final = 3
"""As many as torch's own make_graphed_callables runs; in these, libraries choose their kernels."""

Output = TypeVar("Output")


class Capture(Protocol):
    """Captures functions; a captured function must not outlive the tensors that it touches."""

    def __call__(self, function: Callable[[], Output]) -> Callable[[], Output]:
        """Run a function a few times and return a faster one that does the same.

        Args:
            function: the same computation at every call, on the same tensors; it may be run any
                number of times before this returns.

        Returns:
            A function that repeats the computation and returns the same tensor objects each time.

        Raises:
            RuntimeError: it cannot be captured, or finds no memory.
        """
        ...


CaptureMaker = Callable[[], Capture]
"""Makes a capture; called again once all captured functions are dropped."""


class CudaGraphs:
    """Captures CUDA graphs (torch.cuda.CUDAGraph) that share one pool of memory.

    Args:
        device: on which everything is computed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's own
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], Output]) -> Callable[[], Output]:
        """See `Capture`."""
        graph = torch.cuda.CUDAGraph()
        # The stream is named to return to it: torch stays on its own stream if capturing fails.
        with torch.cuda.stream(torch.cuda.current_stream(self._device)):
            self._warm_up(function)
            # Other threads, such as a draft model's, may use the device during the capture.
            with torch.cuda.graph(graph, self._pool, self._stream, "thread_local"):
                output = function()

        def replay() -> Output:
            graph.replay()
            return output

        return replay

    def _warm_up(self, function: Callable[[], object]) -> None:
        """Run a function on the stream that captures it."""
        self._stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self._stream):
                for _ in range(_WARM_UPS):
                    function()
        finally:
            torch.cuda.current_stream().wait_stream(self._stream)


def capture_on(device: torch.device) -> CaptureMaker | None:
    """Return how functions are captured on a device, `None` where they cannot be."""
    return partial(CudaGraphs, device) if device.type == "cuda" else None


Windows = Mapping[str, int | None]
"""Of each layer type, `None` where attention is full."""


_MOST_SCORES: Final = 1 << 25
"""Scores of all heads that are held at a time: 128 MiB in single precision. Contexts that need more
are attended to piece by piece."""


_ALIGNED: Final = 8
"""Rows of scores are as long as a multiple of this. On an H200 a layer of one row over 8,192 keys
took 141 µs with rows of 8,193 scores and 31 with 8,200, in bfloat16: no product is fast whose rows
begin anywhere."""


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """The rows of a captured pass by their places, and what they see: tensors of one device.

    Each of n places has w columns for rows. Those that a place does not need repeat rows of others;
    they see themselves at least, and nothing of what they give is used.

    Attributes:
        rows: int64[n, w], the row of the pass in each cell.
        cells: int64[rows], the cell of each row, counted over all places.
        slots: int64[n, w], where the cells' own keys and values lie, counted over all places.
        pasts: int64[n], keys of each place that lie before its rows.
        positions: int64[n, w], of each cell in its sequence; the key in slot i stands at i.
        visible: bool[n, w, w], whether a cell sees another one of its place.
    """

    rows: torch.Tensor
    cells: torch.Tensor
    slots: torch.Tensor
    pasts: torch.Tensor
    positions: torch.Tensor
    visible: torch.Tensor

    def context(self, num_keys: int, window: int | None) -> torch.Tensor:
        """Return bool[n, 1 or w, num_keys], who sees the first slots, as far as rows lie behind."""
        slots = torch.arange(num_keys, device=self.pasts.device)
        seen = slots < self.pasts[:, None, None]
        if window is None:
            return seen
        return seen & (self.positions[:, :, None] - slots < window)

    def among(self, window: int | None) -> torch.Tensor:
        """Return bool[n, w, w], who sees the keys of the rows themselves."""
        if window is None:
            return self.visible
        distances = self.positions[:, :, None] - self.positions[:, None, :]
        return self.visible & (distances < window)

    def dense(self, num_keys: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Return dtype[n, 1, w, num_keys], zero where a cell sees one of the first slots."""
        width = self.visible.shape[-1]
        columns = torch.arange(num_keys, device=self.pasts.device) - self.pasts[:, None, None]
        own = columns.clamp(0, width - 1).expand(-1, width, -1)
        is_own = (columns >= 0) & (columns < width) & self.among(window).gather(2, own)
        seen = is_own | self.context(num_keys, window)
        return additive(seen, dtype)[:, None]


class SplitMask(AttendingMask):
    """Who sees whom in a captured pass: of the context, all rows of a place see one length.

    Attributes:
        grid: who sees whom.
        context: additive, [n, 1, keys], or [n, w, keys] where a window ends in the context: what is
            seen of the first slots of each place, as far as they lie before its rows.
        slots: int64[n, c], where the keys of each place's rows lie, counted over all places, and
            behind them slots that only pad.
        among: additive, [n, w, c], what the rows see of one another.
        capacity: slots of each place.
    """

    grid: Grid
    context: torch.Tensor
    slots: torch.Tensor
    among: torch.Tensor
    capacity: int

    @classmethod
    def of(
        cls, grid: Grid, window: int | None, num_keys: int, capacity: int, dtype: torch.dtype
    ) -> Self:
        """Return a mask for a model of a dtype; its own values mean nothing."""
        made = torch.zeros(1, 1, 1, 1).as_subclass(cls)
        sums = torch.promote_types(dtype, torch.float32)
        made.grid, made.capacity = grid, capacity
        made.context = additive(grid.context(num_keys, window), sums)
        missing = -(num_keys + grid.slots.shape[1]) % _ALIGNED
        made.slots = torch.nn.functional.pad(grid.slots, (0, missing))
        made.among = additive(torch.nn.functional.pad(grid.among(window), (0, missing)), sums)
        return made

    def to(self, *_: Any, **__: Any) -> Self:
        """Return the mask itself."""
        return self

    def attend(  # noqa: PLR0913, PLR0917  the parameters are transformers'
        self,
        module: torch.nn.Module,  # noqa: ARG002  likewise
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        dropout: float,
        scaling: float | None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend to the context of each place and to its rows; see `AttendingMask.attend`.

        Keys and values that were never written are finite.

        Raises:
            RuntimeError: an option changes the result in a way that is not known here.
        """
        refused = ["dropout"] * bool(dropout) + refused_options(options)
        if refused:
            raise RuntimeError(f"attention with {', '.join(refused)} is not divided by keys")
        grid, num_rows = self.grid, query.shape[2]
        places, width = grid.rows.shape
        is_alone = (places, width) == (1, num_rows)  # then cells are rows
        cells = query[0] if is_alone else query[0][:, grid.rows.flatten()]
        shown = slice(self.context.shape[-1])
        context = [
            by_place(each, self.capacity)[:places, :, shown].transpose(0, 1)
            for each in (key, value)
        ]
        own = [_in_cells(each[0][:, self.slots.flatten()], places) for each in (key, value)]
        scale = scale_of(query, scaling)
        attended = split_over_keys(_in_cells(cells, places), context, own, self, scale)
        by_cell = attended.flatten(1, 2).transpose(0, 1)
        return (by_cell.contiguous() if is_alone else by_cell[grid.cells])[None], None


def _in_cells(states: torch.Tensor, places: int) -> torch.Tensor:
    """Return [heads, places, w, size] of [heads, places * w, size]."""
    heads, cells, size = states.shape
    return states.reshape(heads, places, cells // places, size)


def split_over_keys(
    query: torch.Tensor,
    context: Sequence[torch.Tensor],
    own: Sequence[torch.Tensor],
    mask: SplitMask,
    scale: float,
) -> torch.Tensor:
    """Attend to the context and to the rows, without a mask or keys that hold both.

    Where all scores at once would take much memory, the context is taken in pieces. A softmax over
    all keys is that of each piece, weighted by the piece's share of the sum of exponentials, as
    flash-decoding divides long contexts (Dao et al., 2023).

    Args:
        query: [heads, n, w, head size].
        context: keys and values, [key heads, n, keys, size] each: views, which are not copied where
            n are all places.
        own: keys and values of the rows, [key heads, n, c, size] each.
        mask: who sees what.
        scale: of the scores.

    Returns:
        [heads, n, w, value size].
    """
    heads, places, width, size = query.shape
    key_heads = len(context[0])
    by_group = query.reshape(key_heads, -1, places, width, size).transpose(1, 2)
    queries = by_group.reshape(key_heads * places, -1, size)
    piece = max(_MOST_SCORES // (heads * places * width), 1)
    keys, values = (torch.split(each, piece, dim=2) for each in context)
    masks = torch.split(mask.context, piece, dim=2)
    runs = [_KeyRun.of(*each) for each in zip(keys, values, masks, strict=True)]
    rows = _KeyRun.of(own[0], own[1], mask.among)
    divided = [*([run] for run in runs[:-1]), [runs[-1], rows]]
    attended = (
        _attended_to(divided[0], queries, scale)[0]
        if len(divided) == 1
        else _joined((_attended_to(each, queries, scale) for each in divided), query.dtype)
    )
    by_place = attended.view(key_heads, places, -1, width, attended.shape[-1])
    return by_place.transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True, slots=True, eq=False)
class _KeyRun:
    """Keys and values, [key heads * n, k, size] each, and what is seen of them, [n, 1 or w, k]."""

    keys: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> Self:
        """Make one of [key heads, n, k, size] each."""
        return cls(keys.flatten(0, 1), values.flatten(0, 1), mask)


def _attended_to(
    runs: Sequence[_KeyRun], queries: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to some runs of keys by one softmax.

    Args:
        runs: of keys.
        queries: [key heads * n, group * w, head size].
        scale: of the scores.

    Returns:
        [key heads * n, group * w, value size], and the scores, in single precision at least.
    """
    batch, num_rows, _ = queries.shape
    sizes = [run.keys.shape[1] for run in runs]
    # Written in parts: to put them together takes as long as to make them.
    scores = runs[0].mask.new_empty(batch, num_rows, sum(sizes))
    places, width = len(runs[0].mask), runs[-1].mask.shape[1]
    by_cell = scores.view(-1, places, num_rows // width, width, sum(sizes))
    for run, part in zip(runs, torch.split(by_cell, sizes, dim=-1), strict=True):
        products = score_products(queries, run.keys).view(part.shape)
        torch.add(run.mask[:, None], products, alpha=scale, out=part)
    shares = torch.split(scores.softmax(dim=-1).to(queries.dtype), sizes, dim=-1)
    attended = torch.bmm(shares[0], runs[0].values)
    for run, share in zip(runs[1:], shares[1:], strict=True):
        attended.baddbmm_(share, run.values)
    return attended, scores


def _joined(parts: Iterable[tuple[torch.Tensor, torch.Tensor]], dtype: torch.dtype) -> torch.Tensor:
    """Weigh results of pieces by the sums of their exponentials; scores are dropped one by one."""
    attended, log_sums = [], []
    for part, scores in parts:
        attended.append(part.to(scores.dtype))
        log_sums.append(scores.logsumexp(dim=-1, keepdim=True))
    shares = torch.stack(log_sums).softmax(dim=0)
    return (torch.stack(attended) * shares).sum(dim=0).to(dtype)


@dataclass(frozen=True, slots=True)
class PassShape:
    """What is fixed in a captured pass.

    Attributes:
        num_places: the first places of the cache, one or all.
        num_rows: of the pass, all places together.
        width: most rows of a place.
        num_keys: slots of each place that are attended to.
    """

    num_places: int
    num_rows: int
    width: int
    num_keys: int


class Inputs:
    """All that differs from pass to pass of a shape, in one tensor of numbers.

    Args:
        shape: of the passes.
        device: the model's.

    Attributes:
        numbers: int64[4 * rows + 2 * places]: the rows' tokens, and for each row the row of its
            place that is its parent, -1 for none; for each place how many tokens it holds, and how
            many rows of the pass are its own; for each row the bits of its random number, and the
            number of the drawing that chooses after it, 0 for none.
    """

    def __init__(self, shape: PassShape, device: torch.device) -> None:
        self._shape = shape
        self.numbers = torch.zeros(
            4 * shape.num_rows + 2 * shape.num_places, dtype=torch.int64, device=device
        )

    def fill(
        self,
        readings: Sequence[Reading],
        pasts: Sequence[int],
        drawings: Mapping[Drawing, int] = MappingProxyType({}),
    ) -> None:
        """Set what a pass reads.

        Args:
            readings: in the order of their places, which are among those of the shape.
            pasts: tokens that each place holds.
            drawings: their numbers; no other ones choose.
        """
        num_rows, num_places = self._shape.num_rows, self._shape.num_places
        numbers = np.zeros(len(self.numbers), np.int64)
        tokens, parents, held, widths, points, drawn_by = np.split(
            numbers, np.cumsum([num_rows, num_rows, num_places, num_places, num_rows])
        )
        parents[:] = -1
        held[:] = pasts[:num_places]
        start = 0
        for reading in readings:
            end = start + len(reading.tokens)
            tokens[start:end] = reading.tokens
            parents[start:end] = reading.parents
            widths[reading.place] = end - start
            if reading.selection is not None:
                rows = slice(end - reading.num_logits, end)
                points[rows] = reading.selection.points.view(np.int64)
                drawn_by[rows] = drawings.get(reading.selection.drawing, 0)
            start = end
        tokens[start:] = tokens[0]
        _upload(numbers, self.numbers)


def _upload(values: NDArray[np.int64], tensor: torch.Tensor) -> None:
    """Copy values to a device without waiting for it."""
    given = torch.from_numpy(values)
    if tensor.is_cuda:
        given = given.pin_memory()  # else the host would wait for what the device does already
    tensor.copy_(given, non_blocking=True)


@dataclass(frozen=True, slots=True, eq=False)
class PassLayout:
    """The rows of a pass, laid out on the device.

    Attributes:
        grid: who sees whom.
        tokens: int64[rows].
        positions: int64[rows].
        slots: int64[rows], where the rows' keys and values go, counted over all places.
        parents: int64[n, w], the cell of its place that is a cell's parent, -1 for none.
        is_used: bool[n, w], whether a cell has a row of its own.
    """

    grid: Grid
    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    parents: torch.Tensor
    is_used: torch.Tensor

    @classmethod
    def of(cls, numbers: torch.Tensor, shape: PassShape, capacity: int) -> Self:
        """Lay out the numbers of a pass over places of `capacity` slots; see `Inputs`.

        Rows that are not needed go behind those of the last place, and nothing sees them. They
        stand where the first row does, within what positions a model knows.
        """
        num_rows, width = shape.num_rows, shape.width
        tokens, parents = numbers[: 2 * num_rows].view(2, -1)
        pasts, widths = numbers[2 * num_rows :][: 2 * shape.num_places].view(2, -1)
        starts = widths.cumsum(0) - widths
        row, column = _counted(num_rows, numbers), _counted(width, numbers)
        places = (row[:, None] >= starts).sum(1) - 1
        offsets = row - starts[places]
        rows = (starts[:, None] + column).clamp(max=num_rows - 1)
        cells = places * width + offsets.clamp(max=width - 1)
        above = parents[rows]
        visible = _ancestors(above)
        positions = pasts[:, None] + visible.sum(2) - 1
        of_rows = positions.flatten()[cells]
        firsts = _counted(shape.num_places, numbers) * capacity
        slots = firsts[:, None] + (pasts[:, None] + column).clamp(max=capacity - 1)
        return cls(
            Grid(rows, cells, slots, pasts, positions, visible),
            tokens,
            torch.where(row < widths.sum(), of_rows, of_rows[:1]),
            places * capacity + pasts[places] + offsets,
            above,
            column < widths[:, None],
        )


def _counted(count: int, like: torch.Tensor) -> torch.Tensor:
    return torch.arange(count, device=like.device)


def _ancestors(parents: torch.Tensor) -> torch.Tensor:
    """Return bool[n, w, w], whether a cell is another one's ancestor or the cell itself.

    Every round doubles how far up is seen, so that there are as many as the width has bits.

    Args:
        parents: int64[n, w], -1 for none.
    """
    width = parents.shape[1]
    cells = _counted(width, parents)
    seen = (cells[:, None] == cells).expand(len(parents), -1, -1)
    up = torch.where(parents < 0, cells, parents)
    for _ in range((width - 1).bit_length()):
        seen = seen | seen.gather(1, up[:, :, None].expand(-1, -1, width))
        up = up.gather(1, up)
    return seen


def _walked(layout: PassLayout, choices: torch.Tensor) -> torch.Tensor:
    """Return bool[rows], whether the target's choices lead to a row.

    Of two children with the same token, the later one is followed, as in
    `decoder.sampling.verification.follow`.

    Args:
        layout: the pass.
        choices: int64[rows], the target's token after each row.
    """
    grid = layout.grid
    tokens, above = layout.tokens[grid.rows], layout.parents
    wanted = choices[grid.rows].gather(1, above.clamp(min=0))
    is_alike = (above[:, :, None] == above[:, None, :]) & (tokens[:, :, None] == tokens[:, None, :])
    column = _counted(above.shape[1], above)
    is_later = (column > column[:, None]) & layout.is_used[:, None, :]
    is_right = (above < 0) | ((tokens == wanted) & ~(is_alike & is_later).any(2))
    is_reached = ~(grid.visible & ~is_right[:, None, :]).any(2)
    return is_reached.flatten()[grid.cells]


def _choice_table(layout: PassLayout, logits: torch.Tensor) -> torch.Tensor:
    """Return int32[rows, columns], what `ChoiceTable` reads."""
    choices = logits.argmax(dim=-1)
    values, tokens = logits.topk(min(NUM_FOUND, logits.shape[-1]), dim=-1)
    columns = torch.stack([choices, _walked(layout, choices), torch.zeros_like(choices)], dim=1)
    integers = torch.cat([columns, tokens], dim=1).to(torch.int32)
    return torch.cat([integers, values.float().view(torch.int32)], dim=1)


_Outputs = dict[str, torch.Tensor]
"""By name: logits [rows, vocabulary], the table of choices int32[rows, columns], states
[rows, tapped, hidden size] if any are tapped, and what selections ask for, int64[rows, 2]: random
numbers and drawings, as in `Inputs`."""

_ASKED: Final = "asked"

MOST_ROWS: Final = 256
"""Rows of the widest captured pass: as many as a drafter's largest tree has nodes. Each power of
two below is captured by itself, which takes time and memory."""

_MOST_DRAWINGS: Final = 8
"""Settings of sampling that are captured: each for every power of two of rows. Sequences with more
of them choose on the device all the same, by operations of their own."""

_FEWEST_KEYS: Final = 256
"""Keys that the shortest captured pass is shown: smaller shapes would save little and be captured
again and again while a sequence is short."""

_FEWEST_TOKENS: Final = 1024
"""Slots that are reserved at the start, because growing makes captured shapes void."""

_log = getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _CapturedPass:
    inputs: Inputs
    run: Callable[[], object]


@dataclass(frozen=True, slots=True, eq=False)
class _Copies:
    sources_and_destinations: torch.Tensor
    run: Callable[[], None]


@dataclass(frozen=True, slots=True, eq=False)
class _Draw:
    number: int
    run: Callable[[], None]


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """Tokens of the last pass that a sequence keeps elsewhere in its place.

    Attributes:
        place: of the sequence.
        start: where they are to lie.
        slots: int64[k], where they lie, each at or past its new slot.
    """

    place: int
    start: int
    slots: NDArray[np.int64]


class Masking(Enum):
    """Who makes the masks of captured passes.

    Attributes:
        SPLIT: they do; all layers attend by `decoder.model.attention.tree_attention`.
        DENSE: they do, for another attention; only passes of the first place are captured.
        OWN: the model, from the number of tokens before a chain, which stands on the device; only
            passes of the first place are captured.
    """

    SPLIT = "split"
    DENSE = "dense"
    OWN = "own"


class CapturedPasses:
    """Passes over all places of a cache whose shapes are few, so that each can be captured.

    Rows of all places together, rows of the widest place and shown keys are padded to powers of
    two, rows up to 256. The tokens that commits move are padded, too. Wider passes, and those that
    only read prompts, run eagerly, on the same cache. Growing buffers make all captured shapes
    void, and where weights have moved or the model is another one, everything is captured again.
    Where capturing fails, all passes run eagerly from then on, and the log says so once. A model's
    Python code runs when a shape is captured, not at every pass, so only models without code of
    others are captured: `has_code_of_others`.

    Args:
        model: the model to run.
        cache: of its sequences.
        windows: of the model's layer types.
        make_capture: how shapes are captured.
        masking: who makes masks; chains alone are captured where the model does.
        max_length: most tokens of a sequence, `None` where there is no limit.
    """

    def __init__(  # noqa: PLR0913, PLR0917  what a pass is made of
        self,
        model: UserModel,
        cache: TreeCache,
        windows: Windows,
        make_capture: CaptureMaker,
        masking: Masking,
        max_length: int | None,
    ) -> None:
        self._model = model
        self._cache = cache
        self._windows = dict(windows)
        self._make_capture = make_capture
        self.masking, self._max_length = masking, max_length
        self._splits = masking is Masking.SPLIT
        self._is_eager = False
        self._outputs: _Outputs = {}
        self._drawings: dict[Drawing, int] = {}
        self._forget()

    @property
    def is_padding(self) -> bool:
        """Whether passes are padded; not where capturing failed."""
        return not self._is_eager

    def read(self, readings: Sequence[Reading]) -> list[Read] | None:
        """Run a pass behind what the places hold.

        Args:
            readings: of distinct places, in their order.

        Returns:
            What each reads, or `None` where such a pass is not captured, and nothing was done.
        """
        if (
            self._is_eager
            or self._cache.capacity == 0
            or all(each.tree is None for each in readings)
        ):
            return None
        shape = self._shape_of(readings)
        found = None if shape is None else self._pass_for(shape)
        if shape is None or found is None:
            return None
        pasts = self._cache.lengths
        draws = self._draws_for(readings, shape.num_rows)
        found.inputs.fill(
            readings, pasts, {drawing: each.number for drawing, each in draws.items()}
        )
        found.run()
        for draw in draws.values():
            draw.run()
        for reading in readings:
            self._cache.hold(pasts[reading.place] + len(reading.tokens), reading.place)
        return self._taken(readings, draws)

    def move(self, kept: Sequence[Kept]) -> bool:
        """Move tokens that commits keep, of all places at once; return whether it was done."""
        copies = self._copies_for(sum(len(each.slots) for each in kept))
        if copies is None:
            return False
        pairs = copies.sources_and_destinations
        firsts = [each.place * self._cache.capacity for each in kept]
        sources = [each.slots + first for each, first in zip(kept, firsts, strict=True)]
        destinations = [
            each.start + first + np.arange(len(each.slots))
            for each, first in zip(kept, firsts, strict=True)
        ]
        numbers = np.stack([np.concatenate(sources), np.concatenate(destinations)])
        missing = pairs.shape[1] - numbers.shape[1]
        _upload(np.pad(numbers, ((0, 0), (0, missing)), "edge"), pairs)
        copies.run()
        for each in kept:
            self._cache.hold(each.start + len(each.slots), each.place)
        return True

    def prepare(self, num_tokens: int, num_rows: int) -> None:
        """Capture all shapes of sequences up to a length, so that none is captured later.

        The layers of the cache have appeared, and it has all of its places.

        Args:
            num_tokens: of a sequence, drafts included.
            num_rows: of a pass, at most 256 of which are captured.
        """
        longest = max(num_tokens, _FEWEST_TOKENS, *self._cache.lengths)
        self._cache.reserve(longest + _bucket(num_rows))
        self._renew()
        shapes = sorted(set(self._shapes(num_tokens, min(num_rows, MOST_ROWS))), key=_size)
        for shape in shapes[::-1]:  # the largest first: others find their memory in its pool
            if not self._is_eager:
                self._pass_for(shape)
        for count in _buckets(min(num_rows, MOST_ROWS)):
            self._copies_for(count)

    def prepare_drawing(self, drawing: Drawing, num_rows: int) -> None:
        """Capture what sequences choose by, for passes of up to so many rows, once these are."""
        for count in _buckets(min(num_rows, MOST_ROWS)):
            if self._outputs and not self._is_eager:
                self._draw_for(drawing, count)

    def has_moved_weights(self) -> bool:
        """Return whether captured passes would read weights where they lay; to ask before one."""
        return self._recorded.has_moved()

    def has_other_model(self) -> bool:
        """Return whether what was captured is else out of date; to ask while a pass is computed."""
        return self._recorded.has_changed()

    def _shape_of(self, readings: Sequence[Reading]) -> PassShape | None:
        """Return the shape of a pass, with room in the cache for it; `None` if none is captured."""
        num_rows = _bucket(max(sum(len(each.tokens) for each in readings), self._fewest_rows))
        is_first_alone = readings[-1].place == 0
        if num_rows > MOST_ROWS or not (self._splits or is_first_alone):
            return None
        pasts = self._cache.lengths
        if self.masking is Masking.OWN and self._is_beyond(pasts[0] + num_rows):
            return None
        ends = [pasts[each.place] + len(each.tokens) for each in readings]
        last = 0 if is_first_alone else len(pasts) - 1
        self._cache.reserve(max(*ends, pasts[last] + num_rows, _FEWEST_TOKENS))
        self._renew()  # it may have grown
        widest = max(len(each.tokens) for each in readings)
        context = max(pasts[each.place] for each in readings)
        return self._shape(last + 1, num_rows, widest, context)

    @property
    def _fewest_rows(self) -> int:
        """Rows of the narrowest pass: models make no mask for one, which would see all slots."""
        return 2 if self.masking is Masking.OWN else 1

    def _is_beyond(self, end: int) -> bool:
        """Return whether rows that pad would stand where a model knows no positions."""
        return self._max_length is not None and end > self._max_length

    def _shape(self, num_places: int, num_rows: int, widest: int, context: int) -> PassShape:
        """Return the shape of passes behind up to `context` tokens; dense masks show rows, too."""
        num_shown = max(context if self._splits else context + num_rows, _FEWEST_KEYS)
        num_keys = min(_bucket(num_shown), self._cache.capacity)
        # Two shapes that differ little would be captured twice.
        width = max(_bucket(widest), 2 * num_rows // num_places)
        return PassShape(num_places, num_rows, min(width, num_rows), num_keys)

    def _shapes(self, num_tokens: int, num_rows: int) -> Iterable[PassShape]:
        """Return the shapes of all passes behind sequences up to a length."""
        num_places = len(self._cache.lengths)
        for places in {1, num_places if self._splits else 1}:
            for rows in _buckets(num_rows)[self._fewest_rows.bit_length() - 1 :]:
                for widest in _buckets(rows):
                    for context in [*_buckets(num_tokens)[:-1], num_tokens]:
                        yield self._shape(places, rows, widest, context)

    def _pass_for(self, shape: PassShape) -> _CapturedPass | None:
        """Return the captured pass of a shape; `None` where capturing fails."""
        return self._passes.get(shape) or self._new_pass(shape)

    def _new_pass(self, shape: PassShape) -> _CapturedPass | None:
        inputs = Inputs(shape, torch.device(self._model.device))
        self._begin(inputs, shape)
        captured = self._captured(partial(self._run, inputs.numbers, shape))
        if captured is None:
            return None
        made = self._passes[shape] = _CapturedPass(inputs, captured)
        return made

    def _begin(self, inputs: Inputs, shape: PassShape) -> None:
        """Set the inputs of a dummy pass behind what places hold; the next pass overwrites it."""
        dummy = Reading(shape.num_places - 1, np.zeros(1, np.int32))
        inputs.fill([dummy], self._cache.lengths)

    def _run(self, numbers: torch.Tensor, shape: PassShape) -> None:
        """Leave what a pass brings in tensors that all shapes share."""
        found = self._computed(numbers, shape)
        if not self._outputs:
            self._outputs = {
                name: rows.new_empty((MOST_ROWS, *rows.shape[1:])) for name, rows in found.items()
            }
        for name, rows in found.items():
            self._outputs[name][: len(rows)].copy_(rows)

    def _computed(self, numbers: torch.Tensor, shape: PassShape) -> _Outputs:
        """Run what the inputs say through the model."""
        capacity = self._cache.capacity
        layout = PassLayout.of(numbers, shape, capacity)
        options: dict[str, Any] = (
            {"logits_to_keep": 0} if self._model.takes("logits_to_keep") else {}
        )
        positions, length = layout.positions, None
        if self.masking is Masking.OWN:
            length = layout.grid.pasts[0]
            positions = length + _counted(shape.num_rows, numbers)  # rows that pad go on
        if self._model.takes("position_ids"):
            options["position_ids"] = positions[None]
        frame = Frame(layout.slots, None if self._splits else shape.num_keys, length)
        with self._cache.framed(frame) as states:
            output = self._model.run(
                cache=states,
                input_ids=layout.tokens[None],
                attention_mask=self._masks(layout.grid, shape, capacity),
                **options,
            )
        logits = output.logits[0]
        found = {
            "logits": logits,
            "choices": _choice_table(layout, logits),
            _ASKED: numbers[-2 * shape.num_rows :].view(2, -1).t(),
        }
        if self._model.states:
            found["states"] = torch.stack(list(self._model.states.values()), dim=1)
        return found

    def _masks(
        self, grid: Grid, shape: PassShape, capacity: int
    ) -> torch.Tensor | dict[str, torch.Tensor] | None:
        if self.masking is Masking.OWN:
            return None
        masks = {
            kind: self._mask(grid, window, shape, capacity)
            for kind, window in self._windows.items()
        }
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _mask(
        self, grid: Grid, window: int | None, shape: PassShape, capacity: int
    ) -> torch.Tensor:
        if self._splits:
            return SplitMask.of(grid, window, shape.num_keys, capacity, self._model.dtype)
        return grid.dense(shape.num_keys, window, self._model.dtype)

    def _draws_for(self, readings: Sequence[Reading], num_rows: int) -> dict[Drawing, _Draw]:
        """Return how the rows of a pass are chosen after, as far as that is captured."""
        drawings = {each.selection.drawing for each in readings if each.selection is not None}
        found = {drawing: self._draw_for(drawing, num_rows) for drawing in drawings}
        return {drawing: draw for drawing, draw in found.items() if draw is not None}

    def _draw_for(self, drawing: Drawing, num_rows: int) -> _Draw | None:
        """Return the captured drawing for so many rows; `None` where there is none for it."""
        number = self._drawings.get(drawing, len(self._drawings) + 1)
        if self._is_eager or number > _MOST_DRAWINGS:
            return None
        self._drawings[drawing] = number
        count = max(num_rows, 2)  # a drawing takes at least two
        return self._draws.get((number, count)) or self._new_draw(drawing, number, count)

    def _new_draw(self, drawing: Drawing, number: int, num_rows: int) -> _Draw | None:
        run = self._captured(partial(self._drawn, drawing, number, num_rows))
        if run is None:
            return None
        made = self._draws[number, num_rows] = _Draw(number, run)
        return made

    def _drawn(self, drawing: Drawing, number: int, num_rows: int) -> None:
        """Choose after those rows of the last pass that ask for a drawing."""
        points, asked_for = self._outputs[_ASKED][:num_rows].unbind(1)
        chosen = drawing(self._outputs["logits"][:num_rows], points.view(torch.float64))
        column = self._outputs["choices"][:num_rows, ChoiceTable.SELECTED]
        column.copy_(torch.where(asked_for == number, chosen.to(column.dtype), column))

    def _taken(self, readings: Sequence[Reading], drawings: Mapping[Drawing, _Draw]) -> list[Read]:
        """Return copies of what the last pass computed: the next one writes to the same tensors."""
        num_rows = sum(len(each.tokens) for each in readings)
        kept = {
            name: rows[:num_rows].clone() for name, rows in self._outputs.items() if name != _ASKED
        }
        table = ChoiceTable(kept["choices"])
        found, start = [], 0
        for reading in readings:
            rows = slice(start, start + len(reading.tokens))
            wanted = slice(rows.stop - reading.num_logits, rows.stop)
            logits = kept["logits"][wanted]
            selection = reading.selection
            if selection is not None and selection.drawing not in drawings:
                selection = None
            choices = Choices(table, wanted, logits, selection)
            found.append(Read(logits, self._states(kept, rows), choices))
            start = rows.stop
        return found

    def _states(self, kept: _Outputs, rows: slice) -> States:
        return {number: kept["states"][rows, at] for at, number in enumerate(self._model.states)}

    def _copies_for(self, num_tokens: int) -> _Copies | None:
        """Return the captured move of so many tokens in the cache; `None` to move them eagerly."""
        self._renew()
        count = _bucket(num_tokens)
        if self._is_eager or count > MOST_ROWS:
            return None
        return self._copies.get(count) or self._new_copies(count)

    def _new_copies(self, count: int) -> _Copies | None:
        device = torch.device(self._model.device)
        # All zero: capturing runs the move any number of times, and must not change the cache.
        pairs = torch.zeros(2, count, dtype=torch.int64, device=device)
        sources, destinations = pairs
        run = self._captured(partial(self._cache.move, sources, destinations))
        if run is None:
            return None
        made = self._copies[count] = _Copies(pairs, run)
        return made

    def _captured(self, function: Callable[[], Output]) -> Callable[[], Output] | None:
        """Capture a function; where that fails, log it and run eagerly from now on."""
        try:
            if not self._outputs:
                function()  # makes tensors that all shapes share, which a capture only writes to
            return self._capture(function)
        except RuntimeError as error:
            self._is_eager = True
            self._forget()
            _log.warning("passes run without captured graphs: %s", reason_of(error))
            return None

    def _renew(self) -> None:
        """Drop captured shapes whose buffers were replaced."""
        if self._cache.num_growths != self._num_growths:
            self._forget()

    def _forget(self) -> None:
        self._passes: dict[PassShape, _CapturedPass] = {}
        self._copies: dict[int, _Copies] = {}
        self._draws: dict[tuple[int, int], _Draw] = {}
        self._capture = self._make_capture()
        self._num_growths = self._cache.num_growths
        self._recorded = Recorded(self._model.model)


def _size(shape: PassShape) -> tuple[int, ...]:
    return shape.num_rows, shape.num_places * shape.width, shape.num_keys


def _bucket(count: int) -> int:
    """Return the least power of two that is not below a positive count."""
    return 1 << (count - 1).bit_length()


def _buckets(most: int) -> list[int]:
    """Return the powers of two that counts up to a positive one are padded to."""
    return [1 << bits for bits in range((most - 1).bit_length() + 1)]
