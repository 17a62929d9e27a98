"""Linear layers whose weights are laid out once, as the kernels of a CPU want them."""

from typing import Any, Final

import torch
from torch import nn

_ROWS_HINT: Final = 32
"""Rows to lay weights out for; measured, the layout then serves from one row to thousands."""

_LEAST_WEIGHTS: Final = {torch.float32: 1 << 17, torch.bfloat16: 1 << 12}
"""Weights of a layer below which the call costs more than the layout saves."""

_HOOKS: Final = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


class PackedLinear(nn.Linear):
    """A linear layer that multiplies by a copy of its weights in oneDNN's own layout.

    `torch.nn.functional.linear` lays weights out anew in every call, which for a pass of few
    rows takes as long as multiplying. torch's public `MkldnnLinear` does not, but converts its
    input and output in every call, which for such passes takes longer still (measured: 45 us a
    call); so the operators of torch's own compiler are called.

    Attributes:
        packed: the copy; it does not follow later changes of `weight`.
    """

    packed: torch.Tensor

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  torch's name
        """Return input @ weight.T + bias, [..., out features]."""
        if input.dtype != self.weight.dtype:
            return super().forward(input)
        output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(  # noqa: SLF001
            input, self.packed, self.bias, "none", [], ""
        )
        return output


def pack_linears(copied: nn.Module) -> int:
    """Replace the linear layers of a structural copy by packed ones where that pays.

    Layers of another type, with hooks, on another device or of a precision without kernels stay
    as they are.

    Returns:
        The bytes of the packed weights.
    """
    if not _has_kernels():
        return 0
    linears = [module for module in copied.modules() if _is_packable(module)]
    return sum(map(_pack, linears))


def _has_kernels() -> bool:
    operators = torch.ops.mkldnn
    is_built: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    names = ("_linear_pointwise", "_reorder_linear_weight", "_is_mkldnn_bf16_supported")
    return is_built and all(hasattr(operators, name) for name in names)


def _is_packable(module: nn.Module) -> bool:
    if type(module) is not nn.Linear or any(getattr(module, name) for name in _HOOKS):
        return False
    weight = module.weight
    if weight.device.type != "cpu" or type(weight) not in (nn.Parameter, torch.Tensor):
        return False
    if weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():  # noqa: SLF001
        return False
    return weight.dtype in _LEAST_WEIGHTS and weight.numel() >= _LEAST_WEIGHTS[weight.dtype]


def _pack(linear: Any) -> int:
    """Turn a linear layer into a packed one, in place."""
    weight = linear.weight.detach()
    linear.__class__ = PackedLinear
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS_HINT)  # noqa: SLF001
    vars(linear)["packed"] = packed
    return int(weight.numel() * weight.element_size())
