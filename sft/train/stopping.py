"""Stops or saves at the end of a step, on all ranks at the same one.

| asks                                    | hears it         | then                                     |
|-----------------------------------------|------------------|------------------------------------------|
| a signal (sft/signals.py)          | whichever rank   | finish the step, save, stop              |
| the file <run>/stop                     | the first rank   | the same                                 |
| train.max_time                          | the first rank   | the same, in time to save                |
| the file <run>/save                     | the first rank   | finish the step, save, remove it, go on  |

A file that is older than the start of the job asked an earlier one, and is removed. Where the step that a job was to end with could not be
saved, it ends by a RunError instead: nobody should start it again before somebody has made room.

Each rank says what it was asked in one sum over a gloo group of its own, which begins with the last micro-batch of a step and is
read at the step's end: nothing waits for it, and a rank that is gone is noticed as in any other sum.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_callback import TrainerCallback

from sft import signals as interruption
from sft.checkpoint.write import Shortage
from sft.errors import EXIT_INTERRUPTED, EXIT_TERMINATED, Interrupted, RunError
from sft.parallel.progress import Progress
from sft.recipe.schema import Recipe
from sft.recipe.train import parse_duration
from sft.run.directory import Run
from sft.terminal import is_rank
from sft.train.max_time import TimeLimit, assumed_save_seconds
from sft.train.request_files import SAVE, STOP, began, forget_stale


class Wish(IntEnum):
    """What a rank was asked; of all ranks' the greatest counts."""

    NOTHING = 0
    SAVE = 1
    MAX_TIME = 2
    STOP_FILE = 3
    SIGHUP = 4
    SIGUSR1 = 5
    SIGTERM = 6
    SIGINT = 7


SAID = {Wish.MAX_TIME: "train.max_time", Wish.STOP_FILE: "the file `stop`"}


class Stopping(TrainerCallback):  # type: ignore[misc]
    """Asks all ranks in each step, and acts at its end. Must come before the callbacks that measure.

    Args:
        run: The run's folder.
        recipe: Its time limit, and how long a rank waits for another.
        progress: Knows when a save began.
        rank: Of this process.
        ranks: Of the job.
    """

    def __init__(self, run: Path, recipe: Recipe, progress: Progress, rank: int, ranks: int) -> None:
        self.run, self.progress, self.rank = run, progress, rank
        self.wish = Wish.NOTHING
        """What all ranks have agreed on, once it is to stop."""
        self.shortage: Shortage | None = None
        """Why the last save is not there."""
        self.limit: TimeLimit | None = None
        self._max_time = parse_duration(recipe.train.max_time) if recipe.train.max_time else None
        self._group: Any = None
        if ranks > 1:
            self._group = torch.distributed.new_group(
                backend="gloo", timeout=timedelta(seconds=recipe.train.ddp_timeout)
            )
        self._asked: torch.Tensor | None = None
        self._work: Any = None
        self._step = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Forget what an earlier start was asked, and know how long a save may take."""
        if self.rank == 0:
            for name in forget_stale(self.run, began()):
                print(f"The file `{name}` is older than this start, and asks nothing of it: removed.", flush=True)
        if self._max_time is not None:
            trained = [weight for weight in model.parameters() if weight.requires_grad]
            count = sum(getattr(weight, "ds_numel", weight.numel()) for weight in trained)
            self.limit = TimeLimit(began() + self._max_time, assumed_save_seconds(count))

    def begin(self, step: int) -> None:
        """A step begins: from the first one on there is something to save."""
        if not self._step:
            interruption.hold()
        self._step = step
        if self.limit is not None:
            self.limit.begin(time.time())

    def ask(self) -> None:
        """Begin to ask all ranks; each must."""
        self._asked = torch.tensor(int(self._own_wish()))
        if self._group is not None:
            self._work = torch.distributed.all_reduce(
                self._asked, op=torch.distributed.ReduceOp.MAX, group=self._group, async_op=True
            )

    def answer(self) -> Wish:
        """What all ranks were asked.

        Raises:
            RuntimeError: gloo's, where a rank is gone.
        """
        if self._asked is None:
            self.ask()
        if self._work is not None:
            self._work.wait()
        assert self._asked is not None
        wish = Wish(int(self._asked))
        self._asked = self._work = None
        if wish > Wish.SAVE:
            self.wish = wish
        return wish

    def stops(self) -> bool:
        """Ask in the midst of something that may be left off, such as a measurement; each rank must."""
        return bool(self._step) and self.answer() > Wish.SAVE

    def _own_wish(self) -> Wish:
        asked = interruption.asked()
        if asked is not None:
            return Wish[signal.Signals(asked).name]
        if self.rank:
            return Wish.NOTHING
        if (self.run / STOP).exists():
            return Wish.STOP_FILE
        if self.limit is not None and self.limit.is_due(time.time()):
            return Wish.MAX_TIME
        return Wish.SAVE if (self.run / SAVE).exists() else Wish.NOTHING

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save, or save and stop, where it was asked for."""
        self.act(self.answer(), control)

    def act(self, wish: Wish, control: Any) -> None:
        """Have the trainer do it at the end of this step."""
        if wish == Wish.NOTHING:
            return
        # The mean of a line begins where a run goes on: what is since the last line would be in none.
        control.should_save = control.should_log = True
        if wish > Wish.SAVE:
            control.should_training_stop = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A checkpoint is complete, or there was no room. Who has asked meanwhile need not wait for another step."""
        asked = self.rank == 0 and (self.run / SAVE).exists()
        if asked:
            (self.run / SAVE).unlink(missing_ok=True)
        if self.shortage is not None:
            # Each step would try again and say so. Who asks to stop is heard at the end of the next one, which is saved if it can be.
            if asked and not self.wish:
                words = "The file `save` is removed: make it again once there is room."
                print(words, file=sys.stderr, flush=True)
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
        if self.wish == Wish.NOTHING:
            interruption.release()
            return None
        if is_rank():  # the launcher sends SIGTERM to all when the first of them has ended
            interruption.ignore()
        if self.rank == 0:
            (self.run / STOP).unlink(missing_ok=True)
        status = EXIT_INTERRUPTED if self.wish == Wish.SIGINT else EXIT_TERMINATED
        return Interrupted(SAID.get(self.wish, self.wish.name), status, f" after step {step}", agreed=True)

    @contextmanager
    def losses_told(self, step: int) -> Iterator[None]:
        """Training has returned. What interrupts the job from here on loses the steps that were not saved, and that is told.

        Args:
            step: The last one.

        Raises:
            RunError: The job was interrupted, and the last save had no room.
        """
        try:
            yield
        except Interrupted as interrupted:
            if self.shortage is None:
                raise
            interruption.ignore()  # it ends by itself
            raise RunError(self._lost(interrupted, step, self.shortage)) from None

    def _lost(self, interrupted: Interrupted, step: int, shortage: Shortage) -> str:
        steps = "1 step is" if step - shortage.kept == 1 else f"{step - shortage.kept} steps are"
        kept = f"checkpoint-{shortage.kept} stays" if shortage.kept else "There is no checkpoint"
        return f"{interrupted}. {shortage.words}. {kept}: {steps} lost. Free some space. {Run(self.run).next_start}."
