"""Attention for grouped heads without repeated keys: a group's queries are rows of one product."""

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

TREE_ATTENTION: Final = "foredraft_tree"
"""The name under which transformers knows the attention below and the masks that go with it."""

_UNFUSED_SCORES: Final = 7000
"""Scores of a head (rows of its group times keys) from which two products and a softmax are faster
than the fused kernel. Measured in half precision on a CPU: the fused kernel takes 48 µs against 55
for 12 rows and 400 keys, and 177 against 96 for 24 rows and 1,000."""

_HALF: Final = (torch.bfloat16, torch.float16)

_TAKEN: Final = {"module", "query", "key", "value", "attention_mask", "scaling", "is_causal"}
_REFUSED: Final = {"softcap"} | (
    inspect.signature(sdpa_attention_forward).parameters.keys() - _TAKEN - {"kwargs", "dropout"}
)
"""Options that change the result of sdpa attention, those of later versions included."""


@dataclass(frozen=True, slots=True, eq=False)
class Neighbours:
    """Neighbouring places of a cache, whose rows of a packed pass attend in one call.

    Attributes:
        places: of n sequences.
        keys: slots of each place that some row of it sees.
        rows: int64[n, w], the rows of each place; what only pads names the row behind the last.
        mask: additive, [n, 1, w, keys]; `None` where a single row sees all of them.
    """

    places: slice
    keys: slice
    rows: torch.Tensor
    mask: torch.Tensor | None

    def to(self, device: torch.device) -> Self:
        """Return the same on another device."""
        mask = None if self.mask is None else self.mask.to(device)
        return replace(self, rows=self.rows.to(device), mask=mask)


class PackedMask(torch.Tensor):
    """Stands for the mask of a pass whose rows belong to many sequences.

    Models hand a mask of four dimensions on as it is. The rows of the pass are those of its
    sequences, one after another, and its keys those of all places of a cache. It belongs to no
    device: what moves tensors between layers leaves it, and each layer takes its parts `on` its
    own.

    Attributes:
        neighbours: who attends to what; every row is in one of them.
        capacity: slots of each place.
        copies: of the neighbours, on other devices.
    """

    neighbours: Sequence[Neighbours]
    capacity: int
    copies: dict[torch.device, Sequence[Neighbours]]

    @classmethod
    def of(cls, neighbours: Sequence[Neighbours], capacity: int) -> Self:
        """Return a mask; its own values mean nothing."""
        made = torch.zeros(1, 1, 1, 1).as_subclass(cls)
        made.neighbours, made.capacity = neighbours, capacity
        made.copies = {}
        return made

    def to(self, *_: Any, **__: Any) -> Self:
        """Return the mask itself."""
        return self

    def on(self, device: torch.device) -> Sequence[Neighbours]:
        """Return who attends to what on a device, copied there once."""
        if self.neighbours[0].rows.device == device:
            return self.neighbours
        if device not in self.copies:
            self.copies[device] = [each.to(device) for each in self.neighbours]
        return self.copies[device]


_MOST_SCORES: Final = 1 << 25
"""Scores of all heads that are held at a time: 128 MiB in single precision. Contexts that need more
are attended to piece by piece."""


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
        return _additive(seen, dtype)[:, None]


class SplitMask(torch.Tensor):
    """Stands for the mask of a captured pass: of the context, all rows of a place see one length.

    Its form is that of a mask, as for `PackedMask`; its keys are those of all places of a cache.

    Attributes:
        grid: who sees whom.
        context: additive, [n, 1, keys], or [n, w, keys] where a window ends in the context: what is
            seen of the first slots of each place, as far as they lie before its rows.
        among: additive, [n, w, w], what the rows see of one another.
        capacity: slots of each place.
    """

    grid: Grid
    context: torch.Tensor
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
        made.context = _additive(grid.context(num_keys, window), sums)
        made.among = _additive(grid.among(window), sums)
        return made

    def to(self, *_: Any, **__: Any) -> Self:
        """Return the mask itself."""
        return self


def _additive(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return zero where something is seen, and the lowest number elsewhere."""
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return mask.masked_fill_(~seen, torch.finfo(dtype).min)


def tree_attention(  # noqa: PLR0913, PLR0917  the parameters are transformers'
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Return the result of transformers' sdpa attention, faster for single rows and for trees.

    The heads of a group share keys and values, so their queries are rows of one product: only the
    mask is repeated. Passes that are neither a single row nor a tree, such as prompts, and passes
    with an unknown option go to transformers' own function.

    Args:
        module: the layer.
        query: [batch, heads, rows, head size].
        key: [batch, key heads, keys, head size]; query head h belongs to key head
            h // (heads / key heads).
        value: [batch, key heads, keys, value size].
        attention_mask: additive, [batch or 1, 1, rows, keys], or none; or of a packed or captured
            pass.
        dropout: probability; zero outside training.
        scaling: of the scores; by default one over the root of the head size.
        options: further arguments of the model.

    Returns:
        [batch, rows, heads, value size], and no attention weights.
    """
    if isinstance(attention_mask, PackedMask):
        return _packed_attention(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
    if isinstance(attention_mask, SplitMask):
        return _split_attention(query, key, value, attention_mask, scaling=scaling, **options)
    if dropout or not _is_folded(query, attention_mask, options):
        output: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **options
        )
        return output
    batch, heads, rows, size = query.shape
    groups = heads // key.shape[1]
    scale = size**-0.5 if scaling is None else scaling
    queries = folded(query, key.shape[1])
    mask = None if attention_mask is None else attention_mask.repeat(1, 1, groups, 1)
    if mask is not None and _pays_unfused(queries, key):
        attended = _unfused(queries, key, value, mask, scale)
    else:
        attended = torch.nn.functional.scaled_dot_product_attention(
            queries, key, value, attn_mask=mask, scale=scale
        )
    return attended.reshape(batch, heads, rows, -1).transpose(1, 2).contiguous(), None


def _packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packed: PackedMask,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend in each group of neighbours; [1, rows, heads, value size], and no weights.

    Args:
        module: the layer.
        query: [1, heads, rows, head size].
        key: [1, key heads, places * capacity, head size].
        value: [1, key heads, places * capacity, value size].
        packed: the groups.
        options: of `tree_attention`.
    """
    num_rows = query.shape[2]
    given = torch.nn.functional.pad(query[0].transpose(0, 1), (0, 0, 0, 0, 0, 1))
    attended = query.new_empty(num_rows + 1, query.shape[1], value.shape[-1])
    keys, values = _by_place(key, packed.capacity), _by_place(value, packed.capacity)
    for group in packed.on(query.device):
        output, _ = tree_attention(
            module,
            given[group.rows].transpose(1, 2),
            keys[group.places, :, group.keys],
            values[group.places, :, group.keys],
            group.mask,
            **options,
        )
        attended[group.rows.flatten()] = output.flatten(0, 1)
    return attended[None, :num_rows], None


def _split_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: SplitMask,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend to the context of each place and to its rows; [1, rows, heads, value size].

    Args: as of `_packed_attention`; keys and values that were never written are finite.

    Raises:
        RuntimeError: an option changes the result in a way that is not known here.
    """
    if refused := sorted(name for name in _REFUSED if options.get(name) is not None):
        raise RuntimeError(f"attention with {', '.join(refused)} is not divided by keys")
    grid, scaling, num_rows = mask.grid, options.get("scaling"), query.shape[2]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    places, width = grid.rows.shape
    is_alone = (places, width) == (1, num_rows)  # then cells are rows
    cells = query[0] if is_alone else query[0][:, grid.rows.flatten()]
    shown = slice(mask.context.shape[-1])
    context = [
        _by_place(each, mask.capacity)[:places, :, shown].transpose(0, 1) for each in (key, value)
    ]
    own = [_in_cells(each[0][:, grid.slots.flatten()], places) for each in (key, value)]
    attended = split_over_keys(_in_cells(cells, places), context, own, mask, scale)
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
        own: keys and values of the rows, [key heads, n, w, size] each.
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
    runs = [_Run.of(*each) for each in zip(keys, values, masks, strict=True)]
    rows = _Run.of(own[0], own[1], mask.among)
    divided = [*([run] for run in runs[:-1]), [runs[-1], rows]]
    attended = (
        _attended(queries, divided[0], scale)[0]
        if len(divided) == 1
        else _joined((_attended(queries, each, scale) for each in divided), query.dtype)
    )
    by_place = attended.view(key_heads, places, -1, width, attended.shape[-1])
    return by_place.transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """Keys and values, [key heads * n, k, size] each, and what is seen of them, [n, 1 or w, k]."""

    keys: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> Self:
        """Make one of [key heads, n, k, size] each."""
        return cls(keys.flatten(0, 1), values.flatten(0, 1), mask)


def _attended(
    queries: torch.Tensor, runs: Sequence[_Run], scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to some runs of keys by one softmax.

    Args:
        queries: [key heads * n, group * w, head size].
        runs: of keys.
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
        products = torch.bmm(queries, run.keys.transpose(1, 2)).view(part.shape)
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


def _by_place(states: torch.Tensor, capacity: int) -> torch.Tensor:
    """Return [places, heads, capacity, size], a view of [1, heads, places * capacity, size]."""
    _, heads, _, size = states.shape
    return states.view(heads, -1, capacity, size).transpose(0, 1)


def folded(query: torch.Tensor, key_heads: int) -> torch.Tensor:
    """Return [batch, key heads, group * rows, head size], the rows of a group one after another."""
    batch, heads, rows, size = query.shape
    return query.reshape(batch, key_heads, heads // key_heads * rows, size)


def tree_mask(**options: Any) -> torch.Tensor | None:
    """Return the mask that a model makes when it is given none.

    The cache offers a single row only what lies in its window, so it needs no mask.
    """
    if options["q_length"] == 1:
        return None
    mask: torch.Tensor | None = sdpa_mask(**options)
    return mask


AttentionInterface.register(TREE_ATTENTION, tree_attention)
AttentionMaskInterface.register(TREE_ATTENTION, tree_mask)


def _is_folded(query: torch.Tensor, mask: torch.Tensor | None, options: dict[str, Any]) -> bool:
    if any(options.get(name) is not None for name in _REFUSED):
        return False
    if mask is None:
        return query.shape[2] == 1
    return mask.is_floating_point() and mask.shape[1] == 1


def _pays_unfused(queries: torch.Tensor, key: torch.Tensor) -> bool:
    """Return whether two products and a softmax outrun the fused kernel.

    Measured: torch's fused kernel for CPUs multiplies half precision slowly, and loses to the
    plain products once there are many scores for each head.
    """
    is_half = queries.device.type == "cpu" and queries.dtype in _HALF
    return is_half and queries.shape[2] * key.shape[2] >= _UNFUSED_SCORES


def _unfused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attend as transformers' eager attention does: softmax sums in single precision."""
    batch, heads, rows, _ = query.shape
    scores = torch.baddbmm(
        mask.expand(batch, heads, -1, -1).flatten(0, 1),
        query.flatten(0, 1),
        key.flatten(0, 1).transpose(1, 2),
        alpha=scale,
    )
    output = torch.bmm(scores.softmax(dim=-1), value.flatten(0, 1))
    return output.view(batch, heads, rows, -1)
