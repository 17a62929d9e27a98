"""The tokens of one sequence, in one buffer that grows."""

from collections.abc import Sequence as Ids

import numpy as np

from retriever.drafter import TokenIds


class Sequence:
    """What is committed of a sequence, the prompt first.

    Args:
        prompt: int32[n].
    """

    def __init__(self, prompt: TokenIds) -> None:
        self._buffer = prompt.copy()
        self._length = len(prompt)

    @property
    def tokens(self) -> TokenIds:
        """int32[n], a view that later tokens leave as it is."""
        return self._buffer[: self._length]

    def extend(self, tokens: Ids[int]) -> None:
        """Commit tokens."""
        end = self._length + len(tokens)
        if end > len(self._buffer):
            self._buffer = np.concatenate([self.tokens, np.empty(end, np.int32)])
        self._buffer[self._length : end] = tokens
        self._length = end
