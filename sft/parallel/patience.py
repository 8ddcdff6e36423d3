"""Waiting for a rank that works alone for hours, without waiting for one that is gone.

The ranks send each other a pulse while they wait, so that the wait may be long and each answer must still come within
train.ddp_timeout: a rank that was killed, and a link that was cut, are noticed as they are in training.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any

_LONGEST_INTERVAL = 5.0
"""Seconds between two pulses."""


class _Pulse(Thread):
    """Adds up, again and again, how many ranks have come to the end of the stretch, until all have."""

    def __init__(self, group: Any, ranks: int, interval: float) -> None:
        super().__init__(name="pulse", daemon=True)
        self.group, self.ranks, self.interval = group, ranks, interval
        self.arrived, self.abandoned = Event(), Event()
        self.error: Exception | None = None

    def run(self) -> None:
        """Until all have arrived, or one is gone."""
        try:
            while not self.abandoned.is_set() and self._arrivals() < self.ranks:
                pass
        except Exception as error:
            self.error = error

    def _arrivals(self) -> int:
        import torch

        # A rank that has arrived waits in the sum for those that have not, which come to it once an interval.
        count = torch.tensor([int(self.arrived.wait(self.interval))])
        torch.distributed.all_reduce(count, group=self.group)
        return int(count.item())


@contextmanager
def patience(group: Any, timeout: float) -> Iterator[None]:
    """A stretch that ranks may go through hours apart: it ends on every rank when the last one has come to its end.

    Args:
        group: All ranks, over gloo; nobody else uses it meanwhile.
        timeout: The group's, in seconds: how long a rank may not be heard of.

    Raises:
        RuntimeError: gloo's, where a rank or the link to it is gone. The rank that works is told at its end.
    """
    import torch

    pulse = _Pulse(group, torch.distributed.get_world_size(group), min(_LONGEST_INTERVAL, timeout / 4))
    pulse.start()
    try:
        yield
    except BaseException:
        pulse.abandoned.set()
        pulse.arrived.set()
        raise
    pulse.arrived.set()
    pulse.join()
    if pulse.error is not None:
        raise pulse.error
