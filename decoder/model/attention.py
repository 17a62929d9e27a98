"""Grouped-query attention without repeated keys: the queries of a group form one product."""

import inspect
from collections.abc import Callable
from typing import Any, Final, Self

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (  # type: ignore[attr-defined]  # one is torch's
    TransformGetItemToIndex,
    _non_vmap_expansion_sdpa,
    _vmap_expansion_sdpa,
    causal_mask_function,
    sdpa_mask,
)

from decoder.model.tree_rows import TreeRows

_UNFUSED_SCORES: Final = 7000
"""Fewest scores per head (rows of its group times keys) for which two products and a softmax are
faster than the fused kernel. Measured in half precision on a CPU: for 12 rows and 400 keys, the
fused kernel takes 48 µs and the two products 55 µs. For 24 rows and 1,000 keys, they take 177 µs
and 96 µs."""

_HALF: Final = (torch.bfloat16, torch.float16)

_TAKEN: Final = {"module", "query", "key", "value", "attention_mask", "scaling", "is_causal"}
_REFUSED: Final = {"softcap"} | (
    inspect.signature(sdpa_attention_forward).parameters.keys() - _TAKEN - {"kwargs", "dropout"}
)
"""Options that change the result of sdpa attention, including options of later versions."""


class AttendingMask(torch.Tensor):
    """Replaces the mask of a pass over places of a cache, and computes the pass's attention.

    Models pass a four-dimensional mask on unchanged. The values of this tensor have no meaning. It
    belongs to no device: code that moves tensors between layers leaves it alone.
    """

    def to(self, *_: Any, **__: Any) -> Self:
        """Return the mask itself."""
        return self

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
        """Compute the attention of all sequences in the pass.

        Args:
            module: the layer.
            query: [1, heads, rows, head size], queries of all sequences, one sequence after
                another.
            key: [1, key heads, places * capacity, head size], the keys of all places.
            value: [1, key heads, places * capacity, value size], the values of all places.
            dropout: probability of dropout; zero outside training.
            scaling: factor of the scores.
            options: further arguments of the model.

        Returns:
            [1, rows, heads, value size], the attention output, and `None` for the attention
            weights.
        """
        raise NotImplementedError


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

    The heads of a group share keys and values, so their queries form one product, and only the mask
    is repeated. Passes that are neither a single row nor a tree, such as prompts, use transformers'
    own function. So do passes with an unknown option.

    Args:
        module: the layer.
        query: [batch, heads, rows, head size], the queries.
        key: [batch, key heads, keys, head size], the keys; query head h uses key head h // (heads /
            key heads).
        value: [batch, key heads, keys, value size], the values.
        attention_mask: additive mask, [batch or 1, 1, rows, keys], or `None`; or the
            `AttendingMask` of a packed or captured pass.
        dropout: probability of dropout; zero outside training.
        scaling: factor of the scores; by default 1 over the square root of the head size.
        options: further arguments of the model.

    Returns:
        [batch, rows, heads, value size], the attention output, and `None` for the attention
        weights.
    """
    if isinstance(attention_mask, AttendingMask):
        return attention_mask.attend(module, query, key, value, dropout, scaling, **options)
    if dropout or not _is_folded(query, attention_mask, options):
        output: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **options
        )
        return output
    batch, heads, rows, _ = query.shape
    groups = heads // key.shape[1]
    queries = folded(query, key.shape[1])
    mask = None if attention_mask is None else attention_mask.repeat(1, 1, groups, 1)
    attended = attended_by_group(queries, key, value, mask, scale_of(query, scaling))
    return attended.reshape(batch, heads, rows, -1).transpose(1, 2).contiguous(), None


def attended_by_group(
    queries: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Return [batch, key heads, rows, value size], the attention output of folded heads."""
    if mask is not None and _pays_unfused(queries, key):
        return _unfused(queries, key, value, mask, scale)
    return torch.nn.functional.scaled_dot_product_attention(
        queries, key, value, attn_mask=mask, scale=scale
    )


def scale_of(query: torch.Tensor, scaling: float | None) -> float:
    """Return the factor of the scores."""
    return float(query.shape[-1] ** -0.5) if scaling is None else scaling


def score_products(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return [batch, rows, keys], the products of queries and keys, in at least single precision.

    Args:
        queries: [batch, rows, size], the queries.
        keys: [batch, keys, size], the keys.
    """
    if queries.dtype not in _HALF:
        return torch.bmm(queries, keys.transpose(1, 2))
    if queries.is_cuda:
        wide: torch.Tensor = torch.ops.aten.bmm.dtype(queries, keys.transpose(1, 2), torch.float32)
        return wide
    return torch.bmm(queries.float(), keys.float().transpose(1, 2))


def by_place(states: torch.Tensor, capacity: int) -> torch.Tensor:
    """Return [places, heads, capacity, size], a view of [1, heads, places * capacity, size]."""
    _, heads, _, size = states.shape
    return states.view(heads, -1, capacity, size).transpose(0, 1)


def folded(query: torch.Tensor, key_heads: int) -> torch.Tensor:
    """Return [batch, key heads, group * rows, head size], the queries of each group joined."""
    batch, heads, rows, size = query.shape
    return query.reshape(batch, key_heads, heads // key_heads * rows, size)


def tree_mask(  # noqa: PLR0913  the parameters are transformers'
    rows: TreeRows,
    window: int | None = None,
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
    """Return the mask of a pass over a tree: the model's own rule combined with the tree's paths.

    The model's rule is evaluated on positions instead of slots, because with slots siblings would
    push each other out of a window. The mask is an additive floating-point mask, because eager
    attention would add a boolean mask as numbers.

    Args:
        rows: rows of the pass.
        window: number of positions that each row sees in all layers, itself included, because some
            models have a window only in their cache. `None` for no such limit.
        q_length: number of rows n, as counted by transformers.
        kv_length: number of keys that the layer's cache provides.
        kv_offset: position of the first key.
        mask_function: the model's masking rule; see `transformers.masking_utils`.
        dtype: dtype of the keys and values.
        device: device to put the mask on.
        use_vmap: whether the rule accepts only single indices.
        allow_is_causal_skip: whether the model accepts `None` as the mask if nothing is hidden.

    Returns:
        dtype[1, 1, n, keys], zero where attention is allowed; `None` if a single row sees all keys.

    Raises:
        ValueError: the number of keys in the layer's cache does not match the context and the tree.
    """
    if (q_length, kv_offset + kv_length) != (rows.num_read, rows.num_keys):
        raise ValueError(
            f"a tree of {len(rows.depths)} rows has {kv_offset + kv_length - rows.past} keys"
        )
    seen = torch.from_numpy(rows.seen(kv_offset, window)).to(device)
    if mask_function is not causal_mask_function:
        columns = torch.from_numpy(rows.key_positions(kv_offset)).to(device)
        seen &= _seen_by(mask_function, columns[-q_length:], columns, use_vmap=use_vmap)
    if allow_is_causal_skip:
        return _additive_unless_all(seen[None, None], dtype)
    return additive(seen[None, None], dtype)


def hide(mask: torch.Tensor, rows: TreeRows, first_key: int = 0, window: int | None = None) -> None:
    """Set a mask to hide the keys that the rows of a pass may not see.

    Args:
        mask: additive mask, [n, keys]; the keys are the context from `first_key` on, then all rows.
        rows: rows of the pass.
        first_key: position of the first key in the mask.
        window: number of positions that each row sees, itself included; `None` for all.
    """
    unseen = torch.from_numpy(~rows.visible_to_read).to(mask.device)
    mask[:, rows.past - first_key :].masked_fill_(unseen, lowest(mask.dtype))
    beyond = rows.beyond(first_key, window)
    if beyond is not None:
        mask.masked_fill_(torch.from_numpy(beyond).to(mask.device), lowest(mask.dtype))


def lowest(dtype: torch.dtype) -> float:
    """Return the value that hides a key in a mask of a dtype."""
    return torch.finfo(dtype).min


def additive(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return dtype[...], zero where `seen`, bool[...], is true and the lowest value elsewhere."""
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return mask.masked_fill_(~seen, lowest(dtype))


def single_row_mask(*, dtype: torch.dtype, **options: Any) -> torch.Tensor | None:
    """Return the mask of one row after its context, as the model itself would build it.

    The cache provides a single row only with the keys in its window, and usually all are visible.
    """
    skips = options.get("allow_is_causal_skip", True)
    if skips and options["mask_function"] is causal_mask_function:
        return None
    mask: torch.Tensor | None = sdpa_mask(dtype=dtype, **options)
    return _additive_unless_all(mask, dtype) if skips and mask is not None else mask


def _seen_by(
    rule: Callable[..., Any], rows: torch.Tensor, columns: torch.Tensor, *, use_vmap: bool
) -> torch.Tensor:
    """Return bool[n, keys], the positions that a transformers rule lets each row see."""
    first = torch.zeros(1, dtype=torch.int64, device=rows.device)
    if use_vmap:
        with TransformGetItemToIndex():
            single: torch.Tensor = _vmap_expansion_sdpa(rule)(first, first, rows, columns)[0, 0]
            return single
    seen: torch.Tensor = rule(*_non_vmap_expansion_sdpa(first, first, rows, columns))
    return seen.expand(1, 1, len(rows), len(columns))[0, 0]


def _additive_unless_all(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Return a mask; `None` for a single row on a CPU that sees all keys."""
    if seen.shape[2] == 1 and seen.device.type == "cpu" and bool(seen.all()):
        return None
    return additive(seen, dtype)


def _is_folded(query: torch.Tensor, mask: torch.Tensor | None, options: dict[str, Any]) -> bool:
    if refused_options(options):
        return False
    if mask is None:
        return query.shape[2] == 1
    return mask.is_floating_point() and mask.shape[1] == 1


def refused_options(options: dict[str, Any]) -> list[str]:
    """Return the options that change the result in an unsupported way."""
    return sorted(name for name in _REFUSED if options.get(name) is not None)


def _pays_unfused(queries: torch.Tensor, key: torch.Tensor) -> bool:
    """Return whether two products and a softmax are faster than the fused kernel.

    Measured in bfloat16 on a processor with instructions for it (AVX-512 BF16): torch's fused
    kernel is slower for many scores per head. Without these instructions, the separate products
    take ten times as long as the fused kernel.
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
    """Compute attention as torch's own kernel does, with scores in single precision.

    In half precision, products of large values would overflow, and scores of a few thousand would
    be rounded to whole numbers.
    """
    batch, heads, rows, _ = query.shape
    products = score_products(query.flatten(0, 1), key.flatten(0, 1))
    scores = torch.add(mask.expand(batch, heads, -1, -1).flatten(0, 1), products, alpha=scale)
    output = torch.bmm(scores.softmax(dim=-1).to(value.dtype), value.flatten(0, 1))
    return output.view(batch, heads, rows, -1)
