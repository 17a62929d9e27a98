"""Fast logarithms and powers of two, near enough for scores; loops over them become vector code."""

from typing import Final

import numpy as np

from retriever.kernels.compiling import kernel

_MANTISSA_BITS: Final = 23
_BIAS: Final = 127
_ONE: Final = np.float32(1 / (1 << _MANTISSA_BITS))
_LOWEST: Final = np.float32(-126.0)


@kernel()
def fast_log2(value: float) -> float:
    """Return log2 of a positive float32: exact at powers of two, straight lines between them.

    The error is at most 0.09. It is a feature of a learned score: what counts is that it rises
    and costs two instructions.
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
    """Return how often 1 must be halved to be no more than a probability, but 31 at most."""
    exponent = np.int64(np.float32(probability).view(np.int32) >> _MANTISSA_BITS) - _BIAS
    return min(31, max(0, -exponent))
