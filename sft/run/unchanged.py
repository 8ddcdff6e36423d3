"""Checks that final/ is still what the run wrote, and the base model still what it read. run.json holds the checksums.

Runs that older versions have written hold none, and are not checked. Imports no torch.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from sft.checkpoint.manifest import files_in
from sft.errors import RunError
from sft.files import checksum
from sft.run.directory import Run

ACCEPT = "--accept-edits"
"""How a command line says that final/ was edited on purpose; once, for this command and all later ones."""

_LOADED = (".safetensors", ".bin", ".json", ".jinja", ".model", ".txt", ".py")
"""What libraries load of a model's folder; a README beside it is the user's to edit."""

BASE_FILES = (
    "config.json",
    "adapter_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "*.bin",
    "*.bin.index.json",
    "*.py",
)
"""Files that a base model's answers depend on; the tokenizer is the tuned model's."""

Sums = dict[str, dict[str, Any]]
"""Size and checksum (xxh3_128) of each file, by its path in the folder."""


def base_sums(folder: Path) -> Sums | None:
    """Checksums of a local model's weights and configuration; None of one on the hub, which its commit identifies.

    Reads all weights, which their loading then need not read from the disk.
    """
    if not folder.is_dir():
        return None
    return _sums(
        folder, sorted({path.name for pattern in BASE_FILES for path in folder.glob(pattern) if path.is_file()})
    )


def final_sums(folder: Path) -> Sums:
    """Checksums of all that libraries load of a saved model."""
    return _sums(
        folder, sorted(name for name, path in files_in(folder).items() if path.suffix in _LOADED and path.is_file())
    )


def check_final(run: Run, accept: bool) -> None:
    """Refuse a final/ that is not what the training wrote. For one rank to call: it reads every byte.

    Args:
        run: A finished run.
        accept: Keep the edits: their checksums replace the recorded ones, and the report names the files.

    Raises:
        RunError: Files have changed, are missing or were added.
    """
    recorded = run.record.get("final_files")
    if not isinstance(recorded, dict):
        return
    found = final_sums(run.final)
    changes = _differences(recorded, found)
    if not changes:
        return
    if accept:
        day = time.strftime("%Y-%m-%d")
        run.update(final_files=found)
        run.warn("final", f"final/ was edited after the training, which was accepted on {day}: {'; '.join(changes)}.")
        return
    raise RunError(
        f"{run.final} is not what the training wrote: {'; '.join(changes)}. Put the files back, or take a checkpoint. If you edited them "
        f"on purpose, add {ACCEPT} to this command once."
    )


def base_changes(run: Run) -> str | None:
    """How the base model differs from the one that the training started from; None where nothing is known to differ."""
    base = run.record.get("base_model") or {}
    folder, recorded = Path(str(base.get("path"))), base.get("files")
    if not isinstance(recorded, dict) or not folder.is_dir():
        return None
    changes = _differences(recorded, base_sums(folder) or {})
    return f"{folder} has changed since {run.path} was started from it: {'; '.join(changes)}" if changes else None


def _differences(recorded: Sums, found: Sums) -> list[str]:
    names = sorted({*recorded, *found})
    states = {
        name: "is missing" if name not in found else "was added" if name not in recorded else "has changed"
        for name in names
        if recorded.get(name) != found.get(name)
    }
    return [f"{name} {state}" for name, state in states.items()]


def _sums(folder: Path, names: Iterable[str]) -> Sums:
    with ThreadPoolExecutor(4) as pool:
        return dict(zip(names, pool.map(lambda name: _sum(folder / name), names), strict=True))


def _sum(file: Path) -> dict[str, Any]:
    state = file.stat()
    count, checksum = _sum_once(file, state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino)
    return {"bytes": count, "xxh3_128": checksum}


@cache
def _sum_once(file: Path, *state: int) -> tuple[int, str]:
    """Size and checksum of a file, once in a process for each state of it."""
    return checksum(file)
