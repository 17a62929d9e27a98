"""Varints, as Protocol Buffers write numbers: seven bits a byte, the lowest first."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from retriever.kernels.compiling import kernel

AT, COUNT = 0, 1
"""Fields of the state of reading, int64[2]: the next byte, and the numbers that were read."""

_GROUP: Final = 7  # bits of a byte
_MORE: Final = 128  # set where another byte follows
_BITS: Final = 32  # of a number; further ones are dropped
_MAX_BITS: Final = 70  # of ten bytes: no number takes more


@kernel()
def read_varints(
    content: NDArray[np.uint8], state: NDArray[np.int64], most: int, numbers: NDArray[np.uint32]
) -> bool:
    """Read the numbers that begin in the next bytes; their twin is protobuf's own parser.

    Args:
        content: uint8[n], numbers one after the other.
        state: int64[2], updated.
        most: bytes to read; the number that the last of them is in is read whole.
        numbers: uint32[n], written from `state[COUNT]` on.

    Returns:
        False if the bytes are no numbers.
    """
    at, count = state[AT], state[COUNT]
    end = min(len(content), at + most)
    while at < end:
        number, shift, byte = np.uint32(0), 0, _MORE
        while byte >= _MORE:
            if at == len(content) or shift == _MAX_BITS:
                return False
            byte = int(content[at])
            at += 1
            if shift < _BITS:
                number |= np.uint32((byte & (_MORE - 1)) << shift)
            shift += _GROUP
        numbers[count] = number
        count += 1
    state[AT], state[COUNT] = at, count
    return True
