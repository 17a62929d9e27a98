"""How long a step may wait for its drafts."""

from typing import Final

SHARE: Final = 0.25
"""Of the time that an engine takes between two drafts, as much may be waited for the next."""

SHORTEST_S: Final = 0.005
LONGEST_S: Final = 0.02

_INERTIA: Final = 0.9
_IDLE_S: Final = 2.0


class Pace:
    """The deadline of steps: as given, or a share of what the engine's own part of a step takes.

    Args:
        deadline_s: longest wait, in seconds; None to measure: `SHARE` of the time between drafts,
            from `SHORTEST_S` to `LONGEST_S`.
    """

    def __init__(self, deadline_s: float | None) -> None:
        self._fixed_s = deadline_s
        self._between_s: float | None = None
        self._ended_s: float | None = None

    @property
    def deadline_s(self) -> float:
        """How long a step may wait now, in seconds."""
        if self._fixed_s is not None:
            return self._fixed_s
        between_s = self._between_s or 0.0
        return min(max(SHARE * between_s, SHORTEST_S), LONGEST_S)

    def begin(self, now_s: float) -> float:
        """Note that a step asks for drafts; return until when it may wait."""
        if self._ended_s is not None and now_s - self._ended_s < _IDLE_S:
            between_s = now_s - self._ended_s
            before_s = between_s if self._between_s is None else self._between_s
            self._between_s = _INERTIA * before_s + (1 - _INERTIA) * between_s
        return now_s + self.deadline_s

    def end(self, now_s: float) -> None:
        """Note that the engine goes on."""
        self._ended_s = now_s
