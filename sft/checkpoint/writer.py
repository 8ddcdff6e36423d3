"""Checkpoints, complete or absent: written beside their place, synced, summed into a manifest, then renamed.

Where the disk is full, on any rank, the half-written folder is removed, the first rank says what is missing, and the run goes on: the
checkpoint before stays, and the next interval tries again. A run that was to end there ends by that message (sft/train/stopping.py).
docs/checkpoints.md says what is promised.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed.checkpoint.api import CheckpointException

from sft.checkpoint.manifest import Entry, entries, files_in, share, size, sync, write_manifest
from sft.checkpoint.resume import step_of
from sft.errors import RunError
from sft.files import disk_was_full, in_words
from sft.parallel.lost_ranks import is_lost
from sft.parallel.meetings import Meet, in_step, meetings
from sft.parallel.process_group import is_first_rank, rank
from sft.run.directory import INCOMPLETE, Run, folder_fault

_REMOVED = ".removed-"


class Failure(NamedTuple):
    """Why a rank could not write its part."""

    kind: str
    """`full`, `folder` (gone, or not to be written), or `bug`."""

    words: str


class NotSaved(Exception):
    """There was no room. On every rank alike."""


class Shortage(NamedTuple):
    """A checkpoint that was not written, for lack of room."""

    words: str
    """Which, and what is missing."""

    kept: int
    """The step of the checkpoint that the run goes on from; 0: there is none."""


class CheckpointWriter:
    """Writes the checkpoints of a run; every rank has one.

    Args:
        folder: <run>/checkpoints.
        keep: Checkpoints kept.
        facts: `ranks`, `engine`, `recipe`, for the manifest.
        expected: Bytes of a checkpoint before one has been written; 0: not known.
    """

    def __init__(self, folder: Path, keep: int, facts: Mapping[str, Any], expected: int) -> None:
        self.folder, self.keep, self.facts, self.expected = folder, keep, facts, expected
        self.newest: int | None = None
        """The step of the last checkpoint that this process has written."""
        self.shortage: Shortage | None = None
        """Of the last save; None where it was written."""
        self._meet: Meet | None = None
        self._failed: list[Exception] = []

    def save(self, step: int, write: Callable[[], None], goes_on: bool = True) -> bool:
        """Write the checkpoint of a step. Every rank takes part.

        Args:
            step: Optimizer steps done.
            write: Writes it to `.incomplete/checkpoint-<step>`; its parts in `part`.
            goes_on: Whether the run does, whatever comes of it; that is said then.

        Returns:
            Whether it is there now; False where the disk has no room for it: `shortage` says more.

        Raises:
            RunError: The run's folder is gone or cannot be written.
        """
        if step == self.newest:
            return True
        with meetings() as self._meet, in_step(self._agree) as self._failed:
            try:
                self._write(step, write)
            except NotSaved as error:
                self._clear()
                self.shortage = self._found_short(step, error)
                if goes_on and is_first_rank():
                    _say(self.shortage)
                return False
            finally:
                self._meet = None
        self.newest, self.shortage = step, None
        return True

    def part(self, work: Callable[[], None]) -> None:
        """Do a part of what `save` was given, and go on where it is done on all ranks. Outside of `save` only do it.

        Raises:
            NotSaved: A rank had no room.
            RunError: The run's folder is gone or cannot be written.
        """
        if self._meet is None:
            work()
            return
        try:
            work()
        except (NotSaved, RunError):  # all ranks have met over it
            raise
        except (Exception, CheckpointException) as error:
            self._agree(error)
            raise
        self._agree()

    def _write(self, step: int, write: Callable[[], None]) -> None:
        self.part(self._make_room)
        self.part(write)
        made, mine = self.folder / INCOMPLETE / f"checkpoint-{step}", dict[str, Entry]()

        def sum_mine() -> None:
            ranks = int(self.facts["ranks"])
            mine.update(entries(made, share(files_in(made), rank(), ranks)))

        self.part(sum_mine)
        assert self._meet is not None
        files = {name: entry for one in self._meet(mine) for name, entry in one.items()}
        self.part(lambda: self._complete(made, step, files))

    def _agree(self, error: BaseException | None = None) -> None:
        """Meet the other ranks, and stop here where one of them has failed."""
        assert self._meet is not None
        if error is not None and is_lost(error):
            raise error
        found = error or (self._failed[0] if self._failed else None)
        failures = [failure for failure in self._meet(found and self._reason(found)) if failure]
        for failure in failures:
            if failure.kind == "folder":
                raise RunError(failure.words) from None
        for failure in failures:
            if failure.kind == "bug":
                raise found or RuntimeError(f"Another rank could not write the checkpoint: {failure.words}")
        if failures:
            raise NotSaved(failures[0].words) from None

    def _reason(self, error: BaseException) -> Failure:
        if disk_was_full(error):
            return Failure("full", "the disk is full")
        if isinstance(error, _NoRoom):
            return Failure("full", str(error))
        words = folder_fault(self.folder)
        return Failure("folder", words) if words else Failure("bug", f"{type(error).__name__}: {error}")

    def _make_room(self) -> None:
        """Remove what earlier ends have left, and compare what is free with what is needed."""
        if not is_first_rank():
            return
        words = folder_fault(self.folder)
        if words:
            raise OSError(words)
        self._clear()
        there = [size(self.folder / f"checkpoint-{step}") for step in self._steps()]
        self.expected = max(there, default=self.expected)
        free = shutil.disk_usage(self.folder).free
        if free < self.expected:
            raise _NoRoom(
                f"it takes {in_words(self.expected)} and {in_words(free)} are free: {in_words(self.expected - free)} are missing"
            )

    def _complete(self, made: Path, step: int, files: Mapping[str, Entry]) -> None:
        if not is_first_rank():
            return
        write_manifest(made, {"step": step, **self.facts}, files)
        sync(made.parent)
        place = self.folder / made.name
        if place.exists():  # passed over by a resume: nothing that is good is written twice
            self._put_away(place)
        made.rename(place)
        sync(self.folder)
        # What could not be removed now is removed before the next one is written.
        with suppress(OSError):
            # One that was passed over must not count as one that is kept: neither a later one nor a damaged one before.
            run = Run(self.folder.parent)
            places = [self.folder / f"checkpoint-{one}" for one in self._steps() if one <= step]
            # The clock of a shared file system may say that the new one is old.
            kept = [one for one in places if one == place or not run.was_passed_over(one)][-self.keep :]
            for old in places[: places.index(kept[0])]:
                self._put_away(old)
        self._clear()

    def _put_away(self, place: Path) -> None:
        """Take a checkpoint's name from it, at once, before anything in it is removed."""
        number = 0
        while (hidden := self.folder / f"{_REMOVED}{place.name}-{number}").exists():
            number += 1
        place.rename(hidden)

    def _clear(self) -> None:
        if is_first_rank():
            for left in [self.folder / INCOMPLETE, *self.folder.glob(f"{_REMOVED}*")]:
                shutil.rmtree(left, ignore_errors=True)

    def _steps(self) -> list[int]:
        found = (re.fullmatch(r"checkpoint-(\d+)", path.name) for path in self.folder.iterdir())
        return sorted(int(name[1]) for name in found if name)

    def _found_short(self, step: int, error: NotSaved) -> Shortage:
        words = str(error)
        if "missing" not in words:  # it became full while it was written
            free = shutil.disk_usage(self.folder).free
            needed = f"a checkpoint takes {in_words(self.expected)}" if self.expected else "what it takes is not known"
            words = f"{words}; {needed}, and {in_words(free)} are free now"
        newest = Run(self.folder.parent).last_checkpoint()  # not one that was passed over
        kept = step_of(newest) if newest else 0
        return Shortage(f"The checkpoint of step {step} was not written: {words}, in {self.folder}", kept)


def _say(shortage: Shortage) -> None:
    kept = f"checkpoint-{shortage.kept} stays" if shortage.kept else "there is none yet"
    print(
        f"{shortage.words}. The run goes on, {kept}, and the next interval tries again. Free some space.",
        file=sys.stderr,
        flush=True,
    )


class _NoRoom(Exception):
    """Less is free than the checkpoint takes."""
