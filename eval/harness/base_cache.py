"""Keeps the results of base models for all runs of an output_dir: ten runs from one base measure it once.

An entry is a folder named by what decides its numbers: the model's files and the settings, with the tasks' documents among them. It is
complete or absent, and never changes.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from contextlib import suppress
from pathlib import Path

from eval.harness.measure import complete_or_absent, evaluate_model
from eval.harness.prompting import Prompting
from eval.models.placement import Placement, gpu_name
from eval.models.target import Target
from eval.tasks.load import LoadedTasks
from sft.run.trust import base_checksums

FOLDER = "eval-base"
"""In the recipe's output_dir."""


def measure_base(
    target: Target,
    prompting: Prompting,
    tasks: LoadedTasks,
    folder: Path,
    log: Path,
    placement: Placement,
    output_dir: Path | None,
) -> None:
    """Put the base model's results in a folder: those already there, or another run's, or measured now.

    Without an output_dir it is measured in any case, and nothing is kept.
    """
    key = base_key(target, prompting, placement, gpu_name())
    more = {"base_key": key, "prompting": prompting.record}
    if output_dir is not None:
        if key is None:
            print(f"base: not kept for other runs: {target.model} is a name without a commit.", flush=True)
        elif (found := reuse(folder, key, output_dir)) is not None:
            print(f"base: measured before under the same settings ({found}); not measured again.", flush=True)
            return
    evaluate_model(target, prompting.tokenizer, tasks, prompting.settings, folder, log, placement, more)
    if output_dir is not None and key is not None and _has(folder, key):
        keep(output_dir, key, folder)


def base_key(target: Target, prompting: Prompting, placement: Placement, gpu: str | None = None) -> str | None:
    """The name of the results; None where the model cannot be told from others. The GPU decides kernels, memory and so batches."""
    identity = model_identity(target)
    if identity is None:
        return None
    # Other documents share a batch on another number of processes, and in half precision that rounds differently.
    batches = None if prompting.settings.dtype == "float32" else placement.processes
    decides = [identity, list(target.new_tokens), prompting.settings.hash, prompting.note, batches, gpu]
    return hashlib.sha256(json.dumps(decides).encode()).hexdigest()


def model_identity(target: Target) -> str | None:
    """The checksums of the model's files, or its commit on the hub; None for a name without a commit, which may move."""
    sums = base_checksums(Path(target.model).expanduser())
    if sums is not None:
        return hashlib.sha256(json.dumps(sums).encode()).hexdigest()
    commit = target.revision or ""
    is_commit = len(commit) == 40 and set(commit) <= set("0123456789abcdef")
    return f"{target.model}@{commit}" if is_commit else None


def reuse(folder: Path, key: str, output_dir: Path) -> str | None:
    """Put kept results in the folder; returns where they were, None where there are none."""
    if _has(folder, key):
        return str(folder)
    kept = output_dir.expanduser() / FOLDER / key[:32]
    if not (kept / "results.json").is_file():
        return None
    try:
        with complete_or_absent(folder) as work:
            shutil.copytree(kept, work, dirs_exist_ok=True)
    except OSError as error:  # it may be deleted at any time
        print(f"base: what is kept in {kept} cannot be copied ({error}).", flush=True)
        return None
    return str(kept)


def keep(output_dir: Path, key: str, results: Path) -> None:
    """Keep results for other runs, unless another run was quicker. A folder that cannot be written keeps nothing."""
    kept = output_dir.expanduser() / FOLDER / key[:32]
    if not kept.exists():
        # A full disk: the run itself has its results.
        with suppress(OSError), complete_or_absent(kept, replace=False) as work:
            shutil.copytree(results, work, dirs_exist_ok=True)


def _has(folder: Path, key: str) -> bool:
    """Whether the folder holds complete results under the key."""
    try:
        results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        return bool(results.get("base_key") == key and not results["failed"])
    except (OSError, ValueError, KeyError):
        return False
