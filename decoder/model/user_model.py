"""Runs the user's own model: its unchanged modules, with foredraft's cache and masks.

A pass uses foredraft's cache, attention for trees (`decoder.model.attention`) and products with
packed weights (`decoder.model.products`). The modules, their hooks and configurations are not
changed. Transformers looks up attention and masks in tables, and linear layers call
`torch.nn.functional.linear`. While a pass runs, foredraft's functions replace these entries. In
threads without a pass, they call the original functions. A function that other code has already
replaced stays as it is.
"""

import inspect
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from decoder.errors import UnsupportedModelError
from decoder.model.attention import single_row_mask, tree_attention, tree_mask
from decoder.model.cache import TreeCache
from decoder.model.products import (
    LEAST_WEIGHTS,
    LeastWeights,
    Multiplier,
    Products,
    linear,
    products_of,
)
from decoder.model.stamp import hooks_of_all, modules_of, parameters_of
from decoder.model.states import States, StateTap
from decoder.model.tree_rows import TreeRows

_EXTRAS: Final = ("output_attentions", "output_hidden_states", "output_router_logits")
"""Outputs that a configuration may request; some need a mask or labels, which passes do not
have."""

_CACHES: Final = ("cache", "cache_params", "past_key_values")
"""Possible names of the cache argument of `forward`; the first name is used since transformers
5.24."""

_UNNAMED: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

KNOWN_CODE: Final = ("bitsandbytes.", "torch.", "torchao.", "transformers.")
"""Packages whose modules compute the same result in every pass."""


class UserModel:
    """Runs a model's own modules, in their current state at each call.

    Args:
        model: a transformers model.
        pack: whether to pack weights on a CPU, or the least size of layers to pack, by dtype.
        tapped: numbers of the hidden states to record in each pass; see `decoder.model.states`.
        window: see `tree_mask`.

    Attributes:
        model: the transformers model.

    Raises:
        UnsupportedModelError: the model has no hidden state of a given number.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        pack: bool | LeastWeights = True,
        tapped: Iterable[int] = (),
        window: int | None = None,
    ) -> None:
        self.model = model
        self._window = window
        least = LEAST_WEIGHTS if pack is True else pack or {}
        self._products = products_of(model, least) if least else None
        numbers = tuple(tapped)
        self._tap = StateTap(model, numbers) if numbers else None
        self.look()

    def look(self) -> None:
        """Read the current signature of the model's `forward`, and the model's configuration."""
        self._taken = taken_by(self.model)
        self._cache_argument = cache_argument(self.model)
        self._stated = _stated_outputs(self.model)
        is_known = not has_code_of_others(self.model)
        keeps_tensors = not is_known or _keeps_tensors(self.model)
        self._mode = torch.no_grad if keeps_tensors else torch.inference_mode
        self._joins = is_known

    @property
    def device(self) -> torch.device:
        """Device for the model's inputs."""
        return torch.device(self.model.device)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the hidden states."""
        return self.model.dtype

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed weights, in addition to the model's own weights."""
        return 0 if self._products is None else self._products.num_bytes

    @property
    def packs(self) -> bool:
        """Whether some weights are or will be packed."""
        return self._products is not None and self._products.takes(self.model)

    @property
    def states(self) -> States:
        """The tapped hidden states of the last pass, each [rows, hidden size]."""
        return {} if self._tap is None else self._tap.taken()

    def audit(self) -> bool:
        """Drop copies of weights that changed unnoticed; return whether there were any."""
        return self._products is not None and self._products.audit()

    def takes(self, name: str) -> bool:
        """Return whether the model's `forward` names an input."""
        return name in self._taken

    def run(self, rows: TreeRows | None = None, cache: object = None, **inputs: Any) -> Any:
        """Run a pass.

        Args:
            rows: rows of a tree, if the pass is over a tree; the mask is built when the model
                requests it.
            cache: the cache for the pass's keys and values; `None` for a pass without a cache.
            inputs: inputs of the model's `forward`.

        Returns:
            The model's output.
        """
        inputs["use_cache"] = cache is not None
        if cache is not None:
            inputs[self._cache_argument] = cache
        if not isinstance(cache, TreeCache):
            return self.run_prepared(inputs)
        with running(rows, self._window):
            return self.run_prepared(inputs)

    def run_base(self, rows: TreeRows | None = None, cache: object = None, **inputs: Any) -> Any:
        """Run a pass without the output layer; see `run`."""
        inputs |= {"use_cache": True, self._cache_argument: cache}
        with running(rows, self._window):
            return self._called(self.model.base_model, inputs)

    def run_prepared(self, inputs: Mapping[str, Any]) -> Any:
        """Run a pass on complete inputs, with the model's own attention and masks."""
        return self._called(self.model, {**inputs, **self._stated})

    def _called(self, module: nn.Module, inputs: Mapping[str, Any]) -> Any:
        """Call the model or its base model, with packed weights, and record the tapped states."""
        try:
            products = multiplying(self._products, joins=self._joins)
            with self._mode(), products, self._tapping():
                return module(**inputs)
        except StopIteration as error:  # it would silently end the decoding generators
            raise RuntimeError("the model raised StopIteration") from error

    def attends_by_groups(self) -> bool:
        """Return whether all layers use `tree_attention`, so that packed passes are possible.

        The model must also support computing the logits of only some rows.
        """
        if not self.takes("logits_to_keep") or not self.model._supports_attention_backend:  # noqa: SLF001  no public name
            return False
        modules = modules_of(self.model)
        configs = (vars(module).get("config") for module in modules)
        attentions = {
            config._attn_implementation  # noqa: SLF001  no public name either
            for config in configs
            if isinstance(config, PreTrainedConfig)
        }
        return attentions == {_SDPA} and _has_tree_attention()

    @contextmanager
    def _tapping(self) -> Iterator[None]:
        if self._tap is None:
            yield
        else:
            with self._tap.listening(self.model):
                yield


def has_code_of_others(model: nn.Module) -> bool:
    """Return whether a model has hooks, replaced `forward` methods, or modules of other packages.

    No configuration describes how these behave, and their behaviour may change with each pass.
    """
    if hooks_of_all():
        return True
    for module in modules_of(model):
        own, kind = vars(module), type(module)
        is_known = all(f"{each}.".startswith(KNOWN_CODE) for each in _written_in(kind))
        if not is_known or "forward" in own or own["_forward_hooks"] or own["_forward_pre_hooks"]:
            return True
    return False


def _written_in(kind: type[nn.Module]) -> tuple[str, str]:
    """Return the names of the Python modules that define a module type and its `forward`.

    A wrapper function has the name and module of the wrapped function, but not its globals.
    """
    compiled_with = getattr(kind.forward, "__globals__", {})
    return kind.__module__, compiled_with.get("__name__", "")


def taken_by(model: PreTrainedModel) -> Mapping[str, inspect.Parameter]:
    """Return the inputs that a model's `forward` names; if none, those that its class names."""
    taken = inspect.signature(model.forward).parameters
    if all(each.kind in _UNNAMED for each in taken.values()):
        return inspect.signature(type(model).forward).parameters
    return taken


def cache_argument(model: PreTrainedModel) -> str:
    """Return the name of the cache argument of a model's `forward`."""
    stated = (taken_by(model), inspect.signature(type(model).forward).parameters)
    named = (name for taken in stated for name in _CACHES if name in taken)
    return next(named, _CACHES[-1])


def generating(model: nn.Module) -> PreTrainedModel:
    """Return the model whose `generate` a wrapper's `generate` calls.

    Wrappers of PEFT, `torch.compile`, accelerate and distributed training hold that model as a
    submodule.

    Raises:
        UnsupportedModelError: the wrapper holds no transformers model, or several.
    """
    found = _outermost(model)
    if len(found) != 1:
        named = ", ".join(type(each).__name__ for each in found) or "none"
        raise UnsupportedModelError(
            f"{type(model).__name__} holds no single model of transformers ({named}): give the one "
            "whose generate is called"
        )
    return found[0]


def _outermost(module: nn.Module) -> list[PreTrainedModel]:
    if isinstance(module, PreTrainedModel):
        return [module]
    inner = (each for child in module.children() for each in _outermost(child))
    return list(dict.fromkeys(inner))


def is_spread(model: PreTrainedModel) -> bool:
    """Return whether a model's weights are on several devices."""
    return len({weight.device for weight in parameters_of(model)}) > 1


def _keeps_tensors(model: PreTrainedModel) -> bool:
    """Return whether a model without foreign code stores tensors, as some rotary embeddings do.

    Passes are 5% faster in torch's inference mode, but tensors from that mode can be neither
    differentiated nor overwritten.
    """
    ropes = str(getattr(model.config.get_text_config(decoder=True), "rope_parameters", None))
    return "dynamic" in ropes or "longrope" in ropes


def _stated_outputs(model: PreTrainedModel) -> dict[str, bool]:
    """Return inputs that override a configuration's requests for more than logits."""
    configs = (model.config, model.config.get_text_config(decoder=True))
    stated = {name: False for name in _EXTRAS if any(getattr(each, name, None) for each in configs)}
    if any(getattr(each, "return_dict", True) is False for each in configs):
        stated["return_dict"] = True
    return stated


_SDPA: Final = "sdpa"
_EAGER: Final = "eager"


class _Current(threading.local):
    """The pass that the current thread runs."""

    is_pass = False
    rows: TreeRows | None = None
    window: int | None = None
    windows: set[int | None] | None = None
    products: Multiplier | None = None


_current: Final = _Current()


@contextmanager
def running(rows: TreeRows | None = None, window: int | None = None) -> Iterator[None]:
    """Use attention and masks for trees during the block, for passes over a `TreeCache`.

    Args:
        rows: rows of a tree, if the pass is over a tree and has no given mask.
        window: see `tree_mask`.
    """
    with _ATTENTION.installed():
        before = _current.is_pass, _current.rows, _current.window
        _current.is_pass, _current.rows, _current.window = True, rows, window
        try:
            yield
        finally:
            _current.is_pass, _current.rows, _current.window = before


@contextmanager
def noting_windows() -> Iterator[set[int | None]]:
    """During the block, record the windows of the masks that models build for prompts.

    A configuration may have a window that the model's own masks do not have.
    """
    before, noted = _current.windows, set[int | None]()
    _current.windows = noted
    try:
        yield noted
    finally:
        _current.windows = before


@contextmanager
def multiplying(products: Products | None, *, joins: bool = False) -> Iterator[None]:
    """Use packed weights during the block, which is one pass.

    Args:
        products: the packed weights; `None` to let torch compute all products.
        joins: see `Multiplier`.
    """
    if products is None:
        yield
        return
    with _PRODUCTS.installed():
        before, multiplier = _current.products, Multiplier(products, joins=joins)
        _current.products = multiplier
        try:
            yield
            multiplier.end()
        finally:
            _current.products = before


def _has_tree_attention() -> bool:
    """Return whether models with sdpa attention use `tree_attention` in a pass."""
    return ALL_ATTENTION_FUNCTIONS[_SDPA] in {sdpa_attention_forward, _attention}


def _linear(
    input: torch.Tensor,  # noqa: A002  torch's name
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    if torch.compiler.is_compiling() or _current.products is None:
        return linear(input, weight, bias)
    return _current.products.linear(input, weight, bias)


def _attention(*args: Any, **options: Any) -> Any:
    if torch.compiler.is_compiling() or not _current.is_pass:
        return sdpa_attention_forward(*args, **options)
    return tree_attention(*args, **options)


def _sdpa_mask(**options: Any) -> torch.Tensor | None:
    if torch.compiler.is_compiling() or not _current.is_pass:
        return sdpa_mask(**options)
    if _current.rows is not None:
        return tree_mask(_current.rows, _current.window, **options)
    if options["q_length"] == 1:
        return single_row_mask(**options)
    if _current.windows is not None:
        _current.windows.add(options.get("local_size"))
    return sdpa_mask(**options)


def _eager_mask(**options: Any) -> torch.Tensor | None:
    if torch.compiler.is_compiling() or _current.rows is None:
        return eager_mask(**options)
    return tree_mask(_current.rows, _current.window, **options)


class _StandIns:
    """Functions that replace functions of other packages while passes run.

    Args:
        places: for each function, a table, the function's name in the table, the original function,
            and the replacement, which is marked as a stand-in.
    """

    def __init__(self, *places: tuple[Any, str, object, Any]) -> None:
        self._places = places
        for _, _, own, ours in places:
            ours.stands_in_for = own
        self._lock = threading.Lock()
        self._num_users = 0

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Install the replacements during the block, unless other code replaced the original."""
        with self._lock:
            self._num_users += 1
            for table, name, own, ours in self._places:
                if table[name] is own:
                    table[name] = ours
        try:
            yield
        finally:
            with self._lock:
                self._num_users -= 1
                if self._num_users == 0:
                    self._leave()

    def _leave(self) -> None:
        for table, name, own, ours in self._places:
            if table[name] is not ours:
                continue
            if isinstance(table, dict):
                table[name] = own
            else:  # transformers' tables have a local layer above the registered entries
                del table[name]


_PRODUCTS: Final = _StandIns((vars(functional), "linear", linear, _linear))
_ATTENTION: Final = _StandIns(
    (ALL_ATTENTION_FUNCTIONS, _SDPA, sdpa_attention_forward, _attention),
    (ALL_MASK_ATTENTION_FUNCTIONS, _SDPA, sdpa_mask, _sdpa_mask),
    (ALL_MASK_ATTENTION_FUNCTIONS, _EAGER, eager_mask, _eager_mask),
)
