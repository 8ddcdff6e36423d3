"""Holds a recipe with its machine, model, data and plan: what refusals, time and disk follow from."""

from __future__ import annotations

from dataclasses import dataclass

from sft.hub.data_facts import DataFacts
from sft.hub.model_facts import ModelFacts
from sft.plan.deepspeed import DeepSpeedFile
from sft.plan.hardware import Hardware
from sft.plan.parallelism import resolve_fsdp
from sft.plan.plan import Plan
from sft.recipe.schema import Fsdp, Recipe


@dataclass(frozen=True)
class Case:
    """A planned recipe."""

    recipe: Recipe
    hardware: Hardware
    model: ModelFacts
    deepspeed: DeepSpeedFile | None
    plan: Plan
    data: DataFacts | None = None

    @property
    def file(self) -> str:
        """The DeepSpeed file's name."""
        return self.deepspeed.path.name if self.deepspeed else ""

    @property
    def fsdp(self) -> Fsdp | None:
        """How FSDP2 shards the model, where it runs."""
        return resolve_fsdp(self.recipe, self.hardware)

    @property
    def save_steps(self) -> int:
        """Optimizer steps between checkpoints. With save_strategy=epoch they are known when the data is prepared."""
        per_epoch = self.plan.steps_per_epoch.value
        return per_epoch if per_epoch and self.recipe.train.save_strategy == "epoch" else self.recipe.train.save_steps

    @property
    def offloads(self) -> bool:
        """Whether weights, gradients or the optimizer are kept outside of the GPU."""
        by_deepspeed = self.deepspeed is not None and self.deepspeed.offload is not None
        return by_deepspeed or bool(self.fsdp and self.fsdp.offload_params)

    @property
    def adapter_parameters(self) -> int | None:
        """As ModelFacts has it."""
        return self.model.adapter_parameters(self.recipe.model.lora)
