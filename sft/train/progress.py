"""Counts how far the main thread of this rank is, for the watchdog's thread to read (sft/train/watchdog.py)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any, NamedTuple

DATA, COUNTING, FORWARD, BACKWARD, OPTIMIZER = "data", "count of tokens", "forward", "backward", "optimizer"
BETWEEN, CHECKPOINT, EVAL_LOSS, START = "end of the step", "checkpoint", "eval loss", "start"
EVALUATION = "evaluation"


class Place(NamedTuple):
    """Where a rank is."""

    step: int
    """The optimizer step in progress, counted from 1; 0 before the first."""

    moves: int
    """Since the step began: a loop within one phase moves too."""

    phase: str
    micro_batch: int
    """Counted from 1; 0 where the phase has none."""

    def __str__(self) -> str:
        micro_batch = f", micro-batch {self.micro_batch}" if self.micro_batch else ""
        return f"step {self.step}, {self.phase}{micro_batch}"


class Progress:
    """The place of this rank, and how long its last steps took. The trainer calls it."""

    def __init__(self) -> None:
        self.place = Place(0, 0, START, 0)
        self.batches = 0
        """Micro-batches of the step that were loaded."""
        self.passes = 0
        """Micro-batches of the step that went into the model."""
        self._began: float | None = None
        self._seconds: deque[float] = deque(maxlen=50)

    def at(self, phase: str, micro_batch: int = 0) -> None:
        """A phase begins, or moves on."""
        step, moves, _, _ = self.place
        self.place = Place(step, moves + 1, phase, micro_batch)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """The model is saved or verified, which may take as long as it needs, after a step."""
        self.at(CHECKPOINT)
        yield
        self.at(BETWEEN)

    def begin(self, step: int) -> None:
        """A step begins by loading its first micro-batch."""
        self.place, self.batches, self.passes, self._began = Place(step, 0, DATA, 1), 0, 0, time.monotonic()

    def watched(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same batches, each a move. The iterator can be continued afterwards."""
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
        """The model returned the loss of a micro-batch."""
        if training:
            self.at(BACKWARD, self.passes)
        else:
            self.at(EVAL_LOSS)

    def passed(self) -> None:
        """The backward pass of a micro-batch is done."""
        if self.passes >= self.batches:
            self.at(OPTIMIZER)

    def end(self) -> None:
        """The step is done."""
        if self._began is not None:
            self._seconds.append(time.monotonic() - self._began)
            self._began = None
        self.at(BETWEEN)

    def step_seconds(self) -> float | None:
        """The median of the last steps; None before three are done. The first one compiles and allocates, and does not count."""
        # A copy: the main thread may append meanwhile.
        seconds = list(self._seconds)
        return median(seconds[1:]) if len(seconds) > 2 else None
