"""Attention for grouped heads without repeated keys: a group's queries are rows of one product."""

import inspect
from collections.abc import Sequence
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
        attention_mask: additive, [batch or 1, 1, rows, keys], or none; or of a packed pass.
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
