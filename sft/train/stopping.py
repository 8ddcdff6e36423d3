"""Stops or saves at the end of a step, on all ranks at the same one.

| request                        | noticed by     | effect                                       |
|--------------------------------|----------------|----------------------------------------------|
| a signal (sft/signals.py)      | any rank       | finish the step, save, stop                  |
| the file <run>/stop            | rank 0         | the same                                     |
| train.max_time                 | rank 0         | the same, early enough to save in time       |
| the file <run>/save            | rank 0         | finish the step, save, remove it, continue   |

A file older than the start of the job was meant for an earlier one and is removed. Where the step to stop at cannot be saved, the job
ends by a RunError: starting it again is useless before there is room on the disk.

The ranks agree through one reduction over gloo at the end of each step.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from enum import IntEnum
from typing import Any

import torch
from transformers.trainer_callback import TrainerCallback

from sft import signals
from sft.errors import EXIT_INTERRUPTED, EXIT_TERMINATED, Interrupted, RunError
from sft.parallel import process_group as distributed
from sft.plan.job import Job
from sft.recipe.schema import Recipe
from sft.recipe.train import parse_duration
from sft.run.directory import Run
from sft.run.requests import SAVE, STOP, began, forget_stale
from sft.terminal import is_rank
from sft.train.tracking import finish_trackers


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

_BYTES_A_PARAMETER, _BYTES_A_SECOND = 16, 0.5e9
"""What the first save is assumed to take: weights, fp32 copies and two moments of the trained parameters, to a disk of 0.5 GB/s."""

_SAVE_FACTOR, _MARGIN = 1.5, 5.0


class TimeLimit:
    """Decides, at the end of each step, whether another one may begin: times of one clock, in seconds."""

    def __init__(self, deadline: float, save_seconds: float) -> None:
        self.deadline, self.save_seconds = deadline, save_seconds
        self._began: float | None = None
        self._seconds: deque[float] = deque(maxlen=50)
        """From each step's beginning to the next one's, with all that is between."""

    def begin(self, now: float) -> None:
        """A step begins."""
        if self._began is not None:
            self._seconds.append(now - self._began)
        self._began = now

    def is_due(self, now: float) -> bool:
        """Whether to stop here. The next step may take as long as the longest of the last."""
        step = max([*self._seconds, now - self._began if self._began is not None else 0.0])
        return now + step + _SAVE_FACTOR * self.save_seconds + _MARGIN > self.deadline


class Stopping(TrainerCallback):  # type: ignore[misc]
    """Agrees on requests in each step, and acts at its end. Must come before the callbacks that measure."""

    def __init__(self, run: Run, recipe: Recipe) -> None:
        self.run = run
        self.agreed = StopRequest.NOTHING
        """Why the training stops, once all ranks have agreed that it does."""
        self.shortage: str | None = None
        """Why the last save was not written."""
        self.limit: TimeLimit | None = None
        self._max_time = parse_duration(recipe.train.max_time) if recipe.train.max_time else None
        self._trains = False

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Remove what an earlier start was asked, and estimate how long a save may take."""
        if distributed.is_rank_0():
            for name in forget_stale(self.run.path, began()):
                print(f"Removed the file `{name}`: it is older than this start.", flush=True)
        if self._max_time is not None:
            trained = [weight for weight in model.parameters() if weight.requires_grad]
            count = sum(getattr(weight, "ds_numel", weight.numel()) for weight in trained)
            self.limit = TimeLimit(began() + self._max_time, count * _BYTES_A_PARAMETER / _BYTES_A_SECOND)

    def begin(self) -> None:
        """A step begins: from the first one on there is something to save, so signals wait for its end."""
        if not self._trains:
            signals.hold()
        self._trains = True
        if self.limit is not None:
            self.limit.begin(time.time())

    def _agree(self) -> StopRequest:
        """What any rank was asked; every rank must take part. A RuntimeError of gloo's says that one is gone."""
        greatest = torch.tensor(int(self._own_request()))
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(greatest, torch.distributed.ReduceOp.MAX, distributed.quiet_group())
        request = StopRequest(int(greatest))
        if request > StopRequest.SAVE:
            self.agreed = request
        return request

    def stops(self) -> bool:
        """Agree in the middle of something that can be broken off, such as an evaluation; every rank must."""
        return self._trains and self._agree() > StopRequest.SAVE

    def _own_request(self) -> StopRequest:
        received = signals.asked()
        if received is not None:
            return StopRequest[signal.Signals(received).name]
        if not distributed.is_rank_0():
            return StopRequest.NOTHING
        if (self.run.path / STOP).exists():
            return StopRequest.STOP_FILE
        if self.limit is not None and self.limit.is_due(time.time()):
            return StopRequest.MAX_TIME
        return StopRequest.SAVE if (self.run.path / SAVE).exists() else StopRequest.NOTHING

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save, or save and stop, where it was requested."""
        self.act(self._agree(), control)

    def act(self, request: StopRequest, control: Any) -> None:
        """Have the trainer do it at the end of this step."""
        if request == StopRequest.NOTHING:
            return
        control.should_save = True
        if request > StopRequest.SAVE:
            control.should_training_stop = True

    def saved(self, shortage: str | None, seconds: float, control: Any) -> None:
        """A checkpoint is complete after so many seconds, or there was no room. A request that came meanwhile waits for no other step."""
        self.shortage = shortage
        if distributed.is_rank_0():
            (self.run.path / SAVE).unlink(missing_ok=True)
        if shortage is not None:  # a stop request takes effect after the next step, which is saved if it can be
            return
        if self.limit is not None:
            self.limit.save_seconds = seconds
        if self.stops():
            control.should_training_stop = True

    def end(self, step: int) -> Interrupted | RunError | None:
        """What ends the program, where the training was stopped after this step: a RunError where that could not be saved.

        Raises:
            Interrupted: A signal came after the last step.
        """
        if self.agreed == StopRequest.NOTHING:
            signals.release()
            return None
        if is_rank() or self.shortage is not None:
            signals.ignore()  # the launcher sends SIGTERM to all ranks when the first one has ended
        if distributed.is_rank_0():
            (self.run.path / STOP).unlink(missing_ok=True)
        status = EXIT_INTERRUPTED if self.agreed == StopRequest.SIGINT else EXIT_TERMINATED
        name = _NAMES.get(self.agreed, self.agreed.name)
        interrupted = Interrupted(name, status, f" after step {step}", agreed=True)
        if self.shortage is None:
            return interrupted
        return RunError(f"{interrupted}. {self.shortage}. Free some space. {self.run.next_start}.")


def leave_where_stopped(job: Job, stopping: Stopping, step: int) -> None:
    """End as a finished training does, where it was stopped.

    Raises:
        Interrupted: It was, with a checkpoint.
        RunError: It was, without room for one.
    """
    reason = stopping.end(step)
    if reason is not None:
        with distributed.barrier_at_end():  # when rank 0 ends, the launcher ends all others
            finish_trackers(job.recipe.tracking)
        distributed.leave_group()
        raise reason
