"""Finding the end of a sequence in the sequence itself, from its beginning on."""

from typing import Any

from numpy.typing import NDArray

from retriever.kernels.compiling import kernel


@kernel(allocates=True)
def longest_repeat(tokens: NDArray[Any], max_length: int) -> tuple[int, int]:
    """Return the length of the longest end that occurred before, and where it first ended.

    Args:
        tokens: int32[n], the sequence.
        max_length: longest end to look for.

    Returns:
        Its length, and the position after its first occurrence; 0 and n where there is none.
    """
    total = len(tokens)
    best, best_end = 0, total
    for end in range(1, total):
        length, most = 0, min(end, max_length)
        while length < most and tokens[end - 1 - length] == tokens[total - 1 - length]:
            length += 1
        if length > best:
            best, best_end = length, end
    return best, best_end
