"""Giving memory back that ended sessions leave in pieces: the C library would keep it."""

import ctypes
import os
from typing import Any, Final

_LIBRARY: Final[Any] = ctypes.CDLL(None) if os.name == "posix" else None
_trim: Final[Any] = getattr(_LIBRARY, "malloc_trim", None)


def give_back() -> None:
    """Return free pages to the system, where the C library can: that is glibc's. Takes a few ms.

    Source: malloc_trim(3); since glibc 2.8 it looks through the whole of every arena.
    """
    if _trim is not None:
        _trim(0)
