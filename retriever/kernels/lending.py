"""Lending arrays to kernels: a named tuple of arrays as one argument.

To hand over an array, Python takes up to 0.2 microseconds, and a draft works on some fifty. What is
lent instead is one record that tells where each array lies; the kernel borrows them back by the
same named tuple. The lender must keep the arrays, unmoved, for as long as the record is in use.
"""

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array
from numpy.typing import NDArray

_Arrays = TypeVar("_Arrays", bound=NamedTuple)


def lend(arrays: NamedTuple) -> NDArray[Any]:
    """Return one record: of each C-contiguous array its address and shape.

    It has a field of the type of the elements as well, never set, from which `borrow` knows it.

    Raises:
        ValueError: an array has gaps between its elements.
    """
    named = arrays._asdict()
    for name, each in named.items():
        if not each.flags.c_contiguous:
            raise ValueError(f"{name} cannot be lent: it is not C-contiguous")
    record = np.zeros(
        1, _dtype(tuple((name, each.ndim, each.dtype) for name, each in named.items()))
    )
    for name, each in named.items():
        record[name]["address"], record[name]["shape"] = each.ctypes.data, each.shape
    return record


@cache
def _dtype(kinds: tuple[tuple[str, int, np.dtype[Any]], ...]) -> np.dtype[Any]:
    """Return the type of the record for arrays of these names, dimensions and elements.

    Of equal types there is one object: a kernel that meets another takes a microsecond to compare.
    """
    fields = [
        (name, [("address", np.int64), ("shape", np.int64, (ndim,)), ("element", element)])
        for name, ndim, element in kinds
    ]
    return np.dtype(fields, align=True)


if TYPE_CHECKING:

    def borrow(record: Any, kind: type[_Arrays]) -> _Arrays:
        """Return the arrays that were lent as one record."""
        ...

else:

    @intrinsic
    def borrow(_context: Any, record: types.Record, kind: types.NamedTupleClass) -> Any:
        """Return the arrays that were lent as one record."""
        lent = [record.typeof(name) for name in record.fields]
        kinds = [types.Array(of.typeof("element"), *of.typeof("shape").shape, "C") for of in lent]
        result = types.NamedTuple(kinds, kind.instance_class)

        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            arrays = [
                _array_at(context, builder, arguments[0], record.offset(name), of, array)
                for name, of, array in zip(record.fields, lent, kinds, strict=True)
            ]
            return context.make_tuple(builder, result, arrays)

        return result(record, kind), generate


def _array_at(
    context: Any, builder: Any, record: Any, offset: int, lent: types.Record, kind: types.Array
) -> Any:
    """Emit code that makes an array of what is lent at an offset in a record."""
    number = ir.IntType(64)

    def load(offset: int) -> Any:
        start = builder.bitcast(record, ir.IntType(8).as_pointer())
        place = builder.gep(start, [number(offset)])
        return builder.load(builder.bitcast(place, number.as_pointer()))

    array = context.make_array(kind)(context, builder)
    itemsize = context.get_abi_sizeof(context.get_data_type(kind.dtype))
    shape_at = offset + lent.offset("shape")
    shape = [load(shape_at + 8 * axis) for axis in range(kind.ndim)]
    strides = [number(itemsize)]
    for extent in reversed(shape[1:]):
        strides.insert(0, builder.mul(strides[0], extent))
    address = builder.inttoptr(load(offset + lent.offset("address")), array.data.type)
    populate: Any = populate_array
    populate(array, address, shape, strides, itemsize, None)
    return array._getvalue()  # noqa: SLF001
