"""A run's folder that vanishes, or that takes no more writes, while the run goes on: one message."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sft.errors import RunError
from sft.files import disk_was_full


def folder_fault(folder: Path) -> str | None:
    """Why nothing can be written in a folder, as a message; None where it can, or where only the disk is full.

    Args:
        folder: <run>/checkpoints, which is there from the run's start.
    """
    if not folder.is_dir():
        return f"{folder} is gone: it was moved or removed, or its disk is not mounted any more. Bring it back, and start again."
    probe = folder / ".probe"
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        if disk_was_full(error):
            return None
        return (
            f"{folder} cannot be written: {error.strerror}. Make it writable, and start again: the run goes on from its newest "
            "checkpoint."
        )
    return None


@contextmanager
def told_of_a_lost_folder(folder: Path) -> Iterator[None]:
    """Turn an error of writing anything of the run into one message, where its folder is what is wrong.

    Args:
        folder: <run>/checkpoints.

    Raises:
        RunError: It is gone, or cannot be written.
    """
    try:
        yield
    except OSError as error:
        words = folder_fault(folder)
        if words is None:
            raise
        raise RunError(words) from error
