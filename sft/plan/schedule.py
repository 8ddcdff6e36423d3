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


def resolve_schedule(recipe: Recipe, max_steps: int | None, warmup: int | None) -> Decision[str]:
    """The schedule's name, and in the reason its shape."""
    train = recipe.train
    end = f"{train.min_lr_ratio:g} of the peak" if train.min_lr_ratio else "0"
    last = f"the last {decay_steps(train, max_steps)} of {max_steps}" if max_steps else "the last"
    shapes = {
        "cosine": f"falls along half a cosine to {end}",
        "cosine_with_min_lr": f"falls along half a cosine to {end}",
        "linear": "falls along a line to 0",
        "constant": "stays at the peak after the warmup",
        "constant_with_warmup": "stays at the peak after the warmup",
        "warmup_stable_decay": f"stays at the peak and falls over {last} steps to {end} ({train.lr_decay_type})",
        "inverse_sqrt": f"falls with 1 / sqrt(step), to half the peak {3 * (warmup or TIMESCALE)} steps after the warmup",
        "polynomial": f"falls with power {train.lr_power:g} to {end}",
    }
    return Decision(train.lr_scheduler_type, f"{stated(train, 'lr_scheduler_type')}: {shapes[train.lr_scheduler_type]}")
