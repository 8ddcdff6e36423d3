"""How far this rank is: a place that the main thread moves on, and that any other thread may read.

The main thread only counts. Who looks at it, and what is made of it: sft/train/watchdog.py.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from statistics import median
from typing import Any, NamedTuple

DATA, COUNTING, FORWARD, BACKWARD, OPTIMIZER = "data", "count of tokens", "forward", "backward", "optimizer"
BETWEEN, CHECKPOINT, HELD_OUT, START = "end of the step", "checkpoint", "held-out loss", "start"
EVALUATION = "evaluation"


class Place(NamedTuple):
    """Where a rank is. Two ranks compare by the first two."""

    step: int
    """The optimizer step it works on, counted from 1; 0 before the first."""

    moves: int
    """Since the step began."""

    phase: str
    micro_batch: int
    """Counted from 1; 0 where the phase has none."""

    def __str__(self) -> str:
        micro_batch = f", micro-batch {self.micro_batch}" if self.micro_batch else ""
        return f"step {self.step}, {self.phase}{micro_batch}"


class Progress:
    """The place of this rank, and how long its last steps took. The trainer calls it; it waits for nothing."""

    def __init__(self) -> None:
        self.place = Place(0, 0, START, 0)
        self.batches = 0
        """Micro-batches of the step that have come."""
        self.passes = 0
        """Micro-batches of the step that went through the model."""
        self.save_began = time.monotonic()
        """The last save, in seconds of that clock."""
        self._began: float | None = None
        self._seconds: deque[float] = deque(maxlen=50)

    def at(self, phase: str, micro_batch: int = 0) -> None:
        """The main thread has come to a phase, or on within it."""
        step, moves, _, _ = self.place
        self.place = Place(step, moves + 1, phase, micro_batch)
        if phase == CHECKPOINT:
            self.save_began = time.monotonic()

    def begin(self, step: int) -> None:
        """A step begins: its first micro-batch is asked for."""
        self.place, self.batches, self.passes, self._began = Place(step, 0, DATA, 1), 0, 0, time.monotonic()

    def watched(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same batches, each a move. They can be taken up again afterwards."""
        while True:
            self.at(DATA, self.batches + 1)
            try:
                batch = next(batches)
            except StopIteration:
                return
            self.batches += 1
            self.at(COUNTING)
            yield batch

    def forward(self) -> None:
        """A micro-batch goes into the model."""
        self.passes += 1
        self.at(FORWARD, self.passes)

    def loss_known(self, training: bool) -> None:
        """It has come out of it."""
        if training:
            self.at(BACKWARD, self.passes)
        else:
            self.at(HELD_OUT)

    def passed(self) -> None:
        """Its gradients are there."""
        if self.passes >= self.batches:
            self.at(OPTIMIZER)

    def end(self) -> None:
        """The step is done."""
        if self._began is not None:
            self._seconds.append(time.monotonic() - self._began)
            self._began = None
        self.at(BETWEEN)

    def step_seconds(self) -> float | None:
        """The median of the last steps; None before three are done, of which the first compiles and allocates."""
        # A copy: the main thread may append meanwhile.
        seconds = list(self._seconds)
        return median(seconds[1:]) if len(seconds) > 2 else None
