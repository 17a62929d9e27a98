"""A device that is not the CPU, computed on the CPU: what CUDA would be asked, without one.

Tensors of the device say "meta" and hold their numbers on the CPU. As on CUDA, an operation that
mixes devices is an error, a tensor cannot become an array, and reading a number waits for the
device.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

NAME: Final = "meta"
"""Of the device; torch lets tensors be sent there without a driver."""

_MADE_OF_OTHERS: Final = "CompositeImplicitAutograd"
"""What torch calls operations that run others; those are counted."""

_MIXING: Final = ("aten::index", "aten::index_put_", "aten::copy_")
"""Operations that send indices of the host along, or copy between devices."""

_COPIES: Final = ("_to_copy", "copy_")

_VIEWS: Final = frozenset(
    (
        *("alias", "as_strided", "detach", "expand", "permute", "select", "slice"),
        *("squeeze", "t", "transpose", "unsqueeze", "view"),
    )
)


class _Elsewhere(torch.Tensor):
    """A tensor of the device; `held` has its numbers."""

    held: torch.Tensor

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's has no types
        cls, called: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _computed(called, args, kwargs or {})


class Device(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """The device, which counts what it is asked.

    Attributes:
        launches: operations by their names; views are none.
        uploads: copies from the host.
        blocking: of them, those for which the host waits, as CUDA's does unless it is told not to.
        waits: copies to the host, and numbers read by it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.launches: Counter[str] = Counter()
        self.uploads = 0
        self.blocking = 0
        self.waits = 0
        self._is_counting = True

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Count nothing during the block, which stands for one launch of a captured graph."""
        before, self._is_counting = self._is_counting, False
        try:
            yield
        finally:
            self._is_counting = before

    def __torch_dispatch__(
        self, called: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch._C._dispatch_has_kernel_for_dispatch_key(called.name(), _MADE_OF_OTHERS):
            with self:
                return called.decompose(*args, **kwargs)
        if self._is_counting:
            self._count(called._schema.name.removeprefix("aten::"), args, kwargs)
        return _computed(called, args, kwargs)

    def _count(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        is_there = any(isinstance(value, _Elsewhere) for value in tree_flatten((args, kwargs))[0])
        goes_to = kwargs.get("device")
        arrives = goes_to is not None and torch.device(goes_to).type == NAME
        if name == "copy_" and isinstance(args[0], _Elsewhere) != isinstance(args[1], _Elsewhere):
            arrives = isinstance(args[0], _Elsewhere)
            is_there, goes_to = not arrives, args[0].device
        if is_there and (name == "_local_scalar_dense" or (goes_to is not None and not arrives)):
            self.waits += 1
        elif arrives and not is_there and name in _COPIES:
            self.uploads += 1
            self.blocking += not (_is_non_blocking(name, args) or kwargs.get("non_blocking"))
        elif (is_there or arrives) and name not in _VIEWS:
            self.launches[name] += 1


def _is_non_blocking(name: str, args: Sequence[Any]) -> bool:
    """Return what a copy was told by the place of the argument."""
    return name == "copy_" and any(each is True for each in args[2:])


@contextmanager
def elsewhere() -> Iterator[Device]:
    """Have the device during the block."""
    with Device() as device:
        yield device


def sent(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the CPU on the device."""
    with torch.inference_mode(mode=False):
        return _on_the_device(tensor.clone())


def _computed(called: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    values = tree_flatten((args, kwargs))[0]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    is_there = any(_is_there(tensor) for tensor in tensors)
    takes_both = called._schema.name in _MIXING
    for tensor in tensors:
        # As on CUDA: a single number of the CPU may take part.
        if is_there and not (_is_there(tensor) or takes_both or tensor.dim() == 0):
            raise RuntimeError(f"{called}: expected all tensors to be on the same device")
    goes_to = kwargs.get("device")
    stays = is_there if goes_to is None else torch.device(goes_to).type == NAME
    own = dict(tree_map(_held, dict(kwargs)))
    if goes_to is not None:
        own["device"] = torch.device("cpu")
    if not stays:
        return called(*tree_map(_held, tuple(args)), **own)
    with torch.inference_mode(mode=False):  # tensors of that mode cannot be held
        done = called(*tree_map(_held, tuple(args)), **own)
        return tree_map(lambda value: _there(value, tensors), done)


def _on_the_device(held: torch.Tensor) -> _Elsewhere:
    made: Any = torch.Tensor._make_wrapper_subclass(
        _Elsewhere,
        held.shape,
        strides=held.stride(),
        dtype=held.dtype,
        device=torch.device(NAME),
    )
    made.held = held
    wrapped: _Elsewhere = made
    return wrapped


def _is_there(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is the device's; torch makes empty ones without a dispatch."""
    return isinstance(tensor, _Elsewhere) or (tensor.device.type == NAME and tensor.numel() == 0)


def _held(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and not isinstance(value, _Elsewhere) and _is_there(value):
        return torch.empty(value.shape, dtype=value.dtype)
    return value.held if isinstance(value, _Elsewhere) else value


def _there(value: Any, given: Sequence[torch.Tensor]) -> Any:
    """Return a result on the device; what was changed in place stays the tensor that it was."""
    if not isinstance(value, torch.Tensor):
        return value
    for tensor in given:
        if isinstance(tensor, _Elsewhere) and tensor.held is value:
            return tensor
    return _on_the_device(value)
