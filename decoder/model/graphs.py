"""Passes of a few fixed shapes, each captured once as a CUDA graph and then replayed.

Prompts run eagerly. A captured pass takes one upload, one launch and one download, whatever the
number of sequences. The captured function also computes masks, the target's tokens, accepted paths
and likely tokens.
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
"""Number of warm-up runs, in which libraries choose their kernels; torch's own
make_graphed_callables uses the same number."""

Output = TypeVar("Output")


class Capture(Protocol):
    """Captures functions for replay; a captured function must not outlive the tensors it uses."""

    def __call__(self, function: Callable[[], Output]) -> Callable[[], Output]:
        """Run a function a few times, and return a faster function that does the same.

        Args:
            function: function that does the same computation on the same tensors in every call; it
                may run any number of times before this method returns.

        Returns:
            A function that repeats the computation and returns the same tensor objects in every
            call.

        Raises:
            RuntimeError: the function cannot be captured, or memory ran out.
        """
        ...


CaptureMaker = Callable[[], Capture]
"""Creates a `Capture`; called again after all captured functions were dropped."""


class CudaGraphs:
    """Captures CUDA graphs (torch.cuda.CUDAGraph) that share one memory pool.

    Args:
        device: the device of all computations.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's own
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], Output]) -> Callable[[], Output]:
        """Capture a function; see `Capture`."""
        graph = torch.cuda.CUDAGraph()
        # Return to this stream explicitly, because torch stays on its own stream if capturing
        # fails.
        with torch.cuda.stream(torch.cuda.current_stream(self._device)):
            self._warm_up(function)
            # Other threads, for example with a draft model, may use the device during the capture.
            with torch.cuda.graph(graph, self._pool, self._stream, "thread_local"):
                output = function()

        def replay() -> Output:
            graph.replay()
            return output

        return replay

    def _warm_up(self, function: Callable[[], object]) -> None:
        """Run a function a few times on the capturing stream."""
        self._stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self._stream):
                for _ in range(_WARM_UPS):
                    function()
        finally:
            torch.cuda.current_stream().wait_stream(self._stream)


def capture_on(device: torch.device) -> CaptureMaker | None:
    """Return how to capture functions on a device; `None` if that is not possible."""
    return partial(CudaGraphs, device) if device.type == "cuda" else None


Windows = Mapping[str, int | None]
"""Window of each layer type; `None` for full attention."""


_MOST_SCORES: Final = 1 << 25
"""Most scores, over all heads, in memory at a time: 128 MiB in single precision. Attention over
larger contexts is computed in pieces."""


_ALIGNED: Final = 8
"""Rows of scores are padded to a multiple of this number, because products with unaligned rows are
slow. On an H200 in bfloat16, a layer of one row over 8,192 keys took 141 µs with rows of 8,193
scores, and 31 µs with rows of 8,200."""


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """The rows of a captured pass by place, and what they see, as tensors on one device.

    Each of n places has w columns for rows. Columns that a place does not need repeat rows of other
    places. Such cells see at least themselves, and their results are not used.

    Attributes:
        rows: int64[n, w], row number in the pass for each cell.
        cells: int64[rows], cell number of each row, counted over all places.
        slots: int64[n, w], slot of each cell's own key and value, counted over all places.
        pasts: int64[n], number of keys before the rows of each place.
        positions: int64[n, w], position of each cell in its sequence. In the context, the key in
            slot i has position i.
        visible: bool[n, w, w], whether each cell sees each other cell of its place.
    """

    rows: torch.Tensor
    cells: torch.Tensor
    slots: torch.Tensor
    pasts: torch.Tensor
    positions: torch.Tensor
    visible: torch.Tensor

    def context(self, num_keys: int, window: int | None) -> torch.Tensor:
        """Return bool[n, 1 or w, num_keys], whether each cell sees each slot of the context."""
        slots = torch.arange(num_keys, device=self.pasts.device)
        seen = slots < self.pasts[:, None, None]
        if window is None:
            return seen
        return seen & (self.positions[:, :, None] - slots < window)

    def among(self, window: int | None) -> torch.Tensor:
        """Return bool[n, w, w], whether each cell sees each row's key."""
        if window is None:
            return self.visible
        distances = self.positions[:, :, None] - self.positions[:, None, :]
        return self.visible & (distances < window)

    def dense(self, num_keys: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Return dtype[n, 1, w, num_keys], an additive mask: zero where a cell sees a slot."""
        width = self.visible.shape[-1]
        columns = torch.arange(num_keys, device=self.pasts.device) - self.pasts[:, None, None]
        own = columns.clamp(0, width - 1).expand(-1, width, -1)
        is_own = (columns >= 0) & (columns < width) & self.among(window).gather(2, own)
        seen = is_own | self.context(num_keys, window)
        return additive(seen, dtype)[:, None]


class SplitMask(AttendingMask):
    """The mask of a captured pass, in two parts: for the context and for the rows themselves.

    Attributes:
        grid: the rows, and what they see.
        context: additive mask over the first slots of each place, before its rows: [n, 1, keys], or
            [n, w, keys] if a window ends within the context.
        slots: int64[n, c], slots of the keys of each place's rows, counted over all places, then
            padding slots.
        among: additive mask over the rows themselves, [n, w, c].
        capacity: number of slots in each place.
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
        """Return a mask for a model of a dtype; the values of the tensor itself have no meaning."""
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
        """Compute attention to each place's context and rows; see `AttendingMask.attend`.

        Keys and values in slots that were never written must be finite.

        Raises:
            RuntimeError: an option changes the result in an unsupported way.
        """
        refused = ["dropout"] * bool(dropout) + refused_options(options)
        if refused:
            raise RuntimeError(f"attention with {', '.join(refused)} cannot be split over keys")
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
    """Reshape [heads, places * w, size] to [heads, places, w, size]."""
    heads, cells, size = states.shape
    return states.reshape(heads, places, cells // places, size)


def split_over_keys(
    query: torch.Tensor,
    context: Sequence[torch.Tensor],
    own: Sequence[torch.Tensor],
    mask: SplitMask,
    scale: float,
) -> torch.Tensor:
    """Compute attention to the context and the rows without joining their masks or keys.

    If all scores would take too much memory, the context is processed in pieces. The softmax over
    all keys is the softmax of each piece, weighted by the piece's share of the sum of exponentials.
    Flash-decoding splits long contexts in the same way (Dao et al., 2023).

    Args:
        query: [heads, n, w, head size], the queries.
        context: keys and values of the context, each [key heads, n, keys, size]; they are views,
            not copied if n is the number of all places.
        own: keys and values of the rows, each [key heads, n, c, size].
        mask: the split mask of the pass.
        scale: factor of the scores.

    Returns:
        [heads, n, w, value size], the attention output.
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
    """Keys and values, each [key heads * n, k, size], and the mask for them, [n, 1 or w, k]."""

    keys: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> Self:
        """Return a run of keys and values, given each as [key heads, n, k, size]."""
        return cls(keys.flatten(0, 1), values.flatten(0, 1), mask)


def _attended_to(
    runs: Sequence[_KeyRun], queries: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention to several runs of keys with one softmax.

    Args:
        runs: the runs of keys and values.
        queries: [key heads * n, group * w, head size], the queries.
        scale: factor of the scores.

    Returns:
        [key heads * n, group * w, value size], the attention output, and the scores, in at least
        single precision.
    """
    batch, num_rows, _ = queries.shape
    sizes = [run.keys.shape[1] for run in runs]
    # Each part is written in place, because joining parts would take as long as computing them.
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
    """Combine the outputs of pieces, weighted by their sums of exponentials; free scores early."""
    attended, log_sums = [], []
    for part, scores in parts:
        attended.append(part.to(scores.dtype))
        log_sums.append(scores.logsumexp(dim=-1, keepdim=True))
    shares = torch.stack(log_sums).softmax(dim=0)
    return (torch.stack(attended) * shares).sum(dim=0).to(dtype)


@dataclass(frozen=True, slots=True)
class PassShape:
    """The fixed shape of a captured pass.

    Attributes:
        num_places: how many places of the cache take part: the first one, or all.
        num_rows: number of rows in the pass, over all places.
        width: the largest number of rows in one place.
        num_keys: number of slots in each place that the pass attends to.
    """

    num_places: int
    num_rows: int
    width: int
    num_keys: int


class Inputs:
    """The inputs in which passes of one shape differ, as one tensor of integers.

    Args:
        shape: the fixed shape of the passes.
        device: the model's device.

    Attributes:
        numbers: int64[4 * rows + 2 * places]. First for each row: its token, and the index of its
            parent row in its place, -1 for none. Then for each place: the number of tokens that it
            holds, and the number of its rows in the pass. Then for each row: the bits of its random
            number, and the number of the drawing that samples after it, 0 for none.
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
        """Set the inputs of a pass.

        Args:
            readings: readings in the order of their places, which the shape must include.
            pasts: number of tokens that each place holds.
            drawings: numbers of the captured drawings; other drawings do not sample in the pass.
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
    """Copy values to a device asynchronously."""
    given = torch.from_numpy(values)
    if tensor.is_cuda:
        given = given.pin_memory()  # else the host would wait for the device's current work
    tensor.copy_(given, non_blocking=True)


@dataclass(frozen=True, slots=True, eq=False)
class PassLayout:
    """The layout of a pass's rows, on the device.

    Attributes:
        grid: the rows, and what they see.
        tokens: int64[rows], token of each row.
        positions: int64[rows], position of each row in its sequence.
        slots: int64[rows], slots for the rows' keys and values, counted over all places.
        parents: int64[n, w], index of each cell's parent within its place; -1 for none.
        is_used: bool[n, w], whether each cell holds a row of its own.
    """

    grid: Grid
    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    parents: torch.Tensor
    is_used: torch.Tensor

    @classmethod
    def of(cls, numbers: torch.Tensor, shape: PassShape, capacity: int) -> Self:
        """Lay out a pass over places of `capacity` slots from its numbers; see `Inputs`.

        Padding rows come after the rows of the last place, and no other row sees them. They have
        the position of the first row, which the model surely supports.
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
    """Return bool[n, w, w], whether cell j is an ancestor of cell i, or cell i itself.

    Every round doubles the covered distance, so there are as many rounds as the width has bits.

    Args:
        parents: int64[n, w], each cell's parent; -1 for none.
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
    """Return bool[rows], whether the target's most probable tokens lead to each row.

    Of two children with the same token, the later child is followed, as in
    `decoder.sampling.walk.follow`.

    Args:
        layout: the layout of the pass's rows.
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
    """Return int32[rows, columns], the values of a `ChoiceTable`."""
    choices = logits.argmax(dim=-1)
    values, tokens = logits.topk(min(NUM_FOUND, logits.shape[-1]), dim=-1)
    columns = torch.stack([choices, _walked(layout, choices), torch.zeros_like(choices)], dim=1)
    integers = torch.cat([columns, tokens], dim=1).to(torch.int32)
    return torch.cat([integers, values.float().view(torch.int32)], dim=1)


_Outputs = dict[str, torch.Tensor]
"""Results of a pass by name: logits, [rows, vocabulary]; the table of choices, int32[rows,
columns]; hidden states, [rows, tapped, hidden size], if any are tapped; and the selections'
requests, int64[rows, 2], which are random numbers and drawings as in `Inputs`."""

_ASKED: Final = "asked"

MOST_ROWS: Final = 256
"""Number of rows in the widest captured pass: a drafter's largest tree has as many nodes. Each
power of two up to this number is captured separately, which takes time and memory."""

_MOST_DRAWINGS: Final = 8
"""Most sampling settings that are captured, each for every power of two of rows. With further
settings, sequences also sample on the device, but with separate operations."""

_FEWEST_KEYS: Final = 256
"""Keys of the shortest captured pass: smaller shapes would save little, and would be captured again
and again while a sequence is short."""

_FEWEST_TOKENS: Final = 1024
"""Slots reserved at the start, because growing invalidates captured shapes."""

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
    """Accepted tokens of the last pass that must move to other slots of their place.

    Attributes:
        place: place of the sequence.
        start: first slot to move the tokens to.
        slots: int64[k], the tokens' current slots, each at or after the token's new slot.
    """

    place: int
    start: int
    slots: NDArray[np.int64]


class Masking(Enum):
    """Who builds the masks of captured passes.

    Attributes:
        SPLIT: the passes build split masks; all layers use
            `decoder.model.attention.tree_attention`.
        DENSE: the passes build dense masks, for other attention; only passes of the first place are
            captured.
        OWN: the model builds its own masks from the number of tokens before a chain, which is on
            the device; only passes of the first place are captured.
    """

    SPLIT = "split"
    DENSE = "dense"
    OWN = "own"


class CapturedPasses:
    """Passes over all places of a cache, with so few shapes that each can be captured.

    The total number of rows (at most 256), the rows of the widest place and the visible keys are
    padded to powers of two. The number of tokens that commits move is padded too. Wider passes, and
    passes that only read prompts, run eagerly on the same cache. When buffers grow, all captured
    shapes become invalid. If weights moved or the model changed, everything is captured again. If
    capturing fails, all passes run eagerly from then on, which is logged once. A model's Python
    code runs when a shape is captured, not in every pass, so only models without foreign code are
    captured: see `has_code_of_others`.

    Args:
        model: the model to run.
        cache: cache of the sequences.
        windows: window of each of the model's layer types.
        make_capture: function that returns a `Capture`.
        masking: who builds the masks; if the model does, only chains are captured.
        max_length: most tokens of a sequence; `None` for no limit.
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
        """Whether passes are padded, that is, whether capturing has not failed."""
        return not self._is_eager

    def read(self, readings: Sequence[Reading]) -> list[Read] | None:
        """Run a captured pass after the contents of the places.

        Args:
            readings: readings of distinct places, in the order of the places.

        Returns:
            The result of each reading; `None`, without any effect, if such a pass is not captured.
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
        """Move the accepted tokens of all places at once; return whether that was done."""
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
        """Capture all shapes for sequences up to a given length, so that none is captured later.

        The layers of the cache must already have buffers, and the cache must have all of its
        places.

        Args:
            num_tokens: most tokens of a sequence, drafts included.
            num_rows: most rows of a pass; passes of at most 256 rows are captured.
        """
        longest = max(num_tokens, _FEWEST_TOKENS, *self._cache.lengths)
        self._cache.reserve(longest + _bucket(num_rows))
        self._renew()
        shapes = sorted(set(self._shapes(num_tokens, min(num_rows, MOST_ROWS))), key=_size)
        for shape in shapes[::-1]:  # the largest first, so that others reuse its memory
            if not self._is_eager:
                self._pass_for(shape)
        for count in _buckets(min(num_rows, MOST_ROWS)):
            self._copies_for(count)

    def prepare_drawing(self, drawing: Drawing, num_rows: int) -> None:
        """Capture a drawing for passes of up to `num_rows` rows; call this after `prepare`."""
        for count in _buckets(min(num_rows, MOST_ROWS)):
            if self._outputs and not self._is_eager:
                self._draw_for(drawing, count)

    def has_moved_weights(self) -> bool:
        """Return whether weights have moved; check before a captured pass."""
        return self._recorded.has_moved()

    def has_other_model(self) -> bool:
        """Return whether captures are outdated for another reason; check while a pass runs."""
        return self._recorded.has_changed()

    def _shape_of(self, readings: Sequence[Reading]) -> PassShape | None:
        """Make room in the cache; return a pass's shape, or `None` if it is not captured."""
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
        self._renew()  # the cache may have grown
        widest = max(len(each.tokens) for each in readings)
        context = max(pasts[each.place] for each in readings)
        return self._shape(last + 1, num_rows, widest, context)

    @property
    def _fewest_rows(self) -> int:
        """Rows of the narrowest pass: models build no mask for one row, so it sees all keys."""
        return 2 if self.masking is Masking.OWN else 1

    def _is_beyond(self, end: int) -> bool:
        """Return whether padding rows would exceed the positions that the model supports."""
        return self._max_length is not None and end > self._max_length

    def _shape(self, num_places: int, num_rows: int, widest: int, context: int) -> PassShape:
        """Return the shape of passes after up to `context` tokens; dense masks include the rows."""
        num_shown = max(context if self._splits else context + num_rows, _FEWEST_KEYS)
        num_keys = min(_bucket(num_shown), self._cache.capacity)
        # Else two similar shapes would both be captured.
        width = max(_bucket(widest), 2 * num_rows // num_places)
        return PassShape(num_places, num_rows, min(width, num_rows), num_keys)

    def _shapes(self, num_tokens: int, num_rows: int) -> Iterable[PassShape]:
        """Yield the shapes of all passes after sequences up to a given length."""
        num_places = len(self._cache.lengths)
        for places in {1, num_places if self._splits else 1}:
            for rows in _buckets(num_rows)[self._fewest_rows.bit_length() - 1 :]:
                for widest in _buckets(rows):
                    for context in [*_buckets(num_tokens)[:-1], num_tokens]:
                        yield self._shape(places, rows, widest, context)

    def _pass_for(self, shape: PassShape) -> _CapturedPass | None:
        """Return the captured pass of a shape, capturing it if needed; `None` if that fails."""
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
        """Set the inputs of a dummy pass after the places' contents, which the next overwrites."""
        dummy = Reading(shape.num_places - 1, np.zeros(1, np.int32))
        inputs.fill([dummy], self._cache.lengths)

    def _run(self, numbers: torch.Tensor, shape: PassShape) -> None:
        """Compute a pass, and write its results to tensors that all shapes share."""
        found = self._computed(numbers, shape)
        if not self._outputs:
            self._outputs = {
                name: rows.new_empty((MOST_ROWS, *rows.shape[1:])) for name, rows in found.items()
            }
        for name, rows in found.items():
            self._outputs[name][: len(rows)].copy_(rows)

    def _computed(self, numbers: torch.Tensor, shape: PassShape) -> _Outputs:
        """Run the model on the inputs, and return its results by name."""
        capacity = self._cache.capacity
        layout = PassLayout.of(numbers, shape, capacity)
        options: dict[str, Any] = (
            {"logits_to_keep": 0} if self._model.takes("logits_to_keep") else {}
        )
        positions, length = layout.positions, None
        if self.masking is Masking.OWN:
            length = layout.grid.pasts[0]
            positions = length + _counted(shape.num_rows, numbers)  # padding rows continue counting
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
        """Return the captured drawings for a pass's selections."""
        drawings = {each.selection.drawing for each in readings if each.selection is not None}
        found = {drawing: self._draw_for(drawing, num_rows) for drawing in drawings}
        return {drawing: draw for drawing, draw in found.items() if draw is not None}

    def _draw_for(self, drawing: Drawing, num_rows: int) -> _Draw | None:
        """Return the captured drawing for `num_rows` rows; `None` if there is none."""
        number = self._drawings.get(drawing, len(self._drawings) + 1)
        if self._is_eager or number > _MOST_DRAWINGS:
            return None
        self._drawings[drawing] = number
        count = max(num_rows, 2)  # a drawing needs at least two rows
        return self._draws.get((number, count)) or self._new_draw(drawing, number, count)

    def _new_draw(self, drawing: Drawing, number: int, num_rows: int) -> _Draw | None:
        run = self._captured(partial(self._drawn, drawing, number, num_rows))
        if run is None:
            return None
        made = self._draws[number, num_rows] = _Draw(number, run)
        return made

    def _drawn(self, drawing: Drawing, number: int, num_rows: int) -> None:
        """Sample tokens after those rows of the last pass that request this drawing."""
        points, asked_for = self._outputs[_ASKED][:num_rows].unbind(1)
        chosen = drawing(self._outputs["logits"][:num_rows], points.view(torch.float64))
        column = self._outputs["choices"][:num_rows, ChoiceTable.SELECTED]
        column.copy_(torch.where(asked_for == number, chosen.to(column.dtype), column))

    def _taken(self, readings: Sequence[Reading], drawings: Mapping[Drawing, _Draw]) -> list[Read]:
        """Copy the last pass's results, because the next pass overwrites them."""
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
        """Return the captured move of `num_tokens` tokens; `None` to move them eagerly."""
        self._renew()
        count = _bucket(num_tokens)
        if self._is_eager or count > MOST_ROWS:
            return None
        return self._copies.get(count) or self._new_copies(count)

    def _new_copies(self, count: int) -> _Copies | None:
        device = torch.device(self._model.device)
        # All zero, because capturing runs the move any number of times without changing the cache.
        pairs = torch.zeros(2, count, dtype=torch.int64, device=device)
        sources, destinations = pairs
        run = self._captured(partial(self._cache.move, sources, destinations))
        if run is None:
            return None
        made = self._copies[count] = _Copies(pairs, run)
        return made

    def _captured(self, function: Callable[[], Output]) -> Callable[[], Output] | None:
        """Capture a function; if that fails, log it, and run eagerly from then on."""
        try:
            if not self._outputs:
                function()  # allocates the shared tensors, which a capture must not do
            return self._capture(function)
        except RuntimeError as error:
            self._is_eager = True
            self._forget()
            _log.warning("passes run without captured graphs: %s", reason_of(error))
            return None

    def _renew(self) -> None:
        """Drop captured shapes if the cache's buffers were replaced."""
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
    """Return the smallest power of two that is at least a positive count."""
    return 1 << (count - 1).bit_length()


def _buckets(most: int) -> list[int]:
    """Return the powers of two to which counts up to `most` are padded."""
    return [1 << bits for bits in range((most - 1).bit_length() + 1)]
