"""Compilation of kernels, with fast arithmetic and prefetching of a few instructions each.

Logarithms and powers of two are accurate enough for scores, and loops over them vectorize.
"""

from collections.abc import Callable
from logging import getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.dispatcher import Dispatcher
from numba.extending import intrinsic
from numpy.typing import NDArray

_log = getLogger(__name__)
_Function = TypeVar("_Function", bound=Callable[..., Any])


def kernel(
    *, allocates: bool = False, **options: Any
) -> "Callable[[_Function], Dispatcher[_Function]]":
    """Compile a function at its first call; the result is kept on disk and runs without the GIL.

    Unless a kernel `allocates`, reference counting is off: the arrays' owners outlive the call.
    Counting took a third of the time of short loops.

    Args:
        allocates: whether the kernel creates arrays.
        options: further options of numba.
    """
    compiled: Any = njit  # its stubs lack this option
    decorate: Callable[[_Function], Dispatcher[_Function]] = compiled(
        cache=True, nogil=True, _nrt=allocates, **options
    )
    return decorate


def tell_compiling(function: "Dispatcher[Any]") -> None:
    """Log that kernels will be compiled, if this one, which needs most of them, is not cached."""
    if not is_compiled(function):
        _log.info("compiling kernels, once on this machine")


def is_compiled(function: "Dispatcher[Any]") -> bool:
    """Return whether numba's cache has a kernel.

    Also true for one that has changed since at the same line.
    """
    if not isinstance(function, Dispatcher):  # NUMBA_DISABLE_JIT leaves functions as they are
        return True
    source: Any = function.py_func
    name = f"{source.__module__.rpartition('.')[2]}.{source.__qualname__}"
    kept = f"{name}-{source.__code__.co_firstlineno}.*.nbi"
    stats: Any = function.stats
    return any(Path(stats.cache_path).glob(kept))


_MANTISSA_BITS: Final = 23
_BIAS: Final = 127
_ONE: Final = np.float32(1 / (1 << _MANTISSA_BITS))
_LOWEST: Final = np.float32(-126.0)


@kernel()
def fast_log2(value: float) -> float:
    """Return log2 of a positive float32: exact at powers of two, straight lines between them.

    The error is at most 0.09. As a feature of a learned score it need only be monotonic and cheap:
    two instructions.
    """
    bits = np.float32(value).view(np.int32)
    return np.float32(bits) * _ONE - np.float32(_BIAS)


@kernel()
def fast_exp2(value: float) -> float:
    """Return 2 to the power of a float32 below 127, with a relative error under 0.0002."""
    bounded = max(np.float32(value), _LOWEST)
    whole = np.floor(bounded)
    part = np.float32(bounded - whole)
    # A cubic through 2^0 and 2^1 with the slopes that make the error smallest between them.
    fitted = np.float32(1.0) + part * (
        np.float32(0.6954) + part * (np.float32(0.2264) + part * np.float32(0.0782))
    )
    scale = np.int32((np.int32(whole) + _BIAS) << _MANTISSA_BITS).view(np.float32)
    return np.float32(fitted * scale)


@kernel()
def octaves_below_one(probability: float) -> int:
    """Return the number of halvings of 1 until it is at most a probability; 31 at most."""
    exponent = np.int64(np.float32(probability).view(np.int32) >> _MANTISSA_BITS) - _BIAS
    return min(31, max(0, -exponent))


_READ, _KEEP, _DATA = 0, 3, 1

if TYPE_CHECKING:

    def prefetch(array: NDArray[Any], index: int) -> None:
        """Prefetch the cache line of an array's element; the index may lie beyond its end."""
        ...

else:

    @intrinsic
    def prefetch(_context: Any, array: types.Array, index: types.Integer) -> Any:
        """Prefetch the cache line of an array's element; the index may lie beyond its end."""

        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            held = context.make_array(array)(context, builder, value=arguments[0])
            place = context.cast(builder, arguments[1], index, types.intp)
            line = builder.bitcast(builder.gep(held.data, [place]), cgutils.voidptr_t)
            flag = ir.IntType(32)
            kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, flag, flag, flag])
            call = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
            builder.call(call, [line, flag(_READ), flag(_KEEP), flag(_DATA)])
            return context.get_dummy_value()

        return types.void(array, index), generate
