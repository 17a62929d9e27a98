"""Whether a draft model is worth its time, given what the other drafters have found."""

from typing import Final

import numpy as np

_NUM_BINS: Final = 8
_FADING: Final = 0.05
_TRIALS: Final = 6
_PROBE_EVERY: Final = 32


class Worth:
    """Learns what a slow drafter adds to the tree of quick ones, by how sure that tree is.

    The slow drafter is asked where the tokens that it has lately added there, at the pace of
    decoding, save more time than it takes. RASD (arXiv:2503.03434) sets such a threshold by hand.
    Each kind of tree is tried a few times first, and again now and then.

    Attributes:
        seconds: what asking takes, of late.
    """

    def __init__(self) -> None:
        self._gains = np.zeros(_NUM_BINS)
        self._trials = np.zeros(_NUM_BINS, np.int64)
        self._skipped = np.zeros(_NUM_BINS, np.int64)
        self.seconds = 0.0

    def pays(self, sureness: float, token_s: float) -> bool:
        """Return whether to ask the slow drafter now.

        Args:
            sureness: probability of the quick tree's first node, 0 where it is empty.
            token_s: seconds that a token takes at the present pace.
        """
        at = _bin(sureness)
        pays = self._gains[at] * token_s > self.seconds or self._trials[at] < _TRIALS
        self._skipped[at] = 0 if pays else self._skipped[at] + 1
        return bool(pays) or self._skipped[at] % _PROBE_EVERY == 0

    def learn(self, sureness: float, gain: float, seconds: float) -> None:
        """Take in what asking brought.

        Args:
            sureness: as it was then.
            gain: tokens that were accepted beyond those of the quick tree alone.
            seconds: what asking took.
        """
        at = _bin(sureness)
        self._trials[at] += 1
        fading = max(_FADING, 1 / self._trials[at])
        self._gains[at] += fading * (gain - self._gains[at])
        self.seconds += max(_FADING, 1 / self._trials.sum()) * (seconds - self.seconds)


def _bin(sureness: float) -> int:
    return min(int(sureness * _NUM_BINS), _NUM_BINS - 1)
