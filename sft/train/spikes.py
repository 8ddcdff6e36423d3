"""Losses that stand out from those before them."""

from __future__ import annotations

from collections import deque
from statistics import median

LINES, FEWEST = 50, 10
"""Lines looked back on, and how many there must be before anything stands out."""

DEVIATIONS, SHARE = 6.0, 0.1
"""How far above the median a spike is: so many standard deviations, and at least this share of the median."""


class Spikes:
    """Compares each line's loss with the median of those before.

    The standard deviation is 1.4826 x the median distance from the median, which a spike itself hardly moves. A falling loss has its
    median above it, so that the fall is no spike. Each line is compared, then counted.
    """

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=LINES)
        self.usual = float("nan")
        """The median that the last loss was compared with."""

    def sees(self, loss: float | None) -> bool:
        """Whether this loss is a spike."""
        if loss is None:
            return False
        before = list(self._losses)
        self._losses.append(loss)
        if len(before) < FEWEST:
            return False
        self.usual = median(before)
        deviation = 1.4826 * median(abs(one - self.usual) for one in before)
        return loss - self.usual > max(DEVIATIONS * deviation, SHARE * abs(self.usual))
