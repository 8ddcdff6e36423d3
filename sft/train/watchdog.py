"""Ends a rank that hangs, with one message and the stacks of its threads. docs/debugging.md

A thread on each rank compares every few seconds how far the main thread is. Where that has not moved for half of train.ddp_timeout, it
writes the stacks of all threads to <run>/logs/rank-N.stacks.txt. Ranks that wait for another one give up after train.ddp_timeout; a rank
that waits for nobody is ended here, by `end_limit`.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers.trainer_callback import TrainerCallback

from sft import terminal
from sft.errors import EXIT_CRASHED
from sft.run.directory import Run
from sft.signals import on_signal
from sft.train.progress import CHECKPOINT, START, Progress

ENDS_AFTER = 20
"""Median steps in one place after which a job is ended; train.ddp_timeout where that is longer."""

FIRST_STEPS = 10
"""Times longer for the first steps, which compile, and for what comes before them."""


def end_limit(phase: str, step_seconds: float | None, timeout: float, ranks: int) -> float | None:
    """Seconds in one place after which a rank is ended; None where it may take as long as it needs.

    Args:
        phase: From sft/train/progress.py.
        step_seconds: The median step; None during the first steps.
        timeout: train.ddp_timeout: how long a rank waits for the others.
        ranks: Of the job. With several, those that wait give up first.

    >>> end_limit("forward", 2.0, 600, 1), end_limit("forward", 60.0, 600, 1), end_limit("checkpoint", 2.0, 600, 1)
    (600, 1200.0, None)
    """
    if phase == CHECKPOINT:
        return None
    first = phase == START or step_seconds is None
    limit = FIRST_STEPS * timeout if first else max(timeout, ENDS_AFTER * (step_seconds or 0))
    return limit if ranks == 1 else 1.1 * limit + 10


class Watchdog(TrainerCallback):  # type: ignore[misc]
    """Watches the main thread of this rank.

    Args:
        progress: Moved on by the main thread.
        run: Stacks are written to its logs/.
        rank: Of this process.
        ranks: Of the job.
        timeout: train.ddp_timeout, seconds.
    """

    def __init__(self, progress: Progress, run: Run, rank: int, ranks: int, timeout: float) -> None:
        self.progress, self.run, self.rank, self.ranks, self.timeout = progress, run, rank, ranks, timeout
        self.folder = run.path / "logs"
        self.every = min(5.0, timeout / 20)
        """Seconds between two looks."""
        self._seen, self._since, self._looked = progress.place, time.monotonic(), time.monotonic()
        self._dumped = False
        self._stacks: Any = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start to watch."""
        self.open(time.monotonic())
        faulthandler.enable(self._stacks)
        # SIGUSR1 is Slurm's. Not faulthandler.register: it dumps without Python's lock, and crashed on a running thread.
        on_signal(signal.SIGUSR2, self._dump)
        self._thread.start()

    def open(self, now: float) -> None:
        """Open the file for stacks, and start to count at this time of a monotonic clock."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._stacks = self._file(self.rank).open("a")
        self._since = self._looked = now

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step is done."""
        self.progress.end()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop watching."""
        self._ended.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        on_signal(signal.SIGUSR2, None)
        faulthandler.enable(sys.__stderr__ or 2)
        self.close()

    def close(self) -> None:
        """Close the file for stacks, and remove it where nothing was written."""
        self._stacks.close()
        with suppress(OSError):  # an empty file says nothing, and other ranks may have removed the folder
            if not self._wrote(self.rank):
                self._file(self.rank).unlink()
            self.folder.rmdir()

    def _watch(self) -> None:
        while not self._ended.wait(self.every):
            # Where the main thread keeps Python's lock, this thread stands too. This timer needs no lock.
            faulthandler.dump_traceback_later(self.timeout / 2, file=self._stacks)
            with suppress(OSError):  # a full disk must not end the watch
                text = self.look(time.monotonic())
                if text is not None:
                    self._end(text)

    def look(self, now: float) -> str | None:
        """Compare this rank's place with the one seen last.

        Args:
            now: Seconds of a monotonic clock.

        Returns:
            Why this rank must be ended, where it must.
        """
        pause, self._looked = now - self._looked, now
        if pause > 5 * self.every + 1:  # this process itself was stopped, or starved: that time is not the place's
            self._since += pause
        place, usual = self.progress.place, self.progress.step_seconds()
        if place != self._seen:
            self._seen, self._since, self._dumped = place, now, False
            return None
        stood, limit = now - self._since, end_limit(place.phase, usual, self.timeout, self.ranks)
        ends = limit is not None and stood > limit
        if ends or (stood > self.timeout / 2 and not self._dumped):
            self._dumped = True
            stamp = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            self._stacks.write(f"\n=== {stamp} rank {self.rank}: {place}, {stood:.0f} s\n")
            self._stacks.flush()
            self._dump()
        if not ends:
            return None
        step = f" A step takes {usual:.2g} s." if usual is not None else ""
        return (
            f"Rank {self.rank} ({socket.gethostname()}, pid {os.getpid()}) has not moved for {stood:.0f} s, so it is ended: {place}."
            f"{step} Stacks: {self._file(self.rank)}"
        )

    def _dump(self) -> None:
        with suppress(OSError, ValueError):  # a full disk, or a file that was closed meanwhile
            faulthandler.dump_traceback(self._stacks, all_threads=True)

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


def name_debug_files(run: Run, rank: int) -> None:
    """Set where NCCL and torch's flight recorder write, before NCCL starts with the first collective on a GPU."""
    folder = run.path / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("NCCL_DEBUG_FILE", str(folder / f"rank-{rank}.nccl.log"))
    # torch appends the rank.
    os.environ.setdefault("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(folder / "flight-recorder-"))
