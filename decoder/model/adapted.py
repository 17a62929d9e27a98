"""A copy of a model's modules that shares its weights, adapted to narrow passes and packed."""

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeGuard

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from decoder.model.attention import TREE_ATTENTION
from decoder.model.compatibility import Capability

_ROWS_HINT: Final = 32
"""Rows to lay weights out for; measured, the layout then serves from one row to thousands."""

LeastWeights = Mapping[torch.dtype, int]
"""Weights of the smallest layer that is packed, for each precision that is packed at all."""

LEAST_WEIGHTS: Final[LeastWeights] = {torch.float32: 1 << 17, torch.bfloat16: 1 << 12}
"""Below, the call costs more than the layout saves."""

_JOINT_NAMES: Final = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

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
        return _multiplied(input, self.packed, self.bias)


class JointProduct:
    """Linear layers of one input, multiplied in one product by whichever of them is called first.

    A call of a kernel takes as long as a small product itself. The others find their part of the
    output where their input is the very same tensor; where it is not, the product is made anew.

    Args:
        linears: layers with as many input features each, all or none with a bias.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        weights: list[torch.Tensor] = [linear.weight for linear in linears]
        biases: list[torch.Tensor] = [linear.bias for linear in linears if linear.bias is not None]
        self._packed = _laid_out(torch.cat(weights).detach())
        self._bias = torch.cat(biases).detach() if biases else None
        self._sizes = [linear.out_features for linear in linears]
        self._input: torch.Tensor | None = None
        self._outputs: tuple[torch.Tensor, ...] = ()

    def output(self, member: int, states: torch.Tensor) -> torch.Tensor:
        """Return the output of one of the layers, [..., out features]."""
        if states is not self._input:
            product = _multiplied(states, self._packed, self._bias)
            self._input, self._outputs = states, torch.split(product, self._sizes, dim=-1)
        output = self._outputs[member]
        if member == len(self._sizes) - 1:
            self._input, self._outputs = None, ()
        return output


class JointLinear(PackedLinear):
    """A packed linear layer that is multiplied together with others.

    Attributes:
        joint: the product.
        member: number of the layer in it.
    """

    joint: JointProduct
    member: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  torch's name
        """Return input @ weight.T + bias, [..., out features]."""
        if input.dtype != self.weight.dtype:
            return nn.Linear.forward(self, input)
        return self.joint.output(self.member, input)


def pack_linears(copied: nn.Module, least: LeastWeights = LEAST_WEIGHTS) -> int:
    """Replace the linear layers of a structural copy by packed ones where that pays.

    Layers of another type, with hooks, on another device or of a precision without kernels stay
    as they are.

    Args:
        copied: changed in place.
        least: weights of the smallest layer to pack, or of those that are multiplied together.

    Returns:
        The bytes of the packed weights.
    """
    if not _has_kernels():
        return 0
    alone = {module for module in copied.modules() if _is_packable(module, least)}
    packed = []
    for group in _groups(copied):
        if alone.issuperset(group) and _is_joinable(group, least):
            _join(group)
            alone.difference_update(group)
            packed.extend(group)
    for linear in alone:
        if not _is_large([linear], least):
            continue
        linear.__class__ = PackedLinear
        vars(linear)["packed"] = _laid_out(linear.weight.detach())
        packed.append(linear)
    return sum(linear.weight.numel() * linear.weight.element_size() for linear in packed)


def _has_kernels() -> bool:
    operators = torch.ops.mkldnn
    is_built: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    names = ("_linear_pointwise", "_reorder_linear_weight", "_is_mkldnn_bf16_supported")
    return is_built and all(hasattr(operators, name) for name in names)


def _is_packable(module: nn.Module, least: LeastWeights) -> TypeGuard[nn.Linear]:
    if type(module) is not nn.Linear or any(getattr(module, name) for name in _HOOKS):
        return False
    weight = module.weight
    if weight.device.type != "cpu" or type(weight) not in (nn.Parameter, torch.Tensor):
        return False
    if weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():  # noqa: SLF001
        return False
    return weight.dtype in least


def _is_large(linears: Sequence[nn.Linear], least: LeastWeights) -> bool:
    """Return whether layers that are multiplied together are worth packing."""
    weights = sum(linear.weight.numel() for linear in linears)
    return weights >= least[linears[0].weight.dtype]


def _groups(copied: nn.Module) -> Iterator[list[Any]]:
    """Return the layers that take one input, by the names that they have in transformers."""
    for module in copied.modules():
        for names in _JOINT_NAMES:
            children = dict(module.named_children())
            if all(name in children for name in names):
                yield [children[name] for name in names]


def _is_joinable(group: Sequence[nn.Linear], least: LeastWeights) -> bool:
    kinds = {(linear.in_features, linear.weight.dtype, linear.bias is None) for linear in group}
    return len(kinds) == 1 and len(set(group)) == len(group) and _is_large(group, least)


def _join(group: Sequence[Any]) -> None:
    joint = JointProduct(group)
    for member, linear in enumerate(group):
        linear.__class__ = JointLinear
        vars(linear).update(joint=joint, member=member)


def _laid_out(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(  # noqa: SLF001
        weight.contiguous(), _ROWS_HINT
    )
    return packed


def _multiplied(
    states: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(  # noqa: SLF001
        states, packed, bias, "none", [], ""
    )
    return output


_REPLACED_ATTENTION: Final = "sdpa"


def adapted(
    model: PreTrainedModel, capability: Capability, *, pack: bool | LeastWeights
) -> tuple[PreTrainedModel, int]:
    """Return a copy of a model, adapted to narrow passes, and the bytes of its packed weights.

    The copy is in evaluation mode and shares all other weights. A model that some library has
    patched is returned itself.
    """
    copied = model if is_patched(model) else structural_copy(model)
    copied.eval()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    if copied is model:
        return model, 0
    if capability is Capability.TREES:
        attend_by_groups(copied)
    if not pack:
        return copied, 0
    return copied, pack_linears(copied, LEAST_WEIGHTS if pack is True else pack)


def own_passes(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model as it is, in evaluation mode; the one given stays in its own mode."""
    if not model.training:
        return model
    copied = model if is_patched(model) else structural_copy(model)
    copied.eval()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return copied


def structural_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of the modules and configurations of a model that shares everything else.

    Parameters, buffers and hooks are those of the model, so that a copy takes hardly any memory.
    Replacing modules of the copy does not change the model. A module that is used twice is copied
    once.
    """
    memo: dict[int, Any] = {}
    copied: PreTrainedModel = _copied(model, memo)
    return copied


def is_patched(model: PreTrainedModel) -> bool:
    """Return whether a library has replaced `forward` functions of the model (offloading, say).

    They are bound to the model's modules: a copy would call them on the original.
    """
    return any("forward" in vars(module) for module in model.modules())


def is_spread(model: PreTrainedModel) -> bool:
    """Return whether a model's weights lie on several devices."""
    return len({parameter.device for parameter in model.parameters()}) > 1


def attend_by_groups(copied: PreTrainedModel) -> None:
    """Let a structural copy use `tree_attention` in place of transformers' sdpa attention.

    Models whose attention is their own code, or of another implementation, keep theirs.
    """
    if not copied._supports_attention_backend:  # noqa: SLF001  no public name for it
        return
    for module in copied.modules():
        config = vars(module).get("config")
        if not isinstance(config, PreTrainedConfig):
            continue
        if config._attn_implementation == _REPLACED_ATTENTION:  # noqa: SLF001  nor for this
            config._attn_implementation = TREE_ATTENTION  # noqa: SLF001


def attends_by_groups(model: PreTrainedModel) -> bool:
    """Return whether all attention of a model is `tree_attention`, so that it takes packed passes.

    It also must give the logits of chosen rows alone.
    """
    if is_patched(model) or "logits_to_keep" not in inspect.signature(model.forward).parameters:
        return False
    configs = (vars(module).get("config") for module in model.modules())
    attentions = {
        config._attn_implementation  # noqa: SLF001  no public name
        for config in configs
        if isinstance(config, PreTrainedConfig)
    }
    return attentions == {TREE_ATTENTION}


def _copied(module: nn.Module, memo: dict[int, Any]) -> Any:
    if id(module) in memo:
        return memo[id(module)]
    copied = memo[id(module)] = module.__new__(type(module))
    vars(copied).update(vars(module))
    for name, value in vars(module).items():
        if isinstance(value, PreTrainedConfig):
            vars(copied)[name] = copy.deepcopy(value, memo)
        elif name in ("_parameters", "_buffers"):
            vars(copied)[name] = dict(value)
    vars(copied)["_modules"] = {
        name: None if child is None else _copied(child, memo)
        for name, child in module._modules.items()  # noqa: SLF001  named_children leaves out repeats
    }
    return copied
