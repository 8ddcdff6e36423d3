"""What a run that goes on keeps of its first plan: whatever the recipe leaves open is what it was then. Imports no torch.

Without this, another machine, a newer package or a new search could give another micro-batch, attention or number format in the
middle of a run, though nobody has asked for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sft.errors import PlanError
from sft.plan.decision import Decision
from sft.plan.job import Job
from sft.plan.plan import DataSize, resolve_plan

OPEN = {
    "precision": ("train", "precision"),
    "attention": ("model", "attn_implementation"),
    "gradient_checkpointing": ("train", "gradient_checkpointing"),
    "micro_batch_size": ("train", "micro_batch_size"),
}
"""Decisions of the plan, and the key of the recipe that leaves each open with `auto`."""

REASON = "auto: as this run was started"


def keep_decisions(job: Job, data: DataSize, earlier: Mapping[str, Any]) -> Job:
    """The job with its data counted, and with the decisions that its run has trained with.

    Args:
        job: Planned for this machine alone.
        data: The prepared data.
        earlier: Values of the run's plan.json by name.

    Raises:
        PlanError: This machine cannot do what the run was started with.
    """
    kept = _left_open(job, earlier)
    recipe = job.recipe
    for name, value in kept.items():
        section, key = OPEN[name]
        recipe = recipe.model_copy(update={section: getattr(recipe, section).model_copy(update={key: value})})
    try:
        plan = resolve_plan(recipe, job.hardware, job.model, data, job.deepspeed)
    except PlanError as error:
        values = ", ".join(f"{'.'.join(OPEN[name])}={value}" for name, value in kept.items())
        raise PlanError(
            f"This run goes on as it was started, with {values} where the recipe says auto, and this machine cannot: {error} Go on on a "
            "machine like the first, or start anew with train.resume=never."
        ) from None
    changed = {name: Decision(value, REASON) for name, value in kept.items()}
    alike = all(getattr(plan, name).value == earlier.get(name) for name in ("weights", "gradient_accumulation_steps"))
    if alike and job.deepspeed is None and job.fsdp is None and "gradients" in earlier:
        # It also follows from the memory of the machine.
        changed["gradients"] = Decision(earlier["gradients"], REASON)
    return replace(job, plan=replace(plan, **changed))


def _left_open(job: Job, earlier: Mapping[str, Any]) -> dict[str, Any]:
    """The earlier decisions about what the recipe leaves open now; a micro-batch is one for as many ranks."""
    names = [name for name, (section, key) in OPEN.items() if getattr(getattr(job.recipe, section), key) == "auto"]
    if earlier.get("data_parallel_ranks") != job.plan.data_parallel_ranks.value:
        names = [name for name in names if name != "micro_batch_size"]
    return {name: earlier[name] for name in names if name in earlier}
