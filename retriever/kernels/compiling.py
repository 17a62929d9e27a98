"""Compilation of kernels, with fast arithmetic and prefetching of a few instructions each.

Logarithms and powers of two are accurate enough for scores, and loops over them vectorize.
"""

import hashlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from logging import getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import llvmlite
import numba
import numpy as np
import platformdirs
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils, config
from numba.core.caching import FunctionCache, NullCache
from numba.core.dispatcher import Dispatcher
from numba.extending import intrinsic
from numpy.typing import NDArray

_log = getLogger(__name__)
_config: Any = config
_NumbaCache: Any = FunctionCache
_NumbaNullCache: Any = NullCache
_Function = TypeVar("_Function", bound=Callable[..., Any])


def kernel(
    *, allocates: bool = False, **options: Any
) -> "Callable[[_Function], Dispatcher[_Function]]":
    """Compile a function at its first call; the result is kept on disk and runs without the GIL.

    Where nothing can be kept, functions are compiled again in each process.

    Unless a kernel `allocates`, reference counting is off: the arrays' owners outlive the call.
    Counting took a third of the time of short loops.

    Nothing is compiled to hand a kernel to another one as a value (`no_cfunc_wrapper`).

    What sums with `fastmath` is inlined (`forceinline`), and so are its callers up to those that
    Python calls. A callee that is not inlined is optimized once by itself and again within each
    caller, which may order its sums anew, and both copies have one name: a process that compiled
    runs the former, one that loads the caller from disk the latter. Their last bits differ.

    Args:
        allocates: whether the kernel creates arrays.
        options: further options of numba.
    """
    compiled: Any = njit  # its stubs lack these options
    decorate: Callable[[_Function], Dispatcher[_Function]] = compiled(
        nogil=True, _nrt=allocates, no_cfunc_wrapper=True, **options
    )

    def compile_later(function: _Function) -> "Dispatcher[_Function]":
        decorated = decorate(function)
        if isinstance(decorated, Dispatcher):  # NUMBA_DISABLE_JIT leaves functions as they are
            cached: Any = decorated
            cached._cache = _cache_of(function)  # noqa: SLF001  (`enable_caching` does it so)
        return decorated

    return compile_later


class NotKeptError(Exception):
    """A kernel would have to be compiled, and nobody may wait for that here."""


_loads_only: ContextVar[bool] = ContextVar("loads_only", default=False)


@contextmanager
def only_kept() -> Iterator[None]:
    """Have kernels that are called in the block loaded from disk, and none compiled.

    Raises:
        NotKeptError: one is not kept.
    """
    before = _loads_only.set(True)
    try:
        yield
    finally:
        _loads_only.reset(before)


def _check_may_compile() -> None:
    if _loads_only.get():
        raise NotKeptError


def _cache_of(function: Callable[..., Any]) -> Any:
    """Return numba's cache of a kernel; one that keeps nothing where no folder can be written."""
    try:
        return _Cache(function)
    except (RuntimeError, OSError):  # as numba says that it found none; a limit on open files
        _not_kept.append(function.__name__)
        return _NoCache()


_not_kept: Final[list[str]] = []


def can_keep() -> bool:
    """Return whether all kernels of this process have a folder to be kept in."""
    return not _not_kept


class _NoCache(_NumbaNullCache):  # type: ignore[misc]  # numba has no types
    """Keeps nothing, and says once what that costs."""

    def load_overload(self, *_: object) -> None:
        """Find nothing; the kernel will be compiled."""
        _check_may_compile()
        _tell_compiling(is_kept=False)
        _tell_no_cache("no folder for them can be written")


class _Cache(_NumbaCache):  # type: ignore[misc]  # as above
    """Numba's cache on disk; what cannot be read or kept is compiled, and is no error.

    Numba looks at the file of the kernel alone, and keeps it by the file's place; but a kernel is
    compiled with all that it calls, and the same in each environment. So kernels are kept in the
    user's folder for caches by what they are made of (`_made_of`). Where `NUMBA_CACHE_DIR` names
    another folder, or that one cannot be written, they are kept where numba does.
    """

    _cache_file: Any
    _cache_path: str

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        made_of = _made_of(Path(function.__code__.co_filename).parent)
        folder = None if _config.CACHE_DIR else _folder_of(made_of)
        kept = self._cache_file
        if folder is None:
            kept._source_stamp = kept._source_stamp, made_of  # noqa: SLF001  (no public name)
        else:
            self._cache_path = str(folder)
            self._cache_file = type(kept)(self._cache_path, self._impl.filename_base, made_of)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return a kept kernel; None if there is none, and then it is told that it is compiled."""
        kept = None
        try:
            kept = super().load_overload(sig, target_context)
        except Exception as error:  # noqa: BLE001  (unpickling damaged files raises anything)
            _log.debug("a kept kernel cannot be read: %s", type(error).__name__)
            with suppress(OSError):
                self.flush()  # or nothing could be kept in its place
        if kept is None:
            _check_may_compile()
            _tell_compiling(is_kept=True)
        return kept

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep a kernel."""
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _tell_no_cache(error.strerror or str(error))


_VERSIONS: Final = (
    f"{sys.version} numba {numba.__version__} {llvmlite.__version__} {np.__version__}"
)
_UNUSED_S: Final = 60 * 24 * 3600.0
"""Kernels of sources or versions that nobody has started for so long are removed."""


@cache
def _made_of(folder: Path) -> str:
    """Return a digest of what kernels are made of: sources, and the versions of the compiler.

    Args:
        folder: of a kernel; those of this folder, of that one and of `retriever.tree` may be called
            or named.
    """
    here, files = Path(__file__).parent, sorted(folder.glob("*.py"))
    if folder == here:
        found, files = hashlib.sha256(_VERSIONS.encode()), [*files, here.parent / "tree.py"]
    else:
        found = hashlib.sha256(_made_of(here).encode())
    for path in files:
        found.update(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return found.hexdigest()


@cache
def _folder_of(made_of: str) -> Path | None:
    """Return where kernels of a digest are kept, None where there is no place for them.

    That of another user is not read, but for the administrator's: kernels are code.
    """
    kept = Path(platformdirs.user_cache_dir("foredraft", appauthor=False)) / "kernels"
    folder = kept / made_of[:32]
    with suppress(OSError):  # one that is there can be read without
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)  # it is in use
    try:
        owner = folder.stat().st_uid
    except OSError:
        return None
    if os.name == "posix" and owner not in {os.geteuid(), 0}:
        return None
    _remove_unused(kept)
    return folder


@cache
def _remove_unused(kept: Path) -> None:
    """Remove kernels that nobody has used for long; looked for once in a process."""
    with suppress(OSError):  # it cannot be listed, or another process is at it
        for folder in kept.iterdir():
            if time.time() - folder.stat().st_mtime > _UNUSED_S:
                shutil.rmtree(folder, ignore_errors=True)


@cache
def _tell_no_cache(reason: str) -> None:
    """Log, once for each reason, that kernels cannot be kept."""
    _log.warning(
        "compiled kernels cannot be kept (%s): each start compiles them again, which takes "
        "half a minute; set NUMBA_CACHE_DIR to a folder that this user can write",
        reason,
    )


@cache
def _tell_compiling(*, is_kept: bool) -> None:
    """Log, once in a process, that the kernels that follow are compiled: all wait for it.

    As a warning, so that it is seen where a program has set up no logging, too.
    """
    once = ", once on this machine" if is_kept else ""
    _log.warning("compiling kernels%s: up to a minute of processor", once)


class RareKernels:
    """The kernels of one kind of evidence, which few sequences ask for.

    Where nothing is said, the first call compiles or loads them and waits. A service has them
    compiled in a process beside when they are asked for first: what they would find is left out
    until that is done.

    Args:
        name: of the kind.

    Attributes:
        is_ready: whether they can be called.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_ready = True
        self._ask: Callable[[RareKernels], None] | None = None

    def defer(self, ask: "Callable[[RareKernels], None]") -> None:
        """Have them not called until `is_ready` is set; `ask` is called once they are wanted."""
        self.is_ready, self._ask = False, ask

    def are_wanted(self) -> bool:
        """Return whether they can be called; where they cannot, they will be later."""
        if not self.is_ready and self._ask is not None:
            ask, self._ask = self._ask, None
            ask(self)
        return self.is_ready


GROUPS: Final = RareKernels("groups")
PREDICTIONS: Final = RareKernels("predictions")
PHRASES: Final = RareKernels("phrases")
AHEAD: Final = RareKernels("ahead")
"""Of drafts after what may come."""

RARE: Final = {each.name: each for each in (GROUPS, PREDICTIONS, PHRASES, AHEAD)}


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

    def take_number(counter: NDArray[np.int64]) -> int:
        """Return an array's first number and raise it by one, for any number of threads."""
        ...

    def add_to(numbers: NDArray[np.int64], index: int, number: int) -> None:
        """Add to an array's element, counted over all rows, for any number of threads."""
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

    @intrinsic
    def take_number(_context: Any, counter: types.Array) -> Any:
        """Return an array's first number and raise it by one, for any number of threads."""

        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            held = context.make_array(counter)(context, builder, value=arguments[0])
            return builder.atomic_rmw("add", held.data, ir.IntType(64)(1), "monotonic")

        return types.int64(counter), generate

    @intrinsic
    def add_to(
        _context: Any, numbers: types.Array, index: types.Integer, number: types.Integer
    ) -> Any:
        """Add to an array's element, counted over all rows, for any number of threads."""

        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            held = context.make_array(numbers)(context, builder, value=arguments[0])
            place = builder.gep(held.data, [context.cast(builder, arguments[1], index, types.intp)])
            added = context.cast(builder, arguments[2], number, types.int64)
            builder.atomic_rmw("add", place, added, "monotonic")
            return context.get_dummy_value()

        return types.void(numbers, index, number), generate
