"""How kernels are compiled."""

from collections.abc import Callable
from logging import getLogger
from pathlib import Path
from typing import Any, TypeVar

from numba import njit
from numba.core.dispatcher import Dispatcher

_log = getLogger(__name__)
_Function = TypeVar("_Function", bound=Callable[..., Any])


def kernel(
    *, allocates: bool = False, **options: Any
) -> "Callable[[_Function], Dispatcher[_Function]]":
    """Compile a function at its first call; the result is kept on disk and runs without the GIL.

    Unless a kernel `allocates`, it counts no references to the arrays that it hands on: their
    owners outlive the call. In loops of nanoseconds, counting took a third of all time.

    Args:
        allocates: whether the kernel makes arrays.
        options: further ones of numba's.
    """
    compiled: Any = njit  # whose stubs do not know the option that its own compiler sets
    decorate: Callable[[_Function], Dispatcher[_Function]] = compiled(
        cache=True, nogil=True, _nrt=allocates, **options
    )
    return decorate


def tell_compiling(function: "Dispatcher[Any]") -> None:
    """Log that kernels will be compiled if this one, which needs most of them, never was."""
    if not is_compiled(function):
        _log.info("compiling kernels, once on this machine")


def is_compiled(function: "Dispatcher[Any]") -> bool:
    """Return whether a kernel was ever compiled, by what numba keeps beside its source.

    Of one that was changed since, on the same line, that is said too.
    """
    if not isinstance(function, Dispatcher):  # NUMBA_DISABLE_JIT leaves functions as they are
        return True
    source: Any = function.py_func
    name = f"{source.__module__.rpartition('.')[2]}.{source.__qualname__}"
    kept = f"{name}-{source.__code__.co_firstlineno}.*.nbi"
    stats: Any = function.stats
    return any(Path(stats.cache_path).glob(kept))
