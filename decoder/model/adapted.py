"""A copy of a model's modules, not of its weights, made over for narrow passes."""

import copy
from typing import Any, Final

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from decoder.model.attention import TREE_ATTENTION
from decoder.model.compatibility import Capability
from decoder.model.packing import LEAST_WEIGHTS, LeastWeights, pack_linears

_REPLACED_ATTENTION: Final = "sdpa"


def adapted(
    model: PreTrainedModel, capability: Capability, *, pack: bool | LeastWeights
) -> tuple[PreTrainedModel, int]:
    """Return a copy of a model in evaluation mode, made over for narrow passes, and what it takes.

    The weights are shared; the bytes returned are those of packed ones. A model that some library
    has patched comes back as it is.
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


def structural_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of the modules and configurations of a model that shares everything else.

    Parameters, buffers and hooks are those of the model, so that a copy takes no memory to speak
    of; what is replaced in it, the model does not see. A module that is used twice is copied once.
    """
    memo: dict[int, Any] = {}
    copied: PreTrainedModel = _copied(model, memo)
    return copied


def is_patched(model: PreTrainedModel) -> bool:
    """Return whether a library put functions of its own before the model's (offloading, say).

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
