"""Records the target's hidden states between layers, for drafters that need them.

States are numbered: state `k` is the input of layer `k`, state `num_layers` is the output of the
last layer, and `FINAL` is the input of the output layer, after the last norm. Published speculators
use the same numbers.
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
"""Hidden states by number, each [rows, hidden size], with a row for each token of a pass."""


class StateTap:
    """Records the hidden states between a model's layers, in passes within `listening`.

    Args:
        model: the model.
        numbers: numbers of the states to record.

    Raises:
        UnsupportedModelError: the model's layers cannot be found, or the model has no such state.
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
        """Return the last pass's states, each [rows, hidden size], on the model's device."""
        return {number: state[0] for number, state in self._latest.items()}

    @contextmanager
    def listening(self, model: PreTrainedModel) -> Iterator[None]:
        """Record the states of passes that this thread runs during the block.

        The hooks run after the model's own hooks, and are removed at the end.
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
        UnsupportedModelError: the model's layers cannot be found.
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
