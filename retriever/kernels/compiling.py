"""How kernels are compiled."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from numba import njit

if TYPE_CHECKING:
    from numba.core.dispatcher import Dispatcher

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
