"""The target's hidden states between layers, kept for drafters that learn from them.

States are numbered: `k` is the input of layer `k`, `num_layers` the output of the last layer, and
`FINAL` the input of the head, after the last norm. Published heads use the same numbers.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any, Final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from decoder.errors import UnsupportedModelError

FINAL: Final = -1
"""Number of the state after the last norm."""

States = Mapping[int, torch.Tensor]
"""State number to rows, [rows, hidden size], one row for each token of a pass."""


class StateTap:
    """Keeps the hidden states between a model's layers in passes with `listening`.

    Args:
        model: the model.
        numbers: numbers of the states to keep.

    Raises:
        UnsupportedModelError: the model's layers cannot be found, or it has no such state.
    """

    def __init__(self, model: PreTrainedModel, numbers: Iterable[int]) -> None:
        self._numbers = sorted(set(numbers))
        self._latest: dict[int, torch.Tensor] = {}
        num_layers = num_states(model)
        for number in self._numbers:
            if number != FINAL and not 0 <= number <= num_layers:
                raise UnsupportedModelError(
                    f"{type(model).__name__} has {num_layers} layers and no state {number}: "
                    "the head was made for another model"
                )

    def taken(self) -> States:
        """Return the states of the last pass: [rows, hidden size] each, on the model's device."""
        return {number: state[0] for number, state in self._latest.items()}

    @contextmanager
    def listening(self, model: PreTrainedModel) -> Iterator[None]:
        """Keep the states of passes that this thread runs during the block.

        The hooks run after the model's own and are removed afterwards.
        """
        with ExitStack() as hooks:
            for number in self._numbers:
                hooks.callback(self._hooked(model, number).remove)
            yield

    def _hooked(self, model: PreTrainedModel, number: int) -> RemovableHandle:
        layers, norm = _layers_and_norm(model)
        device, thread = model.device, get_ident()

        def keep(state: torch.Tensor) -> None:
            if get_ident() == thread:
                self._latest[number] = state.to(device)  # layers may be on several devices

        if number == FINAL:
            return norm.register_forward_hook(lambda _, __, output: keep(output))
        module = norm if number == len(layers) else layers[number]
        return module.register_forward_pre_hook(
            lambda _, given, options: keep(_first(given, options)), with_kwargs=True
        )


def num_states(model: PreTrainedModel) -> int:
    """Return the number of a model's layers, which is the highest state number.

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


def _first(given: tuple[Any, ...], options: dict[str, Any]) -> torch.Tensor:
    state: torch.Tensor = given[0] if given else options["hidden_states"]
    return state
