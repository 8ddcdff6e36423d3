"""One recipe on one machine, with its plan: what every stage is given."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from sft.hub.model_facts import ModelFacts
from sft.plan.decision import TuningResult
from sft.plan.fsdp import resolve_fsdp
from sft.plan.hardware import Hardware
from sft.plan.plan import DataSize, Plan, resolve_plan
from sft.plan.zero import DeepSpeedFile
from sft.recipe.schema import Fsdp, Recipe


@dataclass(frozen=True)
class Job:
    """One recipe on one machine."""

    recipe: Recipe
    recipe_path: Path
    overrides: tuple[str, ...]
    hardware: Hardware
    model: ModelFacts
    deepspeed: DeepSpeedFile | None
    plan: Plan

    @property
    def name(self) -> str:
        """The folder of its runs: the recipe's own name, or for a recipe inside a run's folder that of the recipe it came from."""
        inside = self.recipe_path.parent / "run.json"
        return self.recipe_path.resolve().parent.parent.name if inside.is_file() else self.recipe_path.stem

    @property
    def fsdp(self) -> Fsdp | None:
        """How FSDP2 shares the model out, where it is what runs."""
        return resolve_fsdp(self.recipe, self.hardware)

    def with_data(self, data: DataSize, tuned: TuningResult | None = None) -> Job:
        """The job with the data counted, and therefore the number of steps known; and with what a search has found."""
        plan = resolve_plan(self.recipe, self.hardware, self.model, data, self.deepspeed, tuned)
        return replace(self, plan=plan)
