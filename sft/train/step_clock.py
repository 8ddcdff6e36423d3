"""How long optimizer steps take, and how much of that is spent waiting for data.

A step lasts from the moment its first batch is asked for until its update is done. What happens between steps does not
count: the held-out loss, checkpoints, the lines of the log, a profile that is written.

On a GPU the clock of the CPU would time the launching of the work. There an event is recorded in the stream at both ends of a
step, which waits for nothing, and the events are read when a line is logged: by then the trainer has read the loss from the
device, so they have all happened.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.trainer_callback import TrainerCallback


@dataclass(frozen=True)
class StepTimes:
    """The steps since the last line."""

    seconds: list[float] = field(default_factory=list)
    """Of each step."""

    data_seconds: float = 0.0
    """Of all of them, inside the data loader's `next`."""


class StepClock(TrainerCallback):  # type: ignore[misc]
    """Times the steps of the first rank; on the others it does nothing.

    The trainer calls `start` and `timed`; as a callback it must come before those that do work at the end of a step.

    Args:
        on_gpu: Whether the steps run on a GPU.
    """

    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu, self.running = on_gpu, False
        self._began: Any = None
        self._steps: list[tuple[Any, Any]] = []
        self._data_seconds = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Forget what was before."""
        self.running = state.is_world_process_zero
        self._began, self._steps, self._data_seconds = None, [], 0.0

    def start(self) -> None:
        """A step begins."""
        self._began = self._mark() if self.running else None

    def timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same batches; the time that each takes to come is counted. They can be taken up again afterwards."""
        return self._timed(batches) if self.running else batches

    def _timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        # Not `yield from`: it would close the epoch's batches with this generator, after one step.
        while True:
            asked = time.monotonic()
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                self._data_seconds += time.monotonic() - asked
            yield batch

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step is done."""
        if self._began is not None:
            self._steps.append((self._began, self._mark()))
            self._began = None

    def take(self) -> StepTimes:
        """The steps since the last call."""
        if self.on_gpu and self._steps:
            self._steps[-1][1].synchronize()
        seconds = [
            begin.elapsed_time(end) / 1000 if self.on_gpu else end - begin  # an event counts in milliseconds
            for begin, end in self._steps
        ]
        times = StepTimes(seconds, self._data_seconds)
        self._steps, self._data_seconds = [], 0.0
        return times

    def _mark(self) -> Any:
        if not self.on_gpu:
            return time.monotonic()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
