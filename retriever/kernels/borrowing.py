"""Arrays without reference counts, for the inside of hot loops.

Compiled code counts references to every array that it hands on, atomically: in loops of
nanoseconds that was more than half of all time. A borrowed array is the same memory without an
owner to count for; it must not outlive the call in which it was borrowed.
"""

from typing import TYPE_CHECKING, Any, TypeVar

from numba import types
from numba.core import cgutils
from numba.core.imputils import impl_ret_untracked
from numba.extending import intrinsic

_Array = TypeVar("_Array")

if TYPE_CHECKING:

    def borrow(array: _Array) -> _Array:
        """Return a view of the whole array that counts no references."""
        ...

else:

    @intrinsic
    def borrow(_context: Any, array: types.Array) -> Any:
        """Return a view of the whole array that counts no references."""

        def generate(codegen: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            view = codegen.make_array(array)(codegen, builder, value=arguments[0])
            view.meminfo = cgutils.get_null_value(view.meminfo.type)
            view.parent = cgutils.get_null_value(view.parent.type)
            return impl_ret_untracked(codegen, builder, signature.return_type, view._getvalue())  # noqa: SLF001

        return array(array), generate
