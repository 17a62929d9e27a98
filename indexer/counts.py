"""One byte for a count: exact where counts are small, then on a scale of equal ratios.

The scale is part of the on-disk format; docs/format.md specifies it.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from indexer.format import COUNT_DTYPE

_EXACT: Final = 16
_CODES_PER_DOUBLING: Final = 8


def _scale() -> NDArray[np.int64]:
    ratios = np.exp2(np.arange(1, 256 - _EXACT) / _CODES_PER_DOUBLING)
    return np.concatenate([np.arange(_EXACT + 1), np.rint(_EXACT * ratios)]).astype(np.int64)


COUNT_SCALE: Final = _scale()
"""int64[256]: the count that each code stands for.

Code c up to 16 stands for c, and above for 16 * 2**((c - 16) / 8), rounded to an integer; 255 for
some 1.6e10. Neighbours differ by at most 12%, so a code is at most 6% off.
"""

COUNT_VALUES: Final = COUNT_SCALE.astype(np.float32)
"""float32[256]: `COUNT_SCALE` for kernels."""

COUNT_SCALE.flags.writeable = False
COUNT_VALUES.flags.writeable = False
_MIDDLES: Final = (COUNT_SCALE[:-1] + COUNT_SCALE[1:]) / 2


def encode_counts(counts: NDArray[np.integer[Any]]) -> NDArray[np.uint8]:
    """Return the codes nearest to counts; of two that are equally near, the smaller one.

    Counts beyond the scale get its last code. A count of the scale gets its own code, and larger
    counts never get smaller codes.

    Args:
        counts: integers from 0 on, any shape.
    """
    return np.searchsorted(_MIDDLES, counts, side="left").astype(COUNT_DTYPE)
