"""When a drafter is worth its own time."""

from collections import deque
from typing import Final

_RECENT_DRAFTS: Final = 9
_PROBING_SHARE: Final = 0.01
_MOST_STEPS: Final = 512
_MEMORY: Final = 0.8


class Asking:
    """Asks a drafter as long as its drafts save more than they take, and now and then after that.

    A drafter that does not pay is left alone for 1, 2, 4, ... steps, at most for so many that
    asking takes a hundredth of the time. One that takes less than that anyway is asked at every
    step. The first draft that pays again ends this, and one that begins rightly is followed by
    another at once.
    """

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_RECENT_DRAFTS)
        self._saved_s = 0.0
        self._pause = 0
        self._waits = 0

    @property
    def draft_s(self) -> float:
        """Seconds of a draft: the median of the latest; zero before the first."""
        return sorted(self._seconds)[len(self._seconds) // 2] if self._seconds else 0.0

    def is_due(self) -> bool:
        """Return whether the drafter is to be asked before this step; call it once a step."""
        if self._waits == 0:
            return True
        self._waits -= 1
        return False

    def learn(self, draft_s: float, saved_s: float, plain_s: float) -> None:
        """Take in what a draft took and what it is expected to save.

        Args:
            draft_s: seconds in the drafter.
            saved_s: seconds that plain decoding would take for what the draft brings, less what
                verifying costs; zero where nothing of it is worth verifying.
            plain_s: seconds of a pass without drafts.
        """
        first = not self._seconds
        self._seconds.append(draft_s)
        self._saved_s = saved_s if first else _MEMORY * self._saved_s + (1 - _MEMORY) * saved_s
        usual_s = self.draft_s
        if max(self._saved_s, saved_s) >= usual_s:
            self._pause = 0
        else:
            longest = min(int(usual_s / (_PROBING_SHARE * plain_s)), _MOST_STEPS)
            self._pause = min(max(1, 2 * self._pause), longest)
        self._waits = self._pause

    def encourage(self) -> None:
        """Ask again before the next step: the last draft began rightly, though it did not pay."""
        self._waits = 0
