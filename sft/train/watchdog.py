"""Tells which rank a job waits for when it stands still, and ends it when it has for too long.

Always on: a thread a rank that compares a number every few seconds.

| file in <run>/logs   | content                                                                                           |
|----------------------|---------------------------------------------------------------------------------------------------|
| rank-N.json          | the last thing that the rank said of itself: host, process, and once it is stalled where it stands |
| rank-N.stacks.txt    | Python stacks of all its threads: at a stall, a crash (SIGSEGV and the like), or a SIGUSR2         |

A rank that stands still dumps its stacks and says so in its file. A moment later the first rank that has said so reads the files
of all and prints one message. Files, not the job's store: a file can be written and read while any other rank is stopped or gone,
also the one that holds the store; it costs nothing while the job moves; and it is there afterwards. A rank that is stopped, or
hangs where Python cannot run, writes nothing, and is known by that.
"""

from __future__ import annotations

import faulthandler
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers.trainer_callback import TrainerCallback

from sft.files import write_json
from sft.parallel.progress import Place, Progress
from sft.parallel.stall import ALWAYS, DEBUG, Report, about, behind, end_limit, message
from sft.recipe.schema import REPOSITORY
from sft.signals import on_signal
from sft.terminal import to_terminal

FRAMES = 4
"""Innermost frames of a stack that are printed."""


class Watchdog(TrainerCallback):  # type: ignore[misc]
    """Watches this rank; the trainer's callback only starts and ends it, and counts steps.

    Args:
        progress: Moved on by the main thread.
        folder: <run>/logs, which all ranks share.
        rank: Of this process.
        ranks: Of the job.
        timeout: Of the process group, seconds: it ends a job that stands still.
        debug: Tell sooner, and add native stacks where py-spy is installed.
        tell: Shows a message to the user.
        end: Ends this process with a message, which is the job's last.
    """

    def __init__(
        self,
        progress: Progress,
        folder: Path,
        rank: int,
        ranks: int,
        timeout: float,
        debug: bool,
        tell: Callable[[str], None] = to_terminal,
        end: Callable[[str], None] | None = None,
    ) -> None:
        self.progress, self.folder, self.rank, self.ranks, self.tell = progress, folder, rank, ranks, tell
        self.timeout, self.debug, self.end = timeout, debug, end
        self.patience = DEBUG if debug else ALWAYS
        self.every = min(1.0 if debug else 5.0, timeout / 20)
        """Seconds between two looks."""
        self._host, self._pid = socket.gethostname(), os.getpid()
        self._ended = threading.Event()
        self._stacks: Any = None
        self._seen, self._since, self._looked = progress.place, time.monotonic(), time.monotonic()
        self._tell_at: float | None = None
        self._stalled = self._told = False
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to watch."""
        self.open(time.monotonic())
        faulthandler.enable(self._stacks)
        # SIGUSR1 is Slurm's. Not faulthandler.register: it dumps without Python's lock, and crashed on a thread that was running.
        on_signal(signal.SIGUSR2, self._dump)
        self._thread.start()

    def open(self, now: float) -> None:
        """Begin the files.

        Args:
            now: Seconds of the clock that `look` is given.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._stacks = (self.folder / f"rank-{self.rank}.stacks.txt").open("a")
        self._write(Report(self.rank, self._host, self._pid))
        self._since = self._looked = now

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step is done."""
        self.progress.end()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Watch no longer."""
        self._ended.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        on_signal(signal.SIGUSR2, None)
        faulthandler.enable(sys.__stderr__ or 2)
        self.close()

    def close(self) -> None:
        """End the files, and remove those that say nothing."""
        self._stacks.close()
        for file in (self._file(self.rank), Path(self._stacks.name)):
            with suppress(OSError):
                if file.suffix == ".json" or not file.stat().st_size:
                    file.unlink()
        with suppress(OSError):  # others write here too
            self.folder.rmdir()

    def _watch(self) -> None:
        while not self._ended.wait(self.every):
            # Where the main thread holds Python's lock this thread no longer runs; then this clock, which needs no lock, dumps.
            faulthandler.dump_traceback_later(self.timeout / 2, file=self._stacks)
            # A full disk, or a folder that is gone for a while, must not end the watch.
            with suppress(OSError):
                self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Compare this rank's place with the one seen last.

        Args:
            now: Seconds of a clock that only goes forward.
        """
        pause, self._looked = now - self._looked, now
        if pause > 5 * self.every + 1:  # this process itself was stopped, or starved: that is not its place's time
            self._since += pause
        place = self.progress.place
        if place != self._seen:
            stood, self._seen, self._since = now - self._since, place, now
            self._moves_again(stood)
            return
        limit = self.patience.limit(place.phase, self.progress.step_seconds(), self.timeout)
        if not self._stalled and now - self._since > limit:
            self._stalled = True
            # The others notice a little sooner or later; the first rank, if it can, before another speaks for it.
            self._tell_at = now + (2 * self.every + limit / 10) * (2 if self.rank else 1)
            self._report(place, now - self._since)
        if self._tell_at is not None and now >= self._tell_at:
            self._tell_at = None
            self._speak()
        longest = end_limit(place.phase, self.progress.step_seconds(), self.timeout, self.ranks)
        if self._stalled and longest is not None and now - self._since > longest and self.end is not None:
            self._report(place, now - self._since)
            self.end(self._message("So it is ended."))

    def _moves_again(self, seconds: float) -> None:
        if self._stalled:
            self._write(Report(self.rank, self._host, self._pid))
        if self._told:
            self.tell(f"The training moves again, after {seconds:.0f} s.")
        self._stalled, self._told, self._tell_at = False, False, None

    def _report(self, place: Place, seconds: float) -> None:
        self._write(Report(self.rank, self._host, self._pid, True, place, seconds, main_frames()))
        self._stacks.write(f"\n=== {time.strftime('%Y-%m-%dT%H:%M:%S%z')} rank {self.rank}: {place}, {seconds:.0f} s\n")
        self._stacks.flush()
        self._dump()
        if self.debug and shutil.which("py-spy"):
            with suppress(subprocess.SubprocessError):
                command = ["py-spy", "dump", "--native", "--pid", str(self._pid)]
                subprocess.run(command, stdout=self._stacks, stderr=self._stacks, timeout=30, check=False)

    def _dump(self) -> None:
        with suppress(OSError, ValueError):  # a full disk, or a file that was closed meanwhile
            faulthandler.dump_traceback(self._stacks, all_threads=True)

    def _speak(self) -> None:
        """Print the message, unless a rank before this one does."""
        if any(self._read(rank).stalled for rank in range(self.rank)):
            return
        self._told = True
        outcome = f"After train.ddp_timeout={self.timeout:.0f} s of waiting the ranks give up."
        if self.ranks == 1:
            longest = end_limit(self._seen.phase, self.progress.step_seconds(), self.timeout, 1)
            outcome = f"After {longest:.0f} s it is ended." if longest is not None else "Nothing ends a save but you."
        self.tell(self._message(outcome))

    def _message(self, outcome: str) -> str:
        reports = [self._read(rank) for rank in range(self.ranks)]
        return message(reports, self.progress.step_seconds(), str(self.folder / "rank-*.stacks.txt"), outcome)

    def late(self) -> str:
        """The ranks that this one has waited for, in words; empty where it moves, or where none is behind."""
        if not self._stalled:
            return ""
        return "\n".join(about(report) for report in behind([self._read(rank) for rank in range(self.ranks)])[:4])

    def _file(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.json"

    def _write(self, report: Report) -> None:
        write_json(self._file(self.rank), report.as_json())

    def _read(self, rank: int) -> Report:
        try:
            return Report.from_json(json.loads(self._file(rank).read_text()))
        except (OSError, ValueError, KeyError, TypeError):
            return Report(rank, "which has written no file", 0)


def main_frames() -> tuple[str, ...]:
    """Where the main thread is: its innermost frames, and the innermost one of this project."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return ()
    stack = traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False)
    stack.reverse()
    chosen = list(stack[-FRAMES:])
    ours = [summary for summary in stack[:-FRAMES] if str(REPOSITORY / "sft") in summary.filename]
    if ours and not any(str(REPOSITORY / "sft") in summary.filename for summary in chosen):
        chosen.insert(0, ours[-1])
    return tuple(f"{_short(summary.filename)}:{summary.lineno} {summary.name}" for summary in chosen)


def _short(file: str) -> str:
    for root in (*sorted(sys.path, key=len, reverse=True), str(REPOSITORY)):
        if root and file.startswith(f"{root.rstrip('/')}/"):
            return file[len(root.rstrip("/")) + 1 :]
    return file
