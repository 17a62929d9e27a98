"""Attention for grouped heads without repeated keys: a group's queries are rows of one product."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (  # type: ignore[attr-defined]  # one is torch's
    TransformGetItemToIndex,
    _non_vmap_expansion_sdpa,
    _vmap_expansion_sdpa,
    causal_mask_function,
    sdpa_mask,
)

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
        rows: int64[n, w], the rows of each place; -1 for what only pads.
        mask: additive, [n, 1, w, keys]; `None` where a single row sees all of them.
    """

    places: slice
    keys: slice
    rows: NDArray[np.int64]
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class Dealing:
    """How rows are dealt to groups of neighbours: the same for all layers with as many heads.

    Attributes:
        given: int64[m], of each query that a call takes its place among [rows * heads]; those of
            a group's heads that share keys are rows of one product.
        sizes: queries of each group.
        masks: of each group, as its calls take them.
        taken: int64[rows * heads], where each result lies among those of all calls.
    """

    given: torch.Tensor
    sizes: list[int]
    masks: list[torch.Tensor | None]
    taken: torch.Tensor

    @classmethod
    def of(
        cls, neighbours: Sequence[Neighbours], heads: int, key_heads: int, device: torch.device
    ) -> Self:
        """Deal for layers with so many heads of queries and of keys."""
        shared = heads // key_heads
        numbers = np.arange(heads).reshape(key_heads, shared)
        given, taken, masks = [], [], []
        for group in neighbours:
            rows = group.rows[:, None, None, :] * heads
            given.append((np.maximum(rows, 0) + numbers[:, :, None]).ravel())
            # Results lie as [places, heads that share keys, rows, key heads].
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


class PackedMask(torch.Tensor):
    """Stands for the mask of a pass whose rows belong to many sequences.

    Models hand a mask of four dimensions on as it is. The rows of the pass are those of its
    sequences, one after another, and its keys those of all places of a cache. It belongs to no
    device: what moves tensors between layers leaves it, and each layer has its rows dealt on its
    own.

    Attributes:
        neighbours: who attends to what; every row is in one of them.
        capacity: slots of each place.
    """

    neighbours: Sequence[Neighbours]
    capacity: int
    _dealings: dict[tuple[torch.device, int, int], Dealing]

    @classmethod
    def of(cls, neighbours: Sequence[Neighbours], capacity: int) -> Self:
        """Return a mask; its own values mean nothing."""
        made = torch.zeros(1, 1, 1, 1).as_subclass(cls)
        made.neighbours, made.capacity = neighbours, capacity
        made._dealings = {}  # noqa: SLF001  its own
        return made

    def to(self, *_: Any, **__: Any) -> Self:
        """Return the mask itself."""
        return self

    def dealing(self, heads: int, key_heads: int, device: torch.device) -> Dealing:
        """Return how rows are dealt in a layer, made once for all that are like it."""
        key = device, heads, key_heads
        if key not in self._dealings:
            self._dealings[key] = Dealing.of(self.neighbours, heads, key_heads, device)
        return self._dealings[key]


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
        return _additive(seen, dtype)[:, None]


class SplitMask(torch.Tensor):
    """Stands for the mask of a captured pass: of the context, all rows of a place see one length.

    Its form is that of a mask, as for `PackedMask`; its keys are those of all places of a cache.

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
        made.context = _additive(grid.context(num_keys, window), sums)
        missing = -(num_keys + grid.slots.shape[1]) % _ALIGNED
        made.slots = torch.nn.functional.pad(grid.slots, (0, missing))
        made.among = _additive(torch.nn.functional.pad(grid.among(window), (0, missing)), sums)
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
            module, query, key, value, attention_mask, dropout, scaling, **options
        )
    if isinstance(attention_mask, SplitMask):
        return _split_attention(query, key, value, attention_mask, dropout, scaling, **options)
    if dropout or not _is_folded(query, attention_mask, options):
        output: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **options
        )
        return output
    batch, heads, rows, _ = query.shape
    groups = heads // key.shape[1]
    queries = folded(query, key.shape[1])
    mask = None if attention_mask is None else attention_mask.repeat(1, 1, groups, 1)
    attended = _attended(queries, key, value, mask, _scale_of(query, scaling))
    return attended.reshape(batch, heads, rows, -1).transpose(1, 2).contiguous(), None


def _packed_attention(  # noqa: PLR0913, PLR0917  as above
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packed: PackedMask,
    dropout: float,
    scaling: float | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend in each group of neighbours; [1, rows, heads, value size], and no weights.

    Args:
        module: the layer.
        query: [1, heads, rows, head size].
        key: [1, key heads, places * capacity, head size].
        value: [1, key heads, places * capacity, value size].
        packed: the groups.
        dropout: as of `tree_attention`, like what follows.
        scaling: of the scores.
        options: further arguments of the model.
    """
    _, heads, num_rows, size = query.shape
    key_heads, is_folded = key.shape[1], not (dropout or _refused(options))
    dealing = packed.dealing(*((heads, key_heads) if is_folded else (1, 1)), query.device)
    given = query[0].transpose(0, 1).reshape(-1, *(() if is_folded else (heads,)), size)
    keys, values = _by_place(key, packed.capacity), _by_place(value, packed.capacity)
    results = []
    dealt = torch.split(given.index_select(0, dealing.given), dealing.sizes)
    for group, queries, mask in zip(packed.neighbours, dealt, dealing.masks, strict=True):
        own_keys = keys[group.places, :, group.keys]
        own_values = values[group.places, :, group.keys]
        if is_folded:
            own = queries.view(len(group.rows), key_heads, -1, size)
            attended = _attended(own, own_keys, own_values, mask, _scale_of(query, scaling))
            results.append(attended.transpose(1, 2).flatten(0, 2))
        else:
            own = queries.view(*group.rows.shape, heads, size).transpose(1, 2)
            attended, _ = sdpa_attention_forward(
                module, own, own_keys, own_values, mask, dropout, scaling, **options
            )
            results.append(attended.flatten(0, 1))
    taken = torch.cat(results).index_select(0, dealing.taken)
    return taken.view(1, num_rows, heads, -1), None


def _attended(
    queries: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Attend with folded heads; [batch, key heads, rows, value size]."""
    if mask is not None and _pays_unfused(queries, key):
        return _unfused(queries, key, value, mask, scale)
    return torch.nn.functional.scaled_dot_product_attention(
        queries, key, value, attn_mask=mask, scale=scale
    )


def _scale_of(query: torch.Tensor, scaling: float | None) -> float:
    """Return what scores are multiplied by."""
    return float(query.shape[-1] ** -0.5) if scaling is None else scaling


def _split_attention(  # noqa: PLR0913, PLR0917  as above
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: SplitMask,
    dropout: float,
    scaling: float | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend to the context of each place and to its rows; [1, rows, heads, value size].

    Args: as of `_packed_attention`; keys and values that were never written are finite.

    Raises:
        RuntimeError: an option changes the result in a way that is not known here.
    """
    refused = ["dropout"] * bool(dropout) + _refused(options)
    if refused:
        raise RuntimeError(f"attention with {', '.join(refused)} is not divided by keys")
    grid, num_rows = mask.grid, query.shape[2]
    places, width = grid.rows.shape
    is_alone = (places, width) == (1, num_rows)  # then cells are rows
    cells = query[0] if is_alone else query[0][:, grid.rows.flatten()]
    shown = slice(mask.context.shape[-1])
    context = [
        _by_place(each, mask.capacity)[:places, :, shown].transpose(0, 1) for each in (key, value)
    ]
    own = [_in_cells(each[0][:, mask.slots.flatten()], places) for each in (key, value)]
    scale = _scale_of(query, scaling)
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
    runs = [_Run.of(*each) for each in zip(keys, values, masks, strict=True)]
    rows = _Run.of(own[0], own[1], mask.among)
    divided = [*([run] for run in runs[:-1]), [runs[-1], rows]]
    attended = (
        _attended_to(divided[0], queries, scale)[0]
        if len(divided) == 1
        else _joined((_attended_to(each, queries, scale) for each in divided), query.dtype)
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


def _attended_to(
    runs: Sequence[_Run], queries: torch.Tensor, scale: float
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
        products = _products(queries, run.keys).view(part.shape)
        torch.add(run.mask[:, None], products, alpha=scale, out=part)
    shares = torch.split(scores.softmax(dim=-1).to(queries.dtype), sizes, dim=-1)
    attended = torch.bmm(shares[0], runs[0].values)
    for run, share in zip(runs[1:], shares[1:], strict=True):
        attended.baddbmm_(share, run.values)
    return attended, scores


def _products(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return [batch, rows, keys], products in single precision at least.

    Args:
        queries: [batch, rows, size].
        keys: [batch, keys, size].
    """
    if queries.dtype not in _HALF:
        return torch.bmm(queries, keys.transpose(1, 2))
    if queries.is_cuda:
        wide: torch.Tensor = torch.ops.aten.bmm.dtype(queries, keys.transpose(1, 2), torch.float32)
        return wide
    return torch.bmm(queries.float(), keys.float().transpose(1, 2))


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


@dataclass(frozen=True, slots=True, eq=False)
class TreeRows:
    """Which rows of a tree a pass reads, and what they see of one another.

    Attributes:
        visible: bool[n, W], whether each of the pass's rows sees a row of the tree; the tree's
            last n rows are those of the pass, the others lie in the cache already.
        depths: int64[W], distance of each row from the first token behind the context.
        past: tokens of the context.
        window: positions that each row looks back over, itself included, where all layers show no
            more: some models have a window in their cache alone. `None` for no such limit.
    """

    visible: torch.Tensor
    depths: torch.Tensor
    past: int
    window: int | None = None


def tree_mask(  # noqa: PLR0913  the parameters are transformers'
    rows: TreeRows,
    *,
    q_length: int,
    kv_length: int,
    kv_offset: int,
    mask_function: Callable[..., Any],
    dtype: torch.dtype,
    device: torch.device,
    use_vmap: bool = False,
    allow_is_causal_skip: bool = True,
    **_: Any,
) -> torch.Tensor | None:
    """Return the mask of a pass over a tree: the model's own rule by positions, and the tree's.

    A rule is asked for positions instead of slots: by slots, siblings would push each other out of
    a window. Additive and floating, because eager attention takes a boolean mask for numbers to
    add.

    Args:
        rows: of the pass.
        q_length: n, as transformers counts them.
        kv_length: keys that the layer shows.
        kv_offset: position of the first of them.
        mask_function: the model's rule, see `transformers.masking_utils`.
        dtype: of the states.
        device: of the mask.
        use_vmap: whether the rule takes single indices only.
        allow_is_causal_skip: whether the model does without a mask that hides nothing.

    Returns:
        dtype[1, 1, n, keys], zero where attention is allowed; `None` where a single row sees all.

    Raises:
        ValueError: the layer shows other keys than the context and the tree.
    """
    num_before = rows.past - kv_offset
    if (q_length, kv_length) != (len(rows.visible), num_before + len(rows.depths)):
        raise ValueError(f"a tree of {len(rows.depths)} rows lies in {kv_length - num_before} keys")
    visible = rows.visible.to(device)
    seen = torch.ones(q_length, kv_length, dtype=torch.bool, device=device)
    seen[:, num_before:] = visible
    window = None if kv_offset + kv_length <= (rows.window or 0) else rows.window
    if mask_function is not causal_mask_function or window is not None:
        positions = rows.depths.to(device) + rows.past
        columns = torch.cat([torch.arange(kv_offset, rows.past, device=device), positions])
        own = positions[-q_length:]
        if window is not None:
            seen &= own[:, None] - columns < window
        seen &= _seen_by(mask_function, own, columns, use_vmap=use_vmap)
    if allow_is_causal_skip:
        return _additive_unless_all(seen[None, None], dtype)
    return _additive(seen[None, None], dtype)


def single_row_mask(*, dtype: torch.dtype, **options: Any) -> torch.Tensor | None:
    """Return the mask of one row behind its context, as a model makes it when it is given none.

    The cache offers a single row only what lies in its window: usually that is all it may see.
    """
    skips = options.get("allow_is_causal_skip", True)
    if skips and options["mask_function"] is causal_mask_function:
        return None
    mask: torch.Tensor | None = sdpa_mask(dtype=dtype, **options)
    return _additive_unless_all(mask, dtype) if skips and mask is not None else mask


def _seen_by(
    rule: Callable[..., Any], rows: torch.Tensor, columns: torch.Tensor, *, use_vmap: bool
) -> torch.Tensor:
    """Return bool[n, keys], what a rule of transformers lets positions see of others."""
    first = torch.zeros(1, dtype=torch.int64, device=rows.device)
    if use_vmap:
        with TransformGetItemToIndex():
            single: torch.Tensor = _vmap_expansion_sdpa(rule)(first, first, rows, columns)[0, 0]
            return single
    seen: torch.Tensor = rule(*_non_vmap_expansion_sdpa(first, first, rows, columns))
    return seen.expand(1, 1, len(rows), len(columns))[0, 0]


def _additive_unless_all(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Return a mask; none for a single row that sees all, unless the host would wait for that."""
    if seen.shape[2] == 1 and seen.device.type == "cpu" and bool(seen.all()):
        return None
    return _additive(seen, dtype)


def _is_folded(query: torch.Tensor, mask: torch.Tensor | None, options: dict[str, Any]) -> bool:
    if _refused(options):
        return False
    if mask is None:
        return query.shape[2] == 1
    return mask.is_floating_point() and mask.shape[1] == 1


def _refused(options: dict[str, Any]) -> list[str]:
    """Return the options that change the result in a way that is not known here."""
    return sorted(name for name in _REFUSED if options.get(name) is not None)


def _pays_unfused(queries: torch.Tensor, key: torch.Tensor) -> bool:
    """Return whether two products and a softmax outrun the fused kernel.

    Measured in bfloat16 on a processor that multiplies it (AVX-512 BF16): torch's fused kernel
    loses there once there are many scores for each head. Without such instructions the plain
    products take ten times as long as the fused kernel.
    """
    if queries.device.type != "cpu" or queries.dtype != torch.bfloat16:
        return False
    has_many = queries.shape[2] * key.shape[2] >= _UNFUSED_SCORES
    return has_many and bool(torch.cpu._is_avx512_bf16_supported())  # noqa: SLF001  no public name


def _unfused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attend as torch's own attention does: scores are of single precision.

    In half precision products of large states are no numbers, and scores of some thousand differ
    by whole numbers from one to the next.
    """
    batch, heads, rows, _ = query.shape
    products = _products(query.flatten(0, 1), key.flatten(0, 1))
    scores = torch.add(mask.expand(batch, heads, -1, -1).flatten(0, 1), products, alpha=scale)
    output = torch.bmm(scores.softmax(dim=-1).to(value.dtype), value.flatten(0, 1))
    return output.view(batch, heads, rows, -1)
