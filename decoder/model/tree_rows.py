"""The rows of one sequence in a pass: the keys that each row sees, and its position.

Captured passes compute the same on the device; see `decoder.model.graphs`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from retriever.tree import ROOT, DraftTree


@dataclass(frozen=True, slots=True, eq=False)
class TreeRows:
    """Rows after a sequence's context; each is a child of another row or of the context.

    Attributes:
        visible: bool[W, W], whether each row sees each row: a row sees only its ancestors and
            itself.
        depths: int64[W], number of ancestors of each row. It determines the row's position, so
            siblings have the same position.
        past: number of tokens in the context; without a window, every row sees all of them.
        num_read: number of last rows that belong to the pass; the other rows are in the cache.
    """

    visible: NDArray[np.bool_]
    depths: NDArray[np.int64]
    past: int
    num_read: int

    @classmethod
    def of(cls, parents: Sequence[int], past: int) -> Self:
        """Lay out a tree, given each row's parent: an earlier row or `ROOT`."""
        nothing = cls(np.zeros((0, 0), np.bool_), np.zeros(0, np.int64), past, 0)
        return nothing.extended(parents)

    @classmethod
    def behind_token(cls, tree: DraftTree, past: int) -> Self:
        """Lay out a sequence's last token and the tree after it."""
        return cls.of([ROOT, *(tree.parents + 1).tolist()], past)

    @classmethod
    def in_line(cls, length: int, past: int) -> Self:
        """Lay out a chain of rows: each row sees all rows before it."""
        return cls(np.tri(length, dtype=np.bool_), np.arange(length), past, length)

    def extended(self, parents: Sequence[int]) -> Self:
        """Add the rows of the next pass, given each row's parent among all rows."""
        before, after = len(self.depths), len(self.depths) + len(parents)
        visible = np.eye(after, dtype=np.bool_)
        visible[:before, :before] = self.visible
        for row, parent in enumerate(parents, start=before):
            if parent != ROOT:
                visible[row] |= visible[parent]
        return type(self)(visible, visible.sum(axis=1) - 1, self.past, len(parents))

    @property
    def positions(self) -> NDArray[np.int64]:
        """Return int64[n], the positions of the pass's rows in their sequence."""
        return self.past + self.depths[-self.num_read :]

    @property
    def num_keys(self) -> int:
        """Number of context tokens and rows together."""
        return self.past + len(self.depths)

    def sees_all(self, first_key: int, window: int | None) -> bool:
        """Return whether the pass has a single row that sees all keys from `first_key` on."""
        return self.num_keys == self.past + 1 and (window is None or self.past - first_key < window)

    @property
    def visible_to_read(self) -> NDArray[np.bool_]:
        """Return bool[n, W], whether each row of the pass sees each of all rows."""
        return self.visible[-self.num_read :]

    def key_positions(self, first_key: int) -> NDArray[np.int64]:
        """Return int64[keys], the positions of the keys from `first_key` on, all rows included."""
        return np.concatenate([np.arange(first_key, self.past), self.past + self.depths])

    def beyond(self, first_key: int, window: int | None) -> NDArray[np.bool_] | None:
        """Return bool[n, keys], the keys outside each row's window; `None` if there are none.

        Args:
            first_key: position of the first key.
            window: number of positions that each row sees, itself included; `None` for all.
        """
        positions = self.positions
        if window is None or int(positions.max()) - first_key < window:
            return None
        found: NDArray[np.bool_] = positions[:, None] - self.key_positions(first_key) >= window
        return found

    def seen(self, first_key: int = 0, window: int | None = None) -> NDArray[np.bool_]:
        """Return bool[n, keys], whether each row sees each key from `first_key` on, rows included.

        Args: see `beyond`.
        """
        seen = np.ones((self.num_read, self.num_keys - first_key), np.bool_)
        seen[:, self.past - first_key :] = self.visible_to_read
        beyond = self.beyond(first_key, window)
        return seen if beyond is None else seen & ~beyond
