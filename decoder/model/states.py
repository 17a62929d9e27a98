"""The target's states between its layers, kept for drafters that learn from them.

A state is known by a number: `k` is what layer `k` takes, `num_layers` what the last layer gives,
and `FINAL` what the head takes, behind the last norm. Published heads count in the same way.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from torch import nn
from transformers import PreTrainedModel

from decoder.errors import UnsupportedModelError

FINAL: Final = -1
"""Number of the state behind the last norm."""

States = Mapping[int, torch.Tensor]
"""A state's number to its rows, [rows, hidden size], one for each token of a pass."""


class StateTap:
    """Keeps what flows between the layers of a model in each of its passes.

    Args:
        model: a structural copy: hooks are added to its modules, and not to the model's own.
        numbers: of the states to keep.

    Raises:
        UnsupportedModelError: the model's layers cannot be found, or it has no such state.
    """

    def __init__(self, model: PreTrainedModel, numbers: Iterable[int]) -> None:
        self._latest: dict[int, torch.Tensor] = {}
        self._device = model.device
        for number in sorted(set(numbers)):
            self._place(model, number)

    def taken(self) -> States:
        """Return the states of the last pass: [rows, hidden size] each, on the model's device."""
        return {number: state[0] for number, state in self._latest.items()}

    def batch(self) -> States:
        """Return the states of the last pass: [batch, rows, hidden size] each."""
        return dict(self._latest)

    def _place(self, model: PreTrainedModel, number: int) -> None:
        layers, norm = _layers_and_norm(model)
        if number == FINAL:
            _own_hooks(norm, "_forward_hooks")
            norm.register_forward_hook(lambda _, __, output: self._keep(number, output))
            return
        if not 0 <= number <= len(layers):
            raise UnsupportedModelError(
                f"{type(model).__name__} has {len(layers)} layers, and so no state {number}: "
                "the head was made for another model"
            )
        module = norm if number == len(layers) else layers[number]
        _own_hooks(module, "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")
        module.register_forward_pre_hook(
            lambda _, given, options: self._keep(number, _first(given, options)), with_kwargs=True
        )

    def _keep(self, number: int, state: torch.Tensor) -> None:
        self._latest[number] = state.to(self._device)  # layers may lie on several devices


def num_states(model: PreTrainedModel) -> int:
    """Return the number of a model's layers: the highest number of a state.

    Raises:
        UnsupportedModelError: its layers cannot be found.
    """
    return len(_layers_and_norm(model)[0])


def _layers_and_norm(model: PreTrainedModel) -> tuple[nn.ModuleList, nn.Module]:
    base: Any = model.base_model
    base = getattr(base, "language_model", base)
    layers, norm = getattr(base, "layers", None), getattr(base, "norm", None)
    if not isinstance(layers, nn.ModuleList) or not isinstance(norm, nn.Module):
        raise UnsupportedModelError(
            f"{type(model).__name__} does not keep its layers where they can be found, so no "
            "head can draft from its states: draft without --speculator"
        )
    return layers, norm


def _own_hooks(module: nn.Module, *names: str) -> None:
    """Give a module of a structural copy hooks of its own, the model's among them."""
    for name in names:
        vars(module)[name] = OrderedDict(vars(module)[name])


def _first(given: tuple[Any, ...], options: dict[str, Any]) -> torch.Tensor:
    state: torch.Tensor = given[0] if given else options["hidden_states"]
    return state
