"""Compilation of kernels; fast arithmetic and prefetching in a few instructions each.

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
    """Compile a function at its first call; the result is cached on disk and releases the GIL.

    If nothing can be cached, each process compiles the functions again.

    Reference counting is off unless a kernel `allocates`: the owners of the arrays outlive the
    call. Counting took a third of the time of short loops.

    Numba also makes no wrapper for passing a kernel to another one as a value
    (`no_cfunc_wrapper`).

    Functions that sum with `fastmath` are inlined (`forceinline`), and so are their callers up to
    those that Python calls. Otherwise LLVM would optimize a callee once by itself and again within
    each caller, possibly with its sums in another order. Both copies would have the same name. A
    process that compiles the caller would run the first copy, and a process that loads it from disk
    the second. Their results would differ in the last bits.

    Args:
        allocates: whether the kernel creates arrays.
        options: further numba options.
    """
    compiled: Any = njit  # its type stubs lack these options
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
    """A kernel needs compilation in a place that must not wait for it."""


_loads_only: ContextVar[bool] = ContextVar("loads_only", default=False)


@contextmanager
def only_kept() -> Iterator[None]:
    """Load the kernels that are called in the block from disk, and compile nothing.

    Raises:
        NotKeptError: a kernel is not in the cache.
    """
    before = _loads_only.set(True)
    try:
        yield
    finally:
        _loads_only.reset(before)


_num_compiled = 0


def num_compiled() -> int:
    """Return how many kernels this process has begun to compile, instead of loading them."""
    return _num_compiled


def _begin_compiling(*, is_kept: bool) -> None:
    """Count and log that a kernel is compiled now.

    Raises:
        NotKeptError: waiting for compilation is not allowed.
    """
    global _num_compiled  # noqa: PLW0603  (kernels are those of the process)
    if _loads_only.get():
        raise NotKeptError
    _num_compiled += 1
    _tell_compiling(is_kept=is_kept)


def _cache_of(function: Callable[..., Any]) -> Any:
    """Return numba's cache of a kernel, or a no-op cache if no folder is writable."""
    try:
        return _Cache(function)
    except (RuntimeError, OSError):  # numba found no folder, or too many files are open
        _not_kept.append(function.__name__)
        return _NoCache()


_not_kept: Final[list[str]] = []


def can_keep() -> bool:
    """Return whether all kernels of this process have a cache folder."""
    return not _not_kept


class _NoCache(_NumbaNullCache):  # type: ignore[misc]  # numba has no types
    """A cache that stores nothing, and logs once what that costs."""

    def load_overload(self, *_: object) -> None:
        """Return None: the kernel will be compiled."""
        _begin_compiling(is_kept=False)
        _tell_no_cache("no folder for them can be written")


class _Cache(_NumbaCache):  # type: ignore[misc]  # as above
    """Numba's cache on disk; a kernel that cannot be read or saved is compiled, without an error.

    Numba's own cache finds a kernel by the path and time stamp of its file alone. But a kernel is
    compiled together with everything that it calls, and it is the same in each environment. So this
    cache is in the user's cache folder, under a digest of all sources (`_made_of`). If
    `NUMBA_CACHE_DIR` names another folder, or the user's folder is not writable, numba chooses the
    folder.
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
        """Return a cached kernel, or None after logging that it will be compiled."""
        kept = None
        try:
            kept = super().load_overload(sig, target_context)
        except Exception as error:  # noqa: BLE001  (unpickling damaged files raises anything)
            _log.debug("a cached kernel cannot be read: %s", type(error).__name__)
            with suppress(OSError):
                self.flush()  # otherwise no new kernel could be saved in its place
        if kept is None:
            _begin_compiling(is_kept=True)
        return kept

    def save_overload(self, sig: Any, data: Any) -> None:
        """Save a kernel."""
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _tell_no_cache(error.strerror or str(error))


_VERSIONS: Final = (
    f"{sys.version} numba {numba.__version__} {llvmlite.__version__} {np.__version__}"
)
_UNUSED_S: Final = 60 * 24 * 3600.0
"""Kernels are removed if their sources or versions were not used for this long."""


@cache
def _made_of(folder: Path) -> str:
    """Return a digest of the inputs of compilation: sources and compiler versions.

    Args:
        folder: the folder of a kernel's source. The kernel may use this folder, the folder of this
            module and `retriever.tree`.
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
    """Return the cache folder for kernels with a digest, None if there is no usable folder.

    Kernels are code. So a folder that belongs to another user, except root, is not used.
    """
    kept = Path(platformdirs.user_cache_dir("foredraft", appauthor=False)) / "kernels"
    folder = kept / made_of[:32]
    with suppress(OSError):  # an existing folder can be read without write access
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)  # marks it as in use
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
    """Remove kernels that were not used for a long time; this runs once per process."""
    with suppress(OSError):  # it cannot be listed, or another process also removes it
        for folder in kept.iterdir():
            if time.time() - folder.stat().st_mtime > _UNUSED_S:
                shutil.rmtree(folder, ignore_errors=True)


@cache
def _tell_no_cache(reason: str) -> None:
    """Log, once for each reason, that kernels cannot be cached."""
    _log.warning(
        "compiled kernels cannot be cached (%s): each start compiles them again, which takes "
        "half a minute; set NUMBA_CACHE_DIR to a folder that this user can write",
        reason,
    )


@cache
def _tell_compiling(*, is_kept: bool) -> None:
    """Log, once per process, that kernels are being compiled while callers wait.

    It is a warning, so that programs that set up no logging show it too.
    """
    kept = ", which are then cached" if is_kept else ""
    _log.warning("compiling kernels for this machine%s: up to a minute of CPU time", kept)


class RareKernels:
    """The kernels of one kind of evidence that few sequences use.

    By default the first call compiles or loads them, and the caller waits. A service compiles them
    in a separate process at their first use. Until that is done, it omits their evidence.

    Args:
        name: name of the kind of evidence.

    Attributes:
        is_ready: whether the kernels can be called.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_ready = True
        self._ask: Callable[[RareKernels], None] | None = None

    def defer(self, ask: "Callable[[RareKernels], None]") -> None:
        """Prevent calls until `is_ready` is set; `ask` is called at the first use."""
        self.is_ready, self._ask = False, ask

    def are_wanted(self) -> bool:
        """Return whether the kernels can be called now; if not, request them."""
        if not self.is_ready and self._ask is not None:
            ask, self._ask = self._ask, None
            ask(self)
        return self.is_ready


GROUPS: Final = RareKernels("groups")
PREDICTIONS: Final = RareKernels("predictions")
PHRASES: Final = RareKernels("phrases")
AHEAD: Final = RareKernels("ahead")
"""Kernels for drafts ahead: drafts that assume which tokens come next."""

RARE: Final = {each.name: each for each in (GROUPS, PREDICTIONS, PHRASES, AHEAD)}


_MANTISSA_BITS: Final = 23
_BIAS: Final = 127
_ONE: Final = np.float32(1 / (1 << _MANTISSA_BITS))
_LOWEST: Final = np.float32(-126.0)


@kernel()
def fast_log2(value: float) -> float:
    """Return log2 of a positive float32: exact at powers of two, linear between them.

    The error is at most 0.09. As a feature of a learned score, it only needs to be monotonic and
    cheap: it takes two instructions.
    """
    bits = np.float32(value).view(np.int32)
    return np.float32(bits) * _ONE - np.float32(_BIAS)


@kernel()
def fast_exp2(value: float) -> float:
    """Return 2 to the power of a float32 below 127, with a relative error under 0.0002."""
    bounded = max(np.float32(value), _LOWEST)
    whole = np.floor(bounded)
    part = np.float32(bounded - whole)
    # A cubic through 2^0 and 2^1 with the slopes that minimize the error between them.
    fitted = np.float32(1.0) + part * (
        np.float32(0.6954) + part * (np.float32(0.2264) + part * np.float32(0.0782))
    )
    scale = np.int32((np.int32(whole) + _BIAS) << _MANTISSA_BITS).view(np.float32)
    return np.float32(fitted * scale)


@kernel()
def octaves_below_one(probability: float) -> int:
    """Return how often 1 must be halved to be at most a probability; at most 31."""
    exponent = np.int64(np.float32(probability).view(np.int32) >> _MANTISSA_BITS) - _BIAS
    return min(31, max(0, -exponent))


_READ, _KEEP, _DATA = 0, 3, 1

if TYPE_CHECKING:

    def prefetch(array: NDArray[Any], index: int) -> None:
        """Prefetch the cache line of an array's element; the index may lie beyond its end."""
        ...

    def take_number(counter: NDArray[np.int64]) -> int:
        """Return an array's first number and increment it; any number of threads may do so."""
        ...

    def add_to(numbers: NDArray[np.int64], index: int, number: int) -> None:
        """Add to an array's element, by flat index; any number of threads may do so."""
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
        """Return an array's first number and increment it; any number of threads may do so."""

        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            held = context.make_array(counter)(context, builder, value=arguments[0])
            return builder.atomic_rmw("add", held.data, ir.IntType(64)(1), "monotonic")

        return types.int64(counter), generate

    @intrinsic
    def add_to(
        _context: Any, numbers: types.Array, index: types.Integer, number: types.Integer
    ) -> Any:
        """Add to an array's element, by flat index; any number of threads may do so."""

        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            held = context.make_array(numbers)(context, builder, value=arguments[0])
            place = builder.gep(held.data, [context.cast(builder, arguments[1], index, types.intp)])
            added = context.cast(builder, arguments[2], number, types.int64)
            builder.atomic_rmw("add", place, added, "monotonic")
            return context.get_dummy_value()

        return types.void(numbers, index, number), generate
