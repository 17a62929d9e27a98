"""Asking memory early for what will be read soon."""

from typing import TYPE_CHECKING, Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

_READ, _KEEP, _DATA = 0, 3, 1

if TYPE_CHECKING:

    def prefetch(array: NDArray[Any], index: int) -> None:
        """Ask for the cache line of an array's element, whose index may lie beyond its end."""
        ...

else:

    @intrinsic
    def prefetch(_context: Any, array: types.Array, index: types.Integer) -> Any:
        """Ask for the cache line of an array's element, whose index may lie beyond its end."""

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
