"""Stops or saves at the end of a step, on all ranks at the same one.

| request                        | noticed by     | effect                                       |
|--------------------------------|----------------|----------------------------------------------|
| a signal (sft/signals.py)      | any rank       | finish the step, save, stop                  |
| the file <run>/stop            | rank 0         | the same                                     |
| train.max_time                 | rank 0         | the same, early enough to save in time       |
| the file <run>/save            | rank 0         | finish the step, save, remove it, continue   |

A file older than the start of the job was meant for an earlier one and is removed. Where the step to stop at cannot be saved, the job
ends by a RunError: starting it again is useless before there is room on the disk.

The ranks agree through one reduction per step over a gloo group of its own, which begins with the last micro-batch and is read at the
end of the step. Nothing waits for it, and a rank that is gone is noticed as in any other collective.
"""

from __future__ import annotations

import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers.trainer_callback import TrainerCallback

from sft import signals
from sft.checkpoint.write import Shortage
from sft.errors import EXIT_INTERRUPTED, EXIT_TERMINATED, Interrupted, RunError
from sft.parallel.progress import Progress
from sft.recipe.schema import Recipe
from sft.recipe.train import parse_duration
from sft.run.directory import Run
from sft.run.requests import SAVE, STOP, began, forget_stale
from sft.terminal import is_rank


class StopRequest(IntEnum):
    """What a rank was asked to do; the greatest value of all ranks counts."""

    NOTHING = 0
    SAVE = 1
    MAX_TIME = 2
    STOP_FILE = 3
    SIGHUP = 4
    SIGUSR1 = 5
    SIGTERM = 6
    SIGINT = 7


_NAMES = {StopRequest.MAX_TIME: "train.max_time", StopRequest.STOP_FILE: "the file `stop`"}


_BYTES_A_PARAMETER = 16
_BYTES_A_SECOND = 0.5e9
_SAVE_FACTOR, _MARGIN = 1.5, 5.0


def assumed_save_seconds(parameters: int) -> float:
    """How long the first save may take: weights, fp32 copies and two moments of the trained parameters, to a disk of 0.5 GB/s."""
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


class Stopping(TrainerCallback):  # type: ignore[misc]
    """Agrees on requests in each step, and acts at its end. Must come before the callbacks that measure.

    Args:
        run: The run's folder.
        recipe: Its time limit, and how long a rank waits for another.
        progress: Knows when a save began.
        rank: Of this process.
        ranks: Of the job.
    """

    def __init__(self, run: Path, recipe: Recipe, progress: Progress, rank: int, ranks: int) -> None:
        self.run, self.progress, self.rank = run, progress, rank
        self.agreed = StopRequest.NOTHING
        """Why the training stops, once all ranks have agreed that it does."""
        self.shortage: Shortage | None = None
        """Why the last save was not written."""
        self.limit: TimeLimit | None = None
        self._max_time = parse_duration(recipe.train.max_time) if recipe.train.max_time else None
        self._group: Any = None
        if ranks > 1:
            timeout = timedelta(seconds=recipe.train.ddp_timeout)
            self._group = torch.distributed.new_group(backend="gloo", timeout=timeout)
        self._reduced: torch.Tensor | None = None
        self._reduction: Any = None
        self._step = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Remove what an earlier start was asked, and estimate how long a save may take."""
        if self.rank == 0:
            for name in forget_stale(self.run, began()):
                print(f"Removed the file `{name}`: it is older than this start.", flush=True)
        if self._max_time is not None:
            trained = [weight for weight in model.parameters() if weight.requires_grad]
            count = sum(getattr(weight, "ds_numel", weight.numel()) for weight in trained)
            self.limit = TimeLimit(began() + self._max_time, assumed_save_seconds(count))

    def begin(self, step: int) -> None:
        """A step begins: from the first one on there is something to save, so signals wait for its end."""
        if not self._step:
            signals.hold()
        self._step = step
        if self.limit is not None:
            self.limit.begin(time.time())

    def reduce(self) -> None:
        """Start the reduction over all ranks; every rank must."""
        self._reduced = torch.tensor(int(self._own_request()))
        if self._group is not None:
            self._reduction = torch.distributed.all_reduce(
                self._reduced, op=torch.distributed.ReduceOp.MAX, group=self._group, async_op=True
            )

    def agree(self) -> StopRequest:
        """What all ranks were asked.

        Raises:
            RuntimeError: From gloo, where a rank is gone.
        """
        if self._reduced is None:
            self.reduce()
        if self._reduction is not None:
            self._reduction.wait()
        assert self._reduced is not None
        request = StopRequest(int(self._reduced))
        self._reduced = self._reduction = None
        if request > StopRequest.SAVE:
            self.agreed = request
        return request

    def stops(self) -> bool:
        """Agree in the middle of something that can be broken off, such as an evaluation; every rank must."""
        return bool(self._step) and self.agree() > StopRequest.SAVE

    def _own_request(self) -> StopRequest:
        received = signals.asked()
        if received is not None:
            return StopRequest[signal.Signals(received).name]
        if self.rank:
            return StopRequest.NOTHING
        if (self.run / STOP).exists():
            return StopRequest.STOP_FILE
        if self.limit is not None and self.limit.is_due(time.time()):
            return StopRequest.MAX_TIME
        return StopRequest.SAVE if (self.run / SAVE).exists() else StopRequest.NOTHING

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save, or save and stop, where it was requested."""
        self.act(self.agree(), control)

    def act(self, request: StopRequest, control: Any) -> None:
        """Have the trainer do it at the end of this step."""
        if request == StopRequest.NOTHING:
            return
        # A resumed run starts a new mean: without a line here, the steps since the last one would be in none.
        control.should_save = control.should_log = True
        if request > StopRequest.SAVE:
            control.should_training_stop = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A checkpoint is complete, or there was no room. A request that came meanwhile need not wait for another step."""
        requested = self.rank == 0 and (self.run / SAVE).exists()
        if requested:
            (self.run / SAVE).unlink(missing_ok=True)
        if self.shortage is not None:
            # Otherwise each step would try again. A stop request takes effect after the next step, which is saved if it can be.
            if requested and not self.agreed:
                print("Removed the file `save`: create it again once there is room.", file=sys.stderr, flush=True)
            return
        if self.limit is not None:
            self.limit.save_seconds = time.monotonic() - self.progress.save_began
        if self.stops():
            control.should_training_stop = True

    def end(self, step: int) -> Interrupted | None:
        """Training has returned.

        Args:
            step: The last one.

        Returns:
            What ends the program, where the training was stopped.

        Raises:
            Interrupted: A signal came after the last step.
        """
        if self.agreed == StopRequest.NOTHING:
            signals.release()
            return None
        if is_rank():  # the launcher sends SIGTERM to all ranks when the first one has ended
            signals.ignore()
        if self.rank == 0:
            (self.run / STOP).unlink(missing_ok=True)
        status = EXIT_INTERRUPTED if self.agreed == StopRequest.SIGINT else EXIT_TERMINATED
        name = _NAMES.get(self.agreed, self.agreed.name)
        return Interrupted(name, status, f" after step {step}", agreed=True)

    @contextmanager
    def reporting_lost_steps(self, step: int) -> Iterator[None]:
        """Training has returned. An interruption from here on says which steps it loses.

        Args:
            step: The last one.

        Raises:
            RunError: The job was interrupted, and there was no room for the last save.
        """
        try:
            yield
        except Interrupted as interrupted:
            if self.shortage is None:
                raise
            signals.ignore()  # it ends by itself
            raise RunError(self._lost(interrupted, step, self.shortage)) from None

    def _lost(self, interrupted: Interrupted, step: int, shortage: Shortage) -> str:
        steps = "1 step is" if step - shortage.kept == 1 else f"{step - shortage.kept} steps are"
        kept = f"checkpoint-{shortage.kept} stays" if shortage.kept else "There is no checkpoint"
        return f"{interrupted}. {shortage.words}. {kept}: {steps} lost. Free some space. {Run(self.run).next_start}."
