"""Writes checkpoints that are complete or absent: beside their place, synced, summed into a manifest, then renamed.

Where the disk has too little room, nothing is written, rank 0 says what is missing, and the run continues. A run that was to end there ends
with that message (sft/train/stopping.py). A disk that fills while a checkpoint is written ends the run; the checkpoints before stay.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from sft.checkpoint.manifest import Entry, entries, files_in, files_of_rank, size, sync, write_manifest
from sft.errors import RunError
from sft.files import in_words
from sft.parallel.process_group import barrier_at_end, from_rank_0, gather, is_rank_0, rank
from sft.run.directory import INCOMPLETE, Run, folder_fault


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
        self.shortage: str | None = None
        """Why the last save wrote nothing; None where it was written."""
        self.is_saving = False

    def save(self, step: int, write: Callable[[], None], goes_on: bool = True) -> bool:
        """Write the checkpoint of a step; False where the disk has no room for it: `shortage` says more. Every rank takes part.

        `write` writes it to `.incomplete/checkpoint-<step>`. With `goes_on` the run continues without the checkpoint, and rank 0 says so.

        Raises:
            RunError: The run's folder is gone or cannot be written.
        """
        if step == self.newest:
            return True
        self.shortage = from_rank_0(lambda: self._make_room(step))
        if self.shortage is not None:
            if goes_on and is_rank_0():
                last = self.run.last_checkpoint()
                kept = f"{last.name} stays" if last else "there is none yet"
                more = f"The run continues, {kept}, and the next interval tries again. Free some space."
                print(f"{self.shortage}. {more}", file=sys.stderr, flush=True)
            return False
        self.is_saving = True
        try:
            self._write(self.folder / INCOMPLETE / f"checkpoint-{step}", step, write)
        except CheckpointException as error:  # torch's, of any rank's shards; no Exception
            raise next(iter(error.failures.values()))[0] from None
        except Exception as error:
            if words := folder_fault(self.folder):
                raise RunError(words) from error
            raise
        finally:
            self.is_saving = False
        self.newest = step
        return True

    def _make_room(self, step: int) -> str | None:
        """Remove what interrupted saves have left, and say what is missing for a checkpoint."""
        if words := folder_fault(self.folder):
            raise RunError(words)
        self._clear()
        self.expected = max(map(size, self.run.all_checkpoints()), default=self.expected)
        free = shutil.disk_usage(self.folder).free
        if free >= self.expected:
            return None
        missing = f"it takes {in_words(self.expected)} and {in_words(free)} are free: {in_words(self.expected - free)} are missing"
        return f"The checkpoint of step {step} was not written: {missing}, in {self.folder}"

    def _write(self, made: Path, step: int, write: Callable[[], None]) -> None:
        write()
        with barrier_at_end():
            mine = entries(made, files_of_rank(files_in(made), rank(), int(self.facts["ranks"])))
        files = {name: entry for one in gather(mine) for name, entry in one.items()}
        from_rank_0(lambda: self._complete(made, step, files))

    def _complete(self, made: Path, step: int, files: Mapping[str, Entry]) -> None:
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
        shutil.rmtree(self.folder / INCOMPLETE, ignore_errors=True)
