"""Decides when to stop so that the checkpoint is saved within train.max_time. Pure; all times in seconds."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

_BYTES_A_PARAMETER = 16
_BYTES_A_SECOND = 0.5e9
_SAVE_FACTOR, _MARGIN = 1.5, 5.0


def assumed_save_seconds(parameters: int) -> float:
    """How long a save may take that was not measured yet: weights, fp32 copies and two moments to a disk of 0.5 GB/s.

    Args:
        parameters: That are trained.
    """
    return parameters * _BYTES_A_PARAMETER / _BYTES_A_SECOND


@dataclass
class TimeLimit:
    """Decides, before the end of each step, whether another one may begin."""

    deadline: float
    """Of the clock that `is_due` is given."""

    save_seconds: float
    """Of the last save, or what is assumed."""

    _began: float | None = None
    _seconds: deque[float] = field(default_factory=lambda: deque(maxlen=50))
    """From each step's beginning to the next one's, with all that is between."""

    def begin(self, now: float) -> None:
        """A step begins."""
        if self._began is not None:
            self._seconds.append(now - self._began)
        self._began = now

    def needed(self, now: float) -> float:
        """What the rest of this step, one more, and a save take. The longest of the last steps counts, not the usual one."""
        if not self._seconds or self._began is None:
            return _SAVE_FACTOR * self.save_seconds + _MARGIN
        left = max(0.0, median(self._seconds) - (now - self._began))
        return left + max(self._seconds) + _SAVE_FACTOR * self.save_seconds + _MARGIN

    def is_due(self, now: float) -> bool:
        """Whether to stop at the end of this step."""
        return now + self.needed(now) > self.deadline
