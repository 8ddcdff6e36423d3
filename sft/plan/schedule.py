"""Decides the schedule of the learning rate: its warmup and its decay in steps."""

from __future__ import annotations

from math import ceil

from sft.plan.plan import Decision, stated
from sft.recipe.schema import Recipe
from sft.recipe.train import Train

TIMESCALE = 10_000
"""Steps of inverse_sqrt's time scale where there is no warmup; transformers' own."""


def resolve_warmup(recipe: Recipe, max_steps: int | None) -> Decision[int | None]:
    """Optimizer steps of the warmup; None until the steps are counted."""
    ratio = recipe.train.warmup_ratio
    if ratio is None:
        return Decision(recipe.train.warmup_steps, stated(recipe.train, "warmup_steps"))
    if max_steps is None:
        return Decision(None, f"warmup_ratio {ratio:g} of the steps, which are counted when the data is prepared")
    return Decision(ceil(ratio * max_steps), f"warmup_ratio {ratio:g} x {max_steps} steps, rounded up")


def decay_steps(train: Train, max_steps: int) -> int:
    """Last steps, over which warmup_stable_decay falls."""
    return train.lr_decay_steps or ceil((train.lr_decay_ratio or 0) * max_steps)
