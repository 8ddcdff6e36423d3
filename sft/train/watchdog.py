"""Ends a rank that hangs, with one message and the stacks of its threads. docs/debugging.md

A thread on each rank compares every few seconds how far the main thread is. Where that has not moved for half of train.ddp_timeout, it
writes the stacks of all threads to <run>/logs/rank-N.stacks.txt. Ranks that wait for another one give up after train.ddp_timeout; a rank
that waits for nobody is ended here. So is a rank that stands still while another one has failed, also on another
node: NCCL would let it wait.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from transformers.trainer_callback import TrainerCallback

from sft import terminal
from sft.errors import EXIT_CRASHED
from sft.run.directory import Run

START, DATA, OPTIMIZER, BETWEEN = "start", "data", "optimizer", "end of the step"
CHECKPOINT, EVAL_LOSS, EVALUATION = "checkpoint", "eval loss", "evaluation"

FIRST_STEPS, FIRST_TIMES = 3, 10
"""The first steps compile: they, and what comes before them, may take so many times longer."""

FAILED_ELSEWHERE = 15.0
"""Seconds in one place after which a rank is ended, where another has failed; gloo and the launcher are faster where they notice it."""


class Progress:
    """How far the main thread of this rank is. The trainer moves it on, and the watchdog's thread reads it."""

    def __init__(self) -> None:
        self.step, self.phase, self.steps = 0, START, 0
        """The optimizer step in progress, counted from 1; what of it; and how many this process has done."""
        self.moves = 0

    def at(self, phase: str) -> None:
        """A phase begins, or moves on."""
        self.phase = phase
        self.moves += 1

    def begin(self, step: int) -> None:
        """A step begins by loading its micro-batches."""
        self.step = step
        self.at(DATA)

    def end(self) -> None:
        """The step is done."""
        self.steps += 1
        self.at(BETWEEN)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """The model is saved or verified after a step, which may take as long as it needs."""
        self.at(CHECKPOINT)
        yield
        self.at(BETWEEN)


class Watchdog(TrainerCallback):  # type: ignore[misc]
    """Watches the main thread of this rank; `timeout` is train.ddp_timeout, seconds."""

    def __init__(self, progress: Progress, run: Run, rank: int, ranks: int, timeout: float) -> None:
        self.progress, self.run, self.rank, self.ranks, self.timeout = progress, run, rank, ranks, timeout
        self.folder = run.path / "logs"
        self.every = min(5.0, timeout / 20)
        """Seconds between two looks."""
        self._seen, self._stood, self._dumped = (START, -1), 0.0, False
        self._stacks: Any = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start to watch."""
        self.open()
        faulthandler.enable(self._stacks)
        self._thread.start()

    def open(self) -> None:
        """Open the file for stacks."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._stacks = self._file(self.rank).open("a")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step is done."""
        self.progress.end()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop watching."""
        self._ended.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        faulthandler.enable(sys.__stderr__ or 2)
        self.close()

    def close(self) -> None:
        """Close the file for stacks, and remove it where nothing was written."""
        self._stacks.close()
        with suppress(OSError):  # other ranks may have removed the folder
            if not self._wrote(self.rank):
                self._file(self.rank).unlink()
            self.folder.rmdir()

    def _watch(self) -> None:
        while not self._ended.wait(self.every):
            # Where the main thread keeps Python's lock, this thread stands too. This timer needs no lock.
            faulthandler.dump_traceback_later(self.timeout / 2, file=self._stacks)
            with suppress(OSError):  # a full disk must not end the watch
                if text := self.look():
                    self._end(text)

    def look(self) -> str | None:
        """Compare this rank's place with the one seen last; why the rank must be ended, where it must."""
        place = self.progress.phase, self.progress.moves
        if place != self._seen:
            self._seen, self._stood, self._dumped = place, 0.0, False
            return None
        self._stood += (
            self.every
        )  # by looks and not by a clock: while the process itself was stopped, nobody has looked
        if self._stood > FAILED_ELSEWHERE and (failure := terminal.shown_failure(self.run.path)):
            return failure
        ends = self._stood > self._limit()
        where = f"step {self.progress.step}, {self.progress.phase}"
        if ends or (self._stood > self.timeout / 2 and not self._dumped):
            self._dumped = True
            stamp = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            self._stacks.write(f"\n=== {stamp} rank {self.rank}: {where}, {self._stood:.0f} s\n")
            self._stacks.flush()
            faulthandler.dump_traceback(self._stacks, all_threads=True)
        if not ends:
            return None
        return (
            f"Rank {self.rank} ({socket.gethostname()}, pid {os.getpid()}) has not moved for {self._stood:.0f} s, so it is ended: {where}. "
            f"Stacks: {self._file(self.rank)}"
        )

    def _limit(self) -> float:
        """Seconds in one place after which this rank is ended. With several ranks, those that wait for it give up first."""
        if self.progress.phase == CHECKPOINT:
            return float("inf")
        limit = self.timeout * (FIRST_TIMES if self.progress.steps < FIRST_STEPS else 1)
        return limit if self.ranks == 1 else 1.1 * limit + 10

    def _end(self, message: str) -> None:
        """End the process from this thread: the main one hangs."""
        if self.rank == 0:
            with suppress(OSError):
                self.run.update(status="failed", error=message[:2000])
        terminal.show_message(f"{message}\n{self.run.next_start}.")
        os._exit(EXIT_CRASHED)

    def stacks(self) -> str:
        """Where to look for the rank that this one has waited for; empty where nothing stands still."""
        if not self._dumped:
            return ""
        silent = [rank for rank in range(self.ranks) if not self._wrote(rank)]
        names = ", ".join(map(str, silent[:8])) + (", ..." if len(silent) > 8 else "")
        stopped = f" None from rank {names}: stopped (SIGSTOP, a debugger), or its machine is gone." if silent else ""
        return f"Stacks: {self.folder}/rank-*.stacks.txt.{stopped}"

    def _file(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.stacks.txt"

    def _wrote(self, rank: int) -> bool:
        with suppress(OSError):
            return self._file(rank).stat().st_size > 0
        return False
