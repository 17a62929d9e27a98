"""Kernels that few sequences ask for, and that nobody is to wait for.

Where nothing is said, they are compiled or loaded by the first call, which waits. A service has
them compiled in a process beside when they are asked for first: until that is done, what they
would find is left out.
"""

from collections.abc import Callable
from typing import Final


class RareKernels:
    """The kernels of one kind of evidence.

    Args:
        name: of the kind.

    Attributes:
        is_ready: whether they can be called.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_ready = True
        self._ask: Callable[[RareKernels], None] | None = None

    def defer(self, ask: "Callable[[RareKernels], None]") -> None:
        """Have them not called until `is_ready` is set; `ask` is called once they are wanted."""
        self.is_ready, self._ask = False, ask

    def are_wanted(self) -> bool:
        """Return whether they can be called; where they cannot, they will be later."""
        if not self.is_ready and self._ask is not None:
            ask, self._ask = self._ask, None
            ask(self)
        return self.is_ready


GROUPS: Final = RareKernels("groups")
PREDICTIONS: Final = RareKernels("predictions")
PHRASES: Final = RareKernels("phrases")
AHEAD: Final = RareKernels("ahead")
"""Of drafts after what may come."""

RARE: Final = {each.name: each for each in (GROUPS, PREDICTIONS, PHRASES, AHEAD)}
