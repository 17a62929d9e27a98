"""Detects changes of a model: of its structure, its weights and its settings."""

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import chain
from operator import attrgetter, is_, itemgetter, methodcaller
from typing import Any, Final, TypeVar
from weakref import ref

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks")

_Found = TypeVar("_Found")
_MOST_LOOKS: Final = 100


def undisturbed(look: Callable[[], _Found]) -> _Found:
    """Return the result of reading a model's modules, retried if another thread changes them.

    Raises:
        RuntimeError: reading failed a hundred times; this is the last error.
    """
    for _ in range(_MOST_LOOKS - 1):
        with suppress(RuntimeError):  # a table changed during iteration
            return look()
    return look()


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Return a model's modules, even while another thread changes them."""
    return undisturbed(lambda: list(model.modules()))


def parameters_of(model: nn.Module) -> list[nn.Parameter]:
    """Return a model's weights, even while another thread changes the modules."""
    return undisturbed(lambda: list(model.parameters()))


@dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """The modules, hooks, replaced `forward` methods, modes, configuration and shapes of a model.

    Two structures are equal if all of these are identical; values of weights do not count. The
    structure determines what a model can verify, what its passes cost, and the buffers of its
    cache.

    Attributes:
        stated: the ids and names that are compared.
        placed: dtypes and devices of the weights, and the size of the vocabulary.
        met: references to the modules and weights with these ids, because the id of a deleted
            object may be reused.
        kept: functions whose ids are compared; these references keep them alive.
    """

    stated: tuple[Any, ...]
    placed: tuple[Any, ...]
    met: tuple["ref[Any]", ...] = field(repr=False)
    kept: tuple[Any, ...] = field(repr=False)

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Structure":
        """Return the current structure of a model."""
        return undisturbed(lambda: cls._looked_at(model))

    @classmethod
    def _looked_at(cls, model: PreTrainedModel) -> "Structure":
        stated: list[Any] = [_configuration(model)]
        met: list[ref[Any]] = []
        places: set[tuple[torch.dtype, torch.device]] = set()
        kept: list[Any] = _shared_code(_kinds(model.modules()))
        stated.extend(map(id, kept))
        for module in model.modules():
            own = vars(module)
            met.append(ref(module))
            stated.append((id(module), type(module), module.training))
            stated.extend(map(id, own["_modules"].values()))
            stated.extend(key for name in _HOOKS for key in own[name])
            if "forward" in own:
                stated.append(id(own["forward"]))
                kept.append(own["forward"])
            for weight in own["_parameters"].values():
                if weight is not None:
                    place = (weight.dtype, weight.device)
                    stated.append((id(weight), type(weight), weight.shape, place))
                    met.append(ref(weight))
                    places.add(place)
        embedding: Any = model.get_input_embeddings()
        placed = (*sorted(map(str, places)), getattr(embedding, "num_embeddings", None))
        return cls(tuple(stated), placed, tuple(met), tuple(kept))

    def is_of(self, other: "Structure") -> bool:
        """Return whether nothing changed since an earlier structure was recorded."""
        return self.stated == other.stated and all(each() is not None for each in other.met)


def _configuration(model: PreTrainedModel) -> str:
    stated = json.dumps(model.config.to_dict(), sort_keys=True, default=str)
    return f"{model.config._attn_implementation} {stated}"  # noqa: SLF001  no public name


def hooks_of_all() -> list[Any]:
    """Return the hooks that torch calls for every module."""
    return [hook for name in _HOOKS_OF_ALL for hook in vars(nn.modules.module)[name].values()]


_HOOKS_OF_ALL: Final = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
)


def looked_up() -> list[Any]:
    """Return the functions that models look up in transformers' tables.

    If this package replaced a function, the original function is returned.
    """
    found = (ALL_ATTENTION_FUNCTIONS["sdpa"], *map(ALL_MASK_ATTENTION_FUNCTIONS.get, _MASKED))
    return [getattr(each, "stands_in_for", each) for each in found]


_MASKED: Final = ("sdpa", "eager")


def _kinds(modules: Iterable[nn.Module]) -> list[type[nn.Module]]:
    return [*dict.fromkeys(map(type, modules))]


def _shared_code(kinds: Iterable[type[nn.Module]]) -> list[Any]:
    """Return the code that models share: `forward` of module types, global hooks, and tables."""
    return [*(kind.forward for kind in kinds), *hooks_of_all(), *looked_up()]


def _configs(modules: Iterable[nn.Module]) -> list[PreTrainedConfig]:
    stated = (vars(module).get("config") for module in modules)
    return [*{id(each): each for each in stated if isinstance(each, PreTrainedConfig)}.values()]


def _holders(modules: Iterable[nn.Module]) -> list[dict[str, torch.Tensor | None]]:
    """Return the modules' non-empty tables of parameters and buffers."""
    tables = (vars(module)[name] for module in modules for name in ("_parameters", "_buffers"))
    return [each for each in tables if each]


def _held(holders: Iterable[dict[str, torch.Tensor | None]]) -> list[torch.Tensor]:
    return [each for held in holders for each in held.values() if each is not None]


_address: Final = methodcaller("data_ptr")


def version_of(weight: torch.Tensor) -> int:
    """Return a number that grows with in-place changes; 0 for inference tensors."""
    return 0 if weight.is_inference() else weight._version  # noqa: SLF001  torch documents it


def _look_at_weights(
    holders: Iterable[dict[str, torch.Tensor | None]],
) -> tuple[list[int], list[int], list[int]]:
    """Return the ids, versions and addresses of the tensors in some tables."""
    weights = _held(holders)
    try:
        versions = [*map(attrgetter("_version"), weights)]  # avoids a Python call per weight
    except RuntimeError:
        versions = [*map(version_of, weights)]
    return [*map(id, weights)], versions, [*map(_address, weights)]


_PLAIN: Final = frozenset({bool, float, int, str, tuple, torch.dtype, type(None)})


class _Settings:
    """The plain values in modules and configurations, apart from weights and modules.

    Args:
        modules: the modules of a model.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        readers = [
            *(_reader(vars(module), leaves_private=True) for module in modules),
            *(_reader(vars(config), leaves_private=False) for config in _configs(modules)),
        ]
        self._read = [each for each in readers if each is not None]
        self._before = self._values()

    def are_others(self) -> bool:
        """Return whether any value is another object than in the last call."""
        before, self._before = self._before, self._values()
        return len(before) != len(self._before) or not all(map(is_, before, self._before))

    def _values(self) -> list[Any]:
        try:
            return [value for read, variables in self._read for value in read(variables)]
        except KeyError:  # a value was deleted: from now on every check reports a change
            return [object()]


def _reader(
    variables: dict[str, Any], *, leaves_private: bool
) -> tuple[Callable[[Any], Any], dict[str, Any]] | None:
    """Return a function that reads an object's plain values, and the values that it reads now."""
    names = [
        name
        for name, value in variables.items()
        if type(value) in _PLAIN and not (leaves_private and name.startswith("_"))
    ]
    if not names:
        return None
    return itemgetter(names[0], *names), variables


_said: Final[list[None]] = []


def num_said() -> int:
    """Return the number of calls of `model_changed`."""
    return len(_said)


def weights_of(model: nn.Module) -> tuple[list[int], list[int], list[int]]:
    """Return the ids, versions and addresses of weights and buffers; most changes alter these."""
    return undisturbed(lambda: _look_at_weights(_holders(model.modules())))


def model_changed() -> None:
    """Report a change of a model, in the middle of a generation, that cannot be detected.

    The next pass detects changes through modules, hooks, `load_state_dict`, optimizers or in-place
    operations on parameters. The next generation detects any other change when it starts. Call this
    function if a callback writes to `weight.data`, or to an array that shares the weight's memory,
    and the change must take effect within the running generation.
    """
    _said.append(None)


class ModelWatch:
    """Detects whether a model has changed since the last check; a check takes 0.1 ms.

    The watch holds references to the modules, so drop it at the end of a generation.

    Args:
        model: the model to watch.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = modules_of(model)
        variables = [vars(module) for module in modules]
        self._settings = _Settings(modules)
        self._counted = [
            *variables,
            *(each["_modules"] for each in variables),
            *(each[name] for each in variables for name in _HOOKS),
        ]
        self._kinds, self._configs = _kinds(modules), _configs(modules)
        self._parents = [each["_modules"] for each in variables if each["_modules"]]
        self._holders = _holders(modules)
        self._made_of = self._look_at_modules()
        self._weighed = _look_at_weights(self._holders)

    def has_other_modules(self) -> bool:
        """Return whether modules, hooks or other code were replaced since the last call."""
        before, self._made_of = self._made_of, self._look_at_modules()
        return before != self._made_of

    def has_other_weights(self) -> bool:
        """Return whether weights were added, removed or written to since the last call."""
        before, self._weighed = self._weighed, _look_at_weights(self._holders)
        return before != self._weighed

    def has_other_settings(self) -> bool:
        """Return whether a plain value of a module or configuration changed since the last call."""
        return self._settings.are_others()

    def _look_at_modules(self) -> tuple[list[int], int, list[Any]]:
        children = chain.from_iterable(map(dict.values, self._parents))
        attention = [each._attn_implementation for each in self._configs]  # noqa: SLF001  as above
        code = [*_shared_code(self._kinds), *attention]
        return [*map(id, children)], sum(map(len, self._counted)), code


class Recorded:
    """The parts of a model that are fixed in captured passes.

    Captured passes use the weight addresses, plain values and code from the time of capture. They
    read the weights' values anew in each pass.

    Args:
        model: the model whose passes are captured from now on.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = modules_of(model)
        self._holders = _holders(modules)
        self._settings = _Settings(modules)
        self._kinds = _kinds(modules)
        self._addresses = self._look_at_addresses()
        self._code = self._look_at_code()

    def has_moved(self) -> bool:
        """Return whether a captured pass would read outdated weight addresses."""
        return self._addresses != self._look_at_addresses()

    def has_changed(self) -> bool:
        """Return whether a new capture would differ, apart from weight addresses."""
        return self._settings.are_others() or self._code != self._look_at_code()

    def _look_at_addresses(self) -> list[int]:
        return [*map(_address, _held(self._holders))]

    def _look_at_code(self) -> list[Any]:
        """Return the code of all module types, and the precision modes."""
        modes = [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")]
        return [*_shared_code(self._kinds), *modes, torch.get_float32_matmul_precision()]


_SAMPLE: Final = 32
"""Number of values sampled from each parameter: any training changes most values, and reading the
samples takes milliseconds."""

_UNSPECIFIC: Final = ("_name_or_path", "name_or_path", "transformers_version", "use_cache")


def fingerprint_of(model: PreTrainedModel, vocabulary_fingerprint: str) -> str:
    """Return a fingerprint of a model's current state, 64 hexadecimal digits.

    The fingerprint covers the architecture, the configuration, the dtype, the names and shapes of
    the parameters, a sample of each parameter, and the tokenizer, but not the model's origin or
    device.

    Args:
        model: a model with its weights in memory; for weights elsewhere, only the shapes count.
        vocabulary_fingerprint: fingerprint of the model's tokenizer.
    """
    digest = sha256(type(model).__name__.encode())
    config = {k: v for k, v in model.config.to_dict().items() if k not in _UNSPECIFIC}
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    digest.update(vocabulary_fingerprint.encode())
    for name, parameter in undisturbed(lambda: list(model.named_parameters())):
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
        if parameter.device.type != "meta":
            digest.update(_sample(parameter.detach()))
    return digest.hexdigest()


def _sample(weights: torch.Tensor) -> bytes:
    """Return evenly spaced values of a tensor as bytes."""
    flat = weights.reshape(-1)
    values = flat[:: max(1, len(flat) // _SAMPLE)][:_SAMPLE]
    sampled: bytes = values.to(torch.float64).cpu().numpy().tobytes()
    return sampled
