"""Holds one recipe on one machine with its plan, which every stage is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sft.errors import PlanError
from sft.hub.data_facts import DataFacts
from sft.plan.case import Case
from sft.plan.plan import Decision, TuningResult
from sft.plan.resolve import resolve_plan


@dataclass(frozen=True)
class Job(Case):
    """A planned recipe, and where it came from."""

    recipe_path: Path = field(kw_only=True)
    overrides: tuple[str, ...] = field(kw_only=True)

    @property
    def name(self) -> str:
        """The folder of its runs: the recipe's own name, or for a recipe inside a run's folder that of the recipe it came from."""
        inside = self.recipe_path.parent / "run.json"
        return self.recipe_path.resolve().parent.parent.name if inside.is_file() else self.recipe_path.stem

    def with_data(self, data: DataFacts, tuned: TuningResult | None = None) -> Job:
        """The job with its data counted, which gives the number of steps, and with what auto-tuning has found."""
        plan = resolve_plan(self.recipe, self.hardware, self.model, data, self.deepspeed, tuned)
        return replace(self, plan=plan, data=data)


OPEN = {
    "precision": ("train", "precision"),
    "attention": ("model", "attn_implementation"),
    "kernels": ("model", "kernels"),
    "gradient_checkpointing": ("train", "gradient_checkpointing"),
    "micro_batch_size": ("train", "micro_batch_size"),
}
"""Decisions of the plan, and the key of the recipe that leaves each open with `auto`."""

REASON = "auto: as this run was started"


def keep_decisions(job: Job, data: DataFacts, earlier: Mapping[str, Any]) -> Job:
    """The job with its data counted, and with the decisions of its run's plan.json (`earlier`, by name). Raises PlanError if they
    cannot be had here."""
    recipe, kept = job.recipe, {}
    for name, (section, key) in OPEN.items():
        is_open = getattr(getattr(recipe, section), key) == "auto" and name in earlier
        # A micro-batch is one for as many ranks.
        same_ranks = earlier.get("data_parallel_ranks") == job.plan.data_parallel_ranks.value
        if is_open and (same_ranks or name != "micro_batch_size"):
            kept[name] = earlier[name]
            changed = getattr(recipe, section).model_copy(update={key: earlier[name]})
            recipe = recipe.model_copy(update={section: changed})
    try:
        plan = resolve_plan(recipe, job.hardware, job.model, data, job.deepspeed)
    except PlanError as error:
        values = ", ".join(f"{'.'.join(OPEN[name])}={value}" for name, value in kept.items())
        raise PlanError(
            f"This run resumes with what it was started with ({values}) where the recipe says auto, and this machine cannot: {error} "
            "Resume on a machine like the first, or start a new run with train.resume=never."
        ) from None
    # On a CPU there are no kernels, and no value to keep.
    decisions: dict[str, Any] = {
        name: Decision(value, REASON) for name, value in kept.items() if getattr(plan, name).value == value
    }
    return replace(job, plan=replace(plan, **decisions), data=data)
