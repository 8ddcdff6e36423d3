"""Compares what ZeRO-3 brings into each node in a step with what pipeline stages would bring instead (docs/pipeline.md)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sft.errors import PlanError
from sft.plan.case import Case
from sft.plan.pipeline import bubble


@dataclass(frozen=True)
class Traffic:
    """Into a node in a step, in bytes."""

    gathered: float
    """ZeRO-3's: weights for each forward and each backward pass, and gradients."""

    stages: int
    sent: float
    """Hidden states and their gradients, for pipeline stages."""

    idle: float
    """The fraction of a step that stages wait."""

    def words(self, speed: float | None = None) -> str:
        """`speed` is in bytes a second; None: it is not known.

        >>> Traffic(6.8e12, 4, 8.6e9, 0.05).words(2e9)
        'each node receives 6,800 GB (3,400 s) a step; with train.pipeline_parallel_size=4 8.6 GB (4.3 s), at 5% idle'
        """

        def of(count: float) -> str:
            seconds = f" ({float(f'{count / speed:.2g}'):,.10g} s)" if speed else ""
            return f"{float(f'{count / 1e9:.2g}'):,.10g} GB{seconds}"

        stages = f"train.pipeline_parallel_size={self.stages} {of(self.sent)}"
        return f"each node receives {of(self.gathered)} a step; with {stages}, at {self.idle:.0%} idle"


def compare_traffic(case: Case, planned: Callable[..., Case]) -> Traffic | None:
    """Of a job for which `train.parallel: auto` stands for ZeRO-3 on several nodes; None elsewhere, and where no number of stages runs.

    `planned` is sft/plan/resolve.py's: as many stages as nodes are tried first.
    """
    hardware, model, plan, recipe = case.hardware, case.model, case.plan, case.recipe
    nodes, is_full = hardware.ranks // hardware.ranks_per_node, recipe.model.lora is None
    if nodes < 2 or recipe.train.parallel != "auto" or plan.engine.value != "ZeRO-3" or not model.parameters:
        return None
    width, passes = 4 if plan.precision.value == "fp32" else 2, plan.gradient_accumulation_steps.value
    gathered = passes * (3 if is_full else 2) * width * model.parameters * (1 - 1 / nodes)
    # From the stage before, and gradients from the stage behind; each token's once, in the dtype of the weights.
    tokens = plan.global_batch_size.value * recipe.sequence_length
    sent = tokens * (model.hidden_size or 0) * (4 if is_full else width) * min(2, nodes - 1)
    for stages in range(nodes, hardware.ranks + 1, nodes):
        changes = {"parallel": None, "pipeline_parallel_size": stages}
        changed = recipe.model_copy(update={"train": recipe.train.model_copy(update=changes)})
        try:
            other = planned(changed, hardware, model, case.data).plan
        except PlanError:
            continue
        if other.memory_estimate is None or other.memory_estimate.lack is None:
            return Traffic(gathered, stages, sent, bubble(stages, other.gradient_accumulation_steps.value))
    return None
