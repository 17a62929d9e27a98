"""The frontier of a tree: candidates that may yet be taken, the most probable first.

They stand on a heap as keys that are ordered as they are: the bits of the probability, and below
them the candidate's number, so that of equals the one that was considered first is taken. Beside it
stands how many there are of each rank, a sixteenth of an octave of probability: below the rank at
which there are as many candidates as are still wanted, nothing will be taken.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from retriever.kernels.arithmetic import fast_exp2, fast_log2
from retriever.kernels.compiling import kernel
from retriever.kernels.layout import NUM_RANKS

_LAST: Final = 0xFFFFFFFF
_NUMBER_BITS: Final = 32


@kernel()
def rank_of(probability: float) -> int:
    """Return which sixteenth of an octave below 1 a probability is in."""
    return min(NUM_RANKS - 1, max(0, np.int64(np.float32(-16.0) * fast_log2(probability))))


@kernel()
def least_of(rank: int) -> float:
    """Return the least probability of a rank."""
    if rank == NUM_RANKS - 1:
        return np.float32(0.0)
    octaves = np.float32(rank + 1) / np.float32(16.0)
    whole = np.ceil(octaves)
    # As `fast_log2` has it: straight between powers of two.
    return fast_exp2(-whole) * (np.float32(1.0) + whole - octaves)


@kernel(inline="always")
def key_of(probability: float, candidate: int) -> int:
    """Return the key of a candidate."""
    bits = np.int64(np.float32(probability).view(np.int32))
    return (bits << _NUMBER_BITS) | (_LAST - candidate)


@kernel(inline="always")
def candidate_of(key: int) -> int:
    """Return whose key it is."""
    return _LAST - (key & _LAST)


@kernel(inline="always")
def push(heap: NDArray[np.int64], size: int, key: int) -> None:
    """Add a key to a heap of `size`."""
    place = size
    while place > 0 and key > heap[(place - 1) >> 1]:
        heap[place] = heap[(place - 1) >> 1]
        place = (place - 1) >> 1
    heap[place] = key


@kernel(inline="always")
def pop(heap: NDArray[np.int64], size: int) -> int:
    """Take the highest key from a heap of `size`."""
    best, last = heap[0], heap[size - 1]
    place = 0
    while 2 * place + 1 < size - 1:
        child = 2 * place + 1
        if child + 1 < size - 1 and heap[child + 1] > heap[child]:
            child += 1
        if heap[child] <= last:
            break
        heap[place] = heap[child]
        place = child
    heap[place] = last
    return best
