"""Writes checkpoints that are complete or absent: beside their place, synced, summed into a manifest, then renamed.

Where the disk is full, on any rank, the half-written folder is removed, rank 0 says what is missing, and the run continues. A run that was
to end there ends with that message (sft/train/stopping.py).
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed.checkpoint.api import CheckpointException

from sft.checkpoint.manifest import Entry, entries, files_in, files_of_rank, size, sync, write_manifest
from sft.checkpoint.patches import failed_saves_kept
from sft.checkpoint.resume import step_of
from sft.errors import RunError, is_lost
from sft.files import disk_was_full, in_words
from sft.parallel.process_group import barrier_at_end, gather, is_rank_0, rank
from sft.run.directory import INCOMPLETE, Run, folder_fault


class NotSaved(Exception):
    """There was no room. Raised on every rank."""


_BY_WEIGHT = (RunError, RuntimeError, NotSaved)
"""What keeps a rank from writing its part: the folder is gone or not writable, a bug, no room. The first that any rank has decides."""


class Shortage(NamedTuple):
    """A checkpoint that was not written for lack of room."""

    words: str
    """Which, and what is missing."""

    kept: int
    """The step of the newest checkpoint; 0: there is none."""


class CheckpointWriter:
    """Writes the checkpoints of a run to <run>/checkpoints, and keeps the newest; every rank has one.

    `facts` go into the manifest. `expected`: bytes of a checkpoint before one has been written; 0: unknown.
    """

    def __init__(self, folder: Path, keep: int, facts: Mapping[str, Any], expected: int) -> None:
        self.folder, self.keep, self.facts, self.expected = folder, keep, dict(facts), expected
        self.run = Run(folder.parent)
        self.protected = ""
        """The name of a checkpoint that stays besides those."""
        self.newest: int | None = None
        """The step of the last checkpoint that this process has written."""
        self.shortage: Shortage | None = None
        """Of the last save; None where it was written."""
        self._failed_saves: list[Exception] | None = None
        """None outside of a save."""

    def save(self, step: int, write: Callable[[], None], goes_on: bool = True) -> bool:
        """Write the checkpoint of a step; False where the disk has no room for it: `shortage` says more. Every rank takes part.

        `write` writes it to `.incomplete/checkpoint-<step>`; where ranks exchange something, in `part`. With `goes_on` the run continues
        without the checkpoint, and rank 0 says so.

        Raises:
            RunError: The run's folder is gone or cannot be written.
        """
        if step == self.newest:
            return True
        try:
            with failed_saves_kept() as self._failed_saves:
                self._write(step, write)
        except NotSaved as error:
            self._clear()
            last = self.run.last_checkpoint()
            words = f"The checkpoint of step {step} was not written: {error}, in {self.folder}"
            self.shortage = Shortage(words, step_of(last) if last else 0)
            if goes_on and is_rank_0():
                kept = f"{last.name} stays" if last else "there is none yet"
                more = f"The run continues, {kept}, and the next interval tries again. Free some space."
                print(f"{words}. {more}", file=sys.stderr, flush=True)
            return False
        finally:
            self._failed_saves = None
        self.newest, self.shortage = step, None
        return True

    def part(self, work: Callable[[], None]) -> None:
        """Do a part of a save, and return when all ranks have done it, however long one takes. Outside of a save only do it.

        Raises:
            NotSaved: A rank had no room.
            RunError: The run's folder is gone or cannot be written.
        """
        if self._failed_saves is None:
            work()
            return
        error: BaseException | None = None
        with barrier_at_end():
            try:
                work()
            except (Exception, CheckpointException) as caught:
                if is_lost(caught):
                    raise
                error = caught
        error = error or next(iter(self._failed_saves), None)
        failures = [failure for failure in gather(error and self._failure(error)) if failure]
        if failures:
            worst = min(failures, key=lambda one: _BY_WEIGHT.index(type(one)))
            raise error if error and isinstance(worst, RuntimeError) else worst from None

    def _failure(self, error: BaseException) -> RunError | RuntimeError | NotSaved:
        """One of _BY_WEIGHT, which other ranks can be sent."""
        if isinstance(error, NotSaved):
            return error
        if disk_was_full(error):
            return NotSaved("the disk is full")
        if words := folder_fault(self.folder):
            return RunError(words)
        return RuntimeError(f"Another rank could not write the checkpoint: {type(error).__name__}: {error}")

    def _write(self, step: int, write: Callable[[], None]) -> None:
        self.part(self._make_room)
        made, mine, failed = self.folder / INCOMPLETE / f"checkpoint-{step}", dict[str, Entry](), list[BaseException]()
        try:
            write()
        except (NotSaved, RunError):  # all ranks have agreed on it
            raise
        except (Exception, CheckpointException) as error:
            failed.append(error)

        def sum_mine() -> None:
            if failed:
                raise failed[0]
            mine.update(entries(made, files_of_rank(files_in(made), rank(), int(self.facts["ranks"]))))

        self.part(sum_mine)
        files = {name: entry for one in gather(mine) for name, entry in one.items()}
        self.part(lambda: self._complete(made, step, files))

    def _make_room(self) -> None:
        """Remove what interrupted saves have left, and compare what is free with what is needed."""
        if not is_rank_0():
            return
        if words := folder_fault(self.folder):
            raise OSError(words)
        self._clear()
        self.expected = max(map(size, self.run.all_checkpoints()), default=self.expected)
        free = shutil.disk_usage(self.folder).free
        if free < self.expected:
            raise NotSaved(
                f"it takes {in_words(self.expected)} and {in_words(free)} are free: {in_words(self.expected - free)} are missing"
            )

    def _complete(self, made: Path, step: int, files: Mapping[str, Entry]) -> None:
        if not is_rank_0():
            return
        write_manifest(made, {"step": step, **self.facts}, files)
        sync(made.parent)
        place = self.folder / made.name
        if place.exists():  # the one that the run resumed from
            self._put_away(place)
        made.rename(place)
        sync(self.folder)
        # What cannot be removed now is removed before the next one is written.
        with suppress(OSError):
            for old in self.run.all_checkpoints()[self.keep :]:
                if old.name != self.protected:
                    self._put_away(old)
        self._clear()

    def _put_away(self, place: Path) -> None:
        """Take a checkpoint's name from it, at once, before anything in it is removed."""
        place.rename(self.folder / INCOMPLETE / f"removed-{place.name}")

    def _clear(self) -> None:
        if is_rank_0():
            shutil.rmtree(self.folder / INCOMPLETE, ignore_errors=True)
