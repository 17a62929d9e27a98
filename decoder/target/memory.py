"""Out of memory, in whichever words the device says it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from decoder.errors import OutOfMemoryError
from indexer.errors import reason_of

_SIGNS: Final = ("out of memory", "can't allocate memory", "DefaultCPUAllocator", "bad_alloc")


@contextmanager
def within_memory(num_tokens: int) -> Iterator[None]:
    """Name the length of the context where the block finds no memory.

    Raises:
        OutOfMemoryError: what was wanted could not be allocated.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        raise OutOfMemoryError(
            f"out of memory at {num_tokens} tokens of context: {reason_of(error)}"
        ) from error


def _is_out_of_memory(error: Exception) -> bool:
    """Tell a lack of memory from other errors: on a CPU torch has no class of its own for it."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return any(sign in str(error) for sign in _SIGNS)
