"""The time that outputs are dated with and that they age by."""

import time
from typing import Final

# Where there is one, a clock that goes on while the machine is suspended.
_RISING: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_BEGAN_S: Final = time.time() - time.clock_gettime(_RISING)


def steady_time() -> float:
    """Return seconds since 1970, by the machine's clock as it stood when this process began.

    Should that clock be set, by an hour or by days, nothing here is younger or older than before.
    """
    return _BEGAN_S + time.clock_gettime(_RISING)
