"""How much disk the checkpoints to come and final/ take. Arithmetic; imports no torch."""

from __future__ import annotations

import shutil
from math import ceil
from pathlib import Path

from sft.launch.host_comparison import Check
from sft.plan.job import Job
from sft.plan.weights import MASTER
from sft.recipe.schema import Recipe


def bytes_per_parameter(job: Job) -> tuple[int, int]:
    """What one trained parameter takes in a checkpoint, and in final/.

    Adam keeps two moments of 4 bytes. DeepSpeed adds its fp32 copy, and below stage 3 writes the weights a second time in its
    own format.
    """
    moments, stage = 8, job.deepspeed.stage if job.deepspeed else None
    sixteen_bit = job.plan.weights.value == MASTER or (stage is not None and job.plan.precision.value != "fp32")
    weights = 2 if sixteen_bit else 4
    if stage is None:
        return weights + moments + (4 if job.plan.weights.value == MASTER else 0), weights
    return weights * (2 if stage < 3 else 1) + 4 + moments, weights


def checkpoint_bytes(job: Job) -> int:
    """Of a checkpoint that has not been written yet; 0 where it is not known."""
    return (trained_parameters(job) or 0) * bytes_per_parameter(job)[0]


def trained_parameters(job: Job) -> int | None:
    """Parameters that a checkpoint holds; None where config.json does not tell, or adapters alone are trained."""
    return None if job.recipe.model.lora is not None else job.model.parameters


def checkpoints_to_come(recipe: Recipe, steps: int | None, there: int) -> int:
    """Checkpoints for which there must be room: one more than are kept, since the oldest goes when the newest is complete.

    Args:
        recipe: Says how many are kept, and how often one is written.
        steps: Optimizer steps; None: not known yet.
        there: Checkpoints that the run has already.
    """
    written = recipe.train.save_total_limit + 1
    if steps is not None:
        written = min(written, ceil(steps / recipe.train.save_steps))
    return max(1, written - there)


def check_disk(job: Job, there: int = 0) -> Check:
    """Whether checkpoints and final/ have room in output_dir.

    Args:
        job: What is trained and how.
        there: Checkpoints that the run has already.
    """
    folder = Path(job.recipe.output_dir).expanduser().resolve()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    parameters = trained_parameters(job)
    if parameters is None:
        return Check("disk", f"{in_words(free)} free in {folder}; what is needed is not known before the model loads")
    of_checkpoint, of_final = bytes_per_parameter(job)
    count = checkpoints_to_come(job.recipe, job.plan.max_steps.value, there)
    needed = parameters * (count * of_checkpoint + of_final)
    words = (
        f"{count} checkpoint{'s' if count > 1 else ''} of {in_words(parameters * of_checkpoint)} and final/ of "
        f"{in_words(parameters * of_final)} need {in_words(needed)}"
    )
    if needed <= free:
        return Check("disk", f"{words}; {in_words(free)} free")
    return Check(
        "disk",
        f"{in_words(free)} free",
        f"{words}, and {folder} has {in_words(free)} free. Free some space, set output_dir to another disk, or lower "
        "train.save_total_limit.",
    )


def in_words(count: float) -> str:
    """Bytes, for a person."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
