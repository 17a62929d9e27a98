"""The records that kernels share, and the scratch memory that one draft works in."""

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

MAX_MATCH: Final = 32
"""Match lengths are counted up to this many tokens."""

ROW: Final = np.dtype(
    [
        ("length", np.int32),  # tokens in the row's continuation
        ("match", np.int32),  # tokens that matched before it
        ("source", np.int32),  # database that it comes from
        ("next", np.int32),  # next row at the same node of the tree, -1 for none
        ("count", np.float64),  # occurrences that the row stands for
        ("weight", np.float64),  # its share in the prediction
    ]
)
"""One occurrence of the context's end; what followed it stands in `continuations`."""

NODE: Final = np.dtype(
    [
        ("token", np.int32),
        ("parent", np.int32),  # candidate above, 0 for the root
        ("depth", np.int32),
        ("first_row", np.int32),
        ("last_row", np.int32),
        ("slot", np.int32),  # where the token stands in the table of siblings
        ("place", np.int32),  # index in the tree, -1 for the root
        ("source", np.int32),
        ("weight", np.float64),  # sum over its rows
        ("heaviest", np.float64),  # weight of its heaviest row, whose source it has
        ("probability", np.float64),
    ]
)
"""One candidate for the tree; candidate 0 is the root."""


@dataclass(frozen=True, slots=True)
class Scratch:
    """Memory for one draft at a time, made once.

    Attributes:
        rows: ROW[max_rows], the evidence.
        continuations: int32[max_rows, max_depth], what followed each occurrence.
        nodes: NODE[max_nodes], candidates for the tree.
        heap: int32[max_nodes], candidates that are not in the tree yet.
        slots: int32[power of two], table of siblings, all -1 between calls.
        counts: float64[MAX_MATCH + 1], evidence by match length.
    """

    max_depth: int
    max_rows: int = 1024
    max_nodes: int = 1 << 14
    rows: NDArray[Any] = field(init=False)
    continuations: NDArray[np.int32] = field(init=False)
    nodes: NDArray[Any] = field(init=False)
    heap: NDArray[np.int32] = field(init=False)
    slots: NDArray[np.int32] = field(init=False)
    counts: NDArray[np.float64] = field(init=False)

    def __post_init__(self) -> None:
        num_slots = 4 * (1 << (self.max_rows - 1).bit_length())
        object.__setattr__(self, "rows", np.zeros(self.max_rows, ROW))
        continuations = np.zeros((self.max_rows, self.max_depth), np.int32)
        object.__setattr__(self, "continuations", continuations)
        object.__setattr__(self, "nodes", np.zeros(self.max_nodes, NODE))
        object.__setattr__(self, "heap", np.zeros(self.max_nodes, np.int32))
        object.__setattr__(self, "slots", np.full(num_slots, -1, np.int32))
        object.__setattr__(self, "counts", np.zeros(MAX_MATCH + 1))
