"""How much disk the checkpoints to come and final/ take. Arithmetic; imports no torch."""

from __future__ import annotations

from math import ceil

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


def in_words(count: float) -> str:
    """Bytes, for a person."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
