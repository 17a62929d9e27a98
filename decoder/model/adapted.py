"""A copy of a model's modules that shares its weights and is adapted to narrow passes."""

import copy
from typing import Any, Final

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from decoder.model.attention import TREE_ATTENTION
from decoder.model.compatibility import Capability
from decoder.model.packing import pack_linears

_REPLACED_ATTENTION: Final = "sdpa"


def adapted(
    model: PreTrainedModel, capability: Capability, *, pack: bool
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
    return copied, pack_linears(copied) if pack else 0


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
