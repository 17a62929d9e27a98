"""Survival of index files that are truncated while they are mapped into memory.

A read beyond the new end of a mapped file raises SIGBUS, which ends the process. The handler here
maps zeros over the missing pages, lets the read continue, and wakes a thread that drops the index.
Until then drafts read zeros, as from a damaged disk; kernels tolerate any value.

The handler is compiled with llvmlite. A Python handler would run only after the failed instruction,
which would be repeated forever. The handler calls only mmap, write and sigaction. The last two are
async-signal-safe (signal-safety(7)); mmap is a system call without state in the C library.
systemd's journal survives truncated files in the same way: systemd, src/basic/sigbus.c.
"""

import ctypes
import logging
import mmap
import os
import platform
import signal
import sys
from collections.abc import Callable, Iterable
from functools import cache
from threading import Lock, Thread
from typing import Any, Final, NamedTuple
from weakref import WeakMethod, finalize

import numpy as np
from llvmlite import binding
from numpy.typing import NDArray

from indexer.reader import Index

_logger = logging.getLogger(__name__)

_IS_KNOWN: Final = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
"""Whether the layouts below are right: those of glibc and musl on 64-bit Linux."""

_ADDRESS_AT: Final = 16  # offset of siginfo_t.si_addr
_ACTION_WORDS: Final = 32  # room for a struct sigaction, which takes 19 words
_FLAGS_WORD: Final = 17  # sigaction.sa_flags comes after the handler and a mask of 128 bytes
_FLAGS: Final = 0x4 | 0x08000000  # SA_SIGINFO, SA_ONSTACK
_MAP_FIXED: Final = 0x10  # flag of mmap(2) that Python's module lacks
_ERROR_OUTPUT: Final = 2  # file descriptor

_MAX_MAPS: Final = 1 << 16
"""Most maps of a process; Linux allows 65,530 (vm.max_map_count)."""

_ROW: Final = ("begin", "end", "was_cut", "line", "line_bytes")
"""Columns of a map: its addresses, whether its file was cut, and the message for a fatal case."""

_WAS_CUT: Final = _ROW.index("was_cut")

_FOREIGN: Final = (
    b"error: a file that is mapped into memory was cut, or its disk failed (SIGBUS). It is no "
    b"index that is drafted from; generations.mdb in the state directory is mapped as well\n"
)

_HANDLER: Final = """
declare i64 @mmap(i64, i64, i32, i32, i32, i64)
declare i64 @write(i32, i64, i64)
declare i32 @sigaction(i32, i64, i64)

define void @on_bus_error(i32 %signal, i64 %info, i64 %context) {{
begin:
  %address_at = add i64 %info, {address_at}
  %address_pointer = inttoptr i64 %address_at to i64*
  %address = load i64, i64* %address_pointer
  %count_pointer = inttoptr i64 {count} to i64*
  %count = load volatile i64, i64* %count_pointer
  br label %next
next:
  %place = phi i64 [0, %begin], [%following, %search]
  %following = add i64 %place, 1
  %is_left = icmp ult i64 %place, %count
  br i1 %is_left, label %search, label %foreign
search:
  %offset = mul i64 %place, {row_bytes}
  %row = add i64 %offset, {table}
  %row_pointer = inttoptr i64 %row to i64*
  %map_begin = load volatile i64, i64* %row_pointer
  %end_pointer = getelementptr i64, i64* %row_pointer, i64 1
  %map_end = load volatile i64, i64* %end_pointer
  %is_behind_begin = icmp uge i64 %address, %map_begin
  %is_before_end = icmp ult i64 %address, %map_end
  %is_inside = and i1 %is_behind_begin, %is_before_end
  br i1 %is_inside, label %survive, label %next
survive:
  %page = and i64 %address, {page_mask}
  %length = sub i64 %map_end, %page
  %zeros = call i64 @mmap(i64 %page, i64 %length, i32 {read}, i32 {map_flags}, i32 -1, i64 0)
  %is_mapped = icmp eq i64 %zeros, %page
  br i1 %is_mapped, label %tell, label %die
tell:
  %was_cut_pointer = getelementptr i64, i64* %row_pointer, i64 2
  store volatile i64 1, i64* %was_cut_pointer
  %told = call i64 @write(i32 {event}, i64 {one}, i64 8)
  ret void
die:
  %line_pointer = getelementptr i64, i64* %row_pointer, i64 3
  %line = load volatile i64, i64* %line_pointer
  %bytes_pointer = getelementptr i64, i64* %row_pointer, i64 4
  %bytes = load volatile i64, i64* %bytes_pointer
  br label %end
foreign:
  %handler_pointer = inttoptr i64 {before} to i64*
  %handler = load i64, i64* %handler_pointer
  %is_default = icmp ult i64 %handler, 2
  br i1 %is_default, label %end, label %chain
chain:
  %earlier = inttoptr i64 %handler to void (i32, i64, i64)*
  call void %earlier(i32 %signal, i64 %info, i64 %context)
  ret void
end:
  %last_line = phi i64 [%line, %die], [{foreign}, %foreign]
  %last_bytes = phi i64 [%bytes, %die], [{foreign_bytes}, %foreign]
  %said = call i64 @write(i32 {error_output}, i64 %last_line, i64 %last_bytes)
  %undone = call i32 @sigaction(i32 %signal, i64 {default}, i64 0)
  ret void
}}
"""
"""The handler: finds the map of the address that was read, and maps zeros from its page on.

After the missing page, a cut file has nothing. If no index has the address, the handler calls the
previous handler. If there is none, it writes a line, and the process ends as it would have without
the handler."""


class Watched(NamedTuple):
    """The maps that this process watches for cut files.

    Attributes:
        num_maps: number of maps whose files may be cut.
        num_left: how many more maps can be watched; maps beyond that are not watched.
        num_told: number of methods that are called after a cut.
    """

    num_maps: int
    num_left: int
    num_told: int


class _Guard:
    """The handler of this process, and the maps that it watches."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._count = np.zeros(1, np.int64)
        self._table = np.zeros((_MAX_MAPS, len(_ROW)), np.int64)
        self._places: dict[int, int] = {}  # by the id of a map's array
        self._free: list[int] = []
        self._lines: dict[bytes, NDArray[np.uint8]] = {}
        self._told: list[WeakMethod[Callable[[], None]]] = []
        self._event = os.eventfd(0, os.EFD_CLOEXEC)
        self._kept = _install(self._count, self._table, self._event)
        Thread(target=self._tell, name="foredraft-cut-files", daemon=True).start()

    def watch(self, array: NDArray[Any], line: bytes) -> None:
        """From now on, survive a cut of an array's file, until the array is freed."""
        with self._lock:
            if id(array) in self._places:
                return
            place = self._free.pop() if self._free else int(self._count[0])
            if place == _MAX_MAPS:
                return
            text = self._lines.setdefault(line, np.frombuffer(line, np.uint8))
            begin = array.ctypes.data
            end = begin - -array.nbytes // mmap.PAGESIZE * mmap.PAGESIZE
            self._table[place] = (begin, end, 0, text.ctypes.data, text.nbytes)
            self._count[0] = max(int(self._count[0]), place + 1)
            self._places[id(array)] = place
        finalize(array, self._forget, id(array)).atexit = False

    def was_cut(self, array: NDArray[Any]) -> bool:
        """Return whether a read of an array was beyond the end of its file."""
        place = self._places.get(id(array))
        return place is not None and bool(self._table[place, _WAS_CUT])

    def watched(self) -> Watched:
        """Return how many maps are watched, and how many methods are called after a cut."""
        with self._lock:
            num_left = _MAX_MAPS - int(self._count[0]) + len(self._free)
            num_told = sum(each() is not None for each in self._told)
            return Watched(len(self._places), num_left, num_told)

    def call(self, react: Callable[[], None]) -> None:
        """Register a method to be called, in another thread, after a cut was found."""
        with self._lock:
            told = [each for each in self._told if each() is not None]
            this = WeakMethod(react)
            self._told = told if this in told else [*told, this]

    def _forget(self, array: int) -> None:
        """Release the place of an array, before its memory is unmapped.

        Takes no lock, because the garbage collector may call it anywhere.
        """
        place = self._places.pop(array)
        self._table[place] = 0
        self._free.append(place)

    def _tell(self) -> None:
        while True:
            os.eventfd_read(self._event)
            with self._lock:
                told = list(self._told)
            for each in told:
                react = each()
                if react is None:
                    continue
                try:
                    react()
                except Exception:
                    _logger.exception("an index that was cut could not be dropped")
                del react


def _install(count: NDArray[np.int64], table: NDArray[np.int64], event: int) -> tuple[object, ...]:
    """Compile the handler and install it for SIGBUS; return the objects that must stay alive.

    Raises:
        OSError: the system refuses.
    """
    before, default = np.zeros(_ACTION_WORDS, np.int64), np.zeros(_ACTION_WORDS, np.int64)
    one, foreign = np.ones(1, np.uint64), np.frombuffer(_FOREIGN, np.uint8)
    text = _HANDLER.format(
        address_at=_ADDRESS_AT,
        count=count.ctypes.data,
        table=table.ctypes.data,
        row_bytes=table.strides[0],
        page_mask=-mmap.PAGESIZE,
        read=mmap.PROT_READ,
        map_flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED,
        event=event,
        one=one.ctypes.data,
        before=before.ctypes.data,
        default=default.ctypes.data,
        foreign=foreign.ctypes.data,
        foreign_bytes=foreign.nbytes,
        error_output=_ERROR_OUTPUT,
    )
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine()
    engine = binding.create_mcjit_compiler(binding.parse_assembly(text), machine)
    engine.finalize_object()
    action = np.zeros(_ACTION_WORDS, np.int64)
    action[0], action[_FLAGS_WORD] = engine.get_function_address("on_bus_error"), _FLAGS
    library: Any = ctypes.CDLL(None, use_errno=True)
    places = (ctypes.c_void_p(action.ctypes.data), ctypes.c_void_p(before.ctypes.data))
    if library.sigaction(int(signal.SIGBUS), *places) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return engine, before, default, one, foreign


@cache
def _guard() -> _Guard | None:
    """Return the guard of this process; None if the process does not survive cut files."""
    if not _IS_KNOWN:
        return None
    try:
        return _Guard()
    except (OSError, RuntimeError) as error:
        _logger.warning("an index file that is cut will end this process: %s", error)
        return None


def survive_cuts(indexes: Iterable[Index], react: Callable[[], None]) -> None:
    """Let reads of indexes continue, with zeros, where their files are cut.

    Works only on Linux on x86-64 or ARM64; elsewhere this does nothing.

    Args:
        indexes: open indexes.
        react: a method. After a read has found a cut, of these or other indexes, another thread
            calls it, as long as its object lives.
    """
    guard = _guard()
    if guard is None:
        return
    for index in indexes:
        line = (
            f"error: a file of the index {index.path} was cut while it was drafted from, and there "
            "was no memory to continue: restore the index and start again\n"
        ).encode("utf-8", "backslashreplace")
        for array in index.mapped_arrays():
            guard.watch(array, line)
    guard.call(react)


def watched() -> Watched | None:
    """Return what this process watches; None if it does not survive cut files."""
    guard = _guard()
    return None if guard is None else guard.watched()


def was_cut(index: Index) -> bool:
    """Return whether a read has found that a file of an index was cut."""
    guard = _guard()
    return guard is not None and any(guard.was_cut(each) for each in index.mapped_arrays())
