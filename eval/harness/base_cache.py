"""Results of base models, kept for all runs of an output_dir: ten runs from one base measure it once.

An entry is a folder named by what decided its numbers: the model's files and the settings, with the tasks' documents among them. What
changes has another name. An entry is complete or not there, and is never changed.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from eval import ranks
from eval.harness.measure import evaluate_model
from eval.harness.prompting import Treatment
from eval.models.backends import Target
from eval.models.placement import Placement, gpu_name
from eval.tasks.load import LoadedTasks
from sft.run.trust import base_checksums

FOLDER = "eval-base"
"""In the recipe's output_dir."""


def model_identity(target: Target) -> str | None:
    """What tells a model from others, whatever its folder is called: the checksums of its files, or the commit on the hub.

    Returns None where a name on the hub has no commit: it may be another model tomorrow.
    """
    sums = base_checksums(Path(target.model).expanduser())
    if sums is None:
        commit = target.revision or ""
        is_commit = len(commit) == 40 and set(commit) <= set("0123456789abcdef")
        return f"{target.model}@{commit}" if is_commit else None
    return hashlib.sha256(json.dumps(sums).encode()).hexdigest()


def base_key(target: Target, treatment: Treatment, placement: Placement, gpu: str | None = None) -> str | None:
    """The name of the results of a model that is asked so; None where the model cannot be told from others.

    Args:
        target: The model.
        treatment: How it is asked.
        placement: On how many processes.
        gpu: What the GPU is called, which has kernels, memory and so batches of its own; None without one.
    """
    identity = model_identity(target)
    if identity is None:
        return None
    # Other documents share a batch on another number of processes, and in half precision that rounds differently.
    batches = None if treatment.settings.dtype == "float32" else placement.processes
    decides = [identity, list(target.new_tokens), treatment.settings.hash, treatment.told, batches, gpu]
    return hashlib.sha256(json.dumps(decides).encode()).hexdigest()


def find(output_dir: Path, key: str) -> Path | None:
    """The folder of the results, where they are kept."""
    folder = output_dir.expanduser() / FOLDER / key[:32]
    return folder if (folder / "results.json").is_file() else None


def _work_folder(folder: Path) -> Path:
    # Not by the process's number: containers that share a disk have the same ones.
    return folder.with_name(f".{folder.name}.{uuid4().hex}")


def place(source: Path, target: Path) -> None:
    """Copy results to a folder, which is replaced where it exists: complete, or not there."""
    work = _work_folder(target)
    try:
        shutil.copytree(source, work)
        shutil.rmtree(target, ignore_errors=True)
        work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def keep(output_dir: Path, key: str, results: Path) -> None:
    """Keep results for other runs; those of a run that was quicker stay. A folder that cannot be written to keeps nothing."""
    kept = output_dir.expanduser() / FOLDER / key[:32]
    work = _work_folder(kept)
    with suppress(OSError):  # a full disk: the run itself has its results
        kept.parent.mkdir(parents=True, exist_ok=True)
        try:
            shutil.copytree(results, work)
            work.rename(kept)
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _measured_here(folder: Path, key: str) -> bool:
    try:
        results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        return bool(results.get("base_key") == key and not results["failed"])
    except (OSError, ValueError, KeyError):
        return False


def _held(folder: Path, key: str | None, output_dir: Path | None) -> str | None:
    """Where the results were, which are now in the folder; None where there are none."""
    if key is None or output_dir is None:
        return None
    if _measured_here(folder, key):
        return str(folder)
    kept = find(output_dir, key)
    if kept is None:
        return None
    try:
        place(kept, folder)
    except OSError as error:  # it may be deleted at any time, also now
        print(f"base: what is kept in {kept} cannot be copied ({error}).", flush=True)
        return None
    return str(kept)


def measure_base(
    target: Target,
    treatment: Treatment,
    tasks: LoadedTasks,
    folder: Path,
    log: Path,
    placement: Placement,
    output_dir: Path | None,
) -> None:
    """Put the base model's results in a folder: those that are there, or kept from another run, or measured now.

    Args:
        target: The base model.
        treatment: How it is asked.
        tasks: From `load_tasks`.
        folder: For the results.
        log: Where the libraries' words go.
        placement: From `place_model`.
        output_dir: Where results are kept; None: measure it, whatever there is, and keep nothing.

    Raises:
        EvaluationError: As `evaluate_model`.
    """
    key = ranks.from_first(lambda: base_key(target, treatment, placement, gpu_name()))
    held = ranks.from_first(lambda: _held(folder, key, output_dir))
    if key is None and output_dir is not None:
        print(f"base: not kept for other runs: {target.model} is a name without a commit.", flush=True)
    if held is not None:
        print(f"base: measured before under the same settings ({held}); not measured again.", flush=True)
        return
    more = {"base_key": key, "treatment": treatment.record}
    evaluate_model(target, treatment.tokenizer, tasks, treatment.settings, folder, log, placement, more)
    if output_dir is not None and key is not None and ranks.is_first() and _measured_here(folder, key):
        keep(output_dir, key, folder)
