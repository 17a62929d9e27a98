"""The rows of one sequence in a pass: who sees whom, where each stands, and the mask of it.

Passes on a device that are captured as graphs compute the same there: `decoder.model.graphs`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from retriever.tree import ROOT, DraftTree


@dataclass(frozen=True, slots=True, eq=False)
class TreeRows:
    """Rows behind the context of a sequence, each below another of them or right behind it.

    Attributes:
        visible: bool[W, W], whether a row sees another: its ancestors and itself, nothing else.
        depths: int64[W], how many ancestors each has. Positions follow, so siblings share one.
        past: tokens of the context, all of which every row sees unless a window ends.
        num_read: the last so many rows are those of the pass; the others lie in the cache.
    """

    visible: NDArray[np.bool_]
    depths: NDArray[np.int64]
    past: int
    num_read: int

    @classmethod
    def of(cls, parents: Sequence[int], past: int) -> Self:
        """Lay out a tree by the row that is each one's parent, an earlier one or `ROOT`."""
        nothing = cls(np.zeros((0, 0), np.bool_), np.zeros(0, np.int64), past, 0)
        return nothing.extended(parents)

    @classmethod
    def behind_token(cls, tree: DraftTree, past: int) -> Self:
        """Lay out a sequence's last token, and a tree behind it."""
        return cls.of([ROOT, *(tree.parents + 1).tolist()], past)

    @classmethod
    def in_line(cls, length: int, past: int) -> Self:
        """Lay out rows each of which sees all before it."""
        return cls(np.tri(length, dtype=np.bool_), np.arange(length), past, length)

    def extended(self, parents: Sequence[int]) -> Self:
        """Add rows, by their parents among all rows; they are those of the next pass."""
        before, after = len(self.depths), len(self.depths) + len(parents)
        visible = np.eye(after, dtype=np.bool_)
        visible[:before, :before] = self.visible
        for row, parent in enumerate(parents, start=before):
            if parent != ROOT:
                visible[row] |= visible[parent]
        return type(self)(visible, visible.sum(axis=1) - 1, self.past, len(parents))

    @property
    def positions(self) -> NDArray[np.int64]:
        """int64[n], where the rows of the pass stand in their sequence."""
        return self.past + self.depths[-self.num_read :]

    @property
    def num_keys(self) -> int:
        """Tokens of the sequence and rows, all of them together."""
        return self.past + len(self.depths)

    def sees_all(self, first_key: int, window: int | None) -> bool:
        """Return whether one row is read alone, and sees all keys that are shown."""
        return self.num_keys == self.past + 1 and (window is None or self.past - first_key < window)

    @property
    def visible_to_read(self) -> NDArray[np.bool_]:
        """bool[n, W], which of all rows a row of the pass sees."""
        return self.visible[-self.num_read :]

    def key_positions(self, first_key: int) -> NDArray[np.int64]:
        """Return int64[keys], where the keys of the context from one on, and all rows, stand."""
        return np.concatenate([np.arange(first_key, self.past), self.past + self.depths])

    def beyond(self, first_key: int, window: int | None) -> NDArray[np.bool_] | None:
        """Return bool[n, keys], what lies beyond a row's window; `None` where nothing does.

        Args:
            first_key: position of the first key that is shown.
            window: positions that each row looks back over, itself included; `None` for all.
        """
        positions = self.positions
        if window is None or int(positions.max()) - first_key < window:
            return None
        found: NDArray[np.bool_] = positions[:, None] - self.key_positions(first_key) >= window
        return found

    def seen(self, first_key: int = 0, window: int | None = None) -> NDArray[np.bool_]:
        """Return bool[n, keys], whether a row sees the context from a key on, and all rows.

        Args: as of `beyond`.
        """
        seen = np.ones((self.num_read, self.num_keys - first_key), np.bool_)
        seen[:, self.past - first_key :] = self.visible_to_read
        beyond = self.beyond(first_key, window)
        return seen if beyond is None else seen & ~beyond
