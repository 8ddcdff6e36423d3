"""Train, and spoil the saving of some steps: `train_and_spoil.py RECIPE [key=value ...]`, SPOIL={"2": "full", ...} by step.

full         less is free on the disk than the checkpoint takes, until the next save
terminated   the same, and SIGTERM comes
fills        the disk fills while the checkpoint is written, until the next save
rank-1       what the second rank writes goes to a device that is always full
gone         the run's folder is removed
read-only    the checkpoints' folder takes no more writes
kill-...     this process is killed: while it writes, before the renaming, after it, while an old checkpoint is removed
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystem

from sft.checkpoint import write as checkpoint_writer
from sft.launch import rank as train
from sft.parallel import process_group as distributed
from sft.train.trainer import RecipeTrainer

FULL = "/dev/full"


def die(*args: Any, **keywords: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fill(folder: Path, leave: int) -> None:
    if distributed.is_rank_0():
        with (folder.parent / "filler").open("wb") as file:
            file.truncate(0)
            os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(folder).free - leave)


def after(work: Callable[..., Any], then: Callable[..., Any]) -> Callable[..., Any]:
    def both(*args: Any, **keywords: Any) -> None:
        work(*args, **keywords)
        then()

    return both


def on_the_second_rank(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Writes its file to the full device."""

    def write(*args: Any, **keywords: Any) -> Any:
        place = next((number for number, value in enumerate(args) if name in str(value)), None)
        if distributed.rank() == 1 and place is not None:
            args = (*args[:place], Path(FULL), *args[place + 1 :])
        return original(*args, **keywords)

    return write


def patches(how: str, folder: Path) -> list[tuple[Any, str, Any]]:
    """What is replaced while a step is saved: of what, its name, by what."""
    if how == "terminated":
        os.kill(os.getpid(), signal.SIGTERM)
    if how in ("full", "terminated"):
        fill(folder, leave=4096 * 64)
    if how == "fills":
        return [(torch, "save", fill_and(torch.save, folder))]
    if how == "rank-1":
        stream = on_the_second_rank(".distcp", FileSystem.create_stream)
        return [(torch, "save", on_the_second_rank("rank_1", torch.save)), (FileSystem, "create_stream", stream)]
    if how == "gone":
        shutil.rmtree(folder.parent)
    if how == "read-only":
        # The disk itself is in use by files that are open.
        subprocess.run(["mount", "--bind", folder, folder], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
    if how == "kill-writing":
        return [(torch, "save", after(torch.save, die))]
    if how == "kill-before":
        return [(checkpoint_writer, "write_manifest", after(checkpoint_writer.write_manifest, die))]
    if how == "kill-after":
        return [(checkpoint_writer.CheckpointWriter, "_put_away", die)]
    if how == "kill-removing":
        return [(checkpoint_writer.CheckpointWriter, "_clear", half_removed)]
    return []


def fill_and(save: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    def fill_and_save(*args: Any, **keywords: Any) -> None:
        fill(folder, leave=4096)
        save(*args, **keywords)

    return fill_and_save


def half_removed(writer: checkpoint_writer.CheckpointWriter) -> None:
    """The kill meets an old checkpoint that has lost its name and some of its files."""
    for hidden in writer.folder.glob(".removed-*"):
        next(hidden.glob("*.safetensors")).unlink()
        die()


@contextmanager
def spoiled(how: str | None, folder: Path) -> Iterator[None]:
    (folder.parent / "filler").unlink(missing_ok=True)
    replaced = patches(how, folder) if how else []
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    for owner, name, replacement in replaced:
        setattr(owner, name, replacement)
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def main() -> None:
    spoil, save = json.loads(os.environ["SPOIL"]), RecipeTrainer._save_checkpoint

    def save_spoiled(trainer: RecipeTrainer, *args: Any) -> None:
        how = spoil.get(str(trainer.state.global_step))
        with spoiled(how, Path(trainer.args.output_dir)):
            save(trainer, *args)

    RecipeTrainer._save_checkpoint = save_spoiled  # type: ignore[method-assign]
    train.main(sys.argv[1:])


if __name__ == "__main__":
    from sft.program import run_main

    run_main(lambda argv: main())
