"""The schedule's steps: counted, and refused where they do not fit into the run."""

from contextlib import nullcontext
from dataclasses import replace

import pytest

from sft.data.facts import DataFacts
from sft.errors import PlanError
from sft.plan.resolve import resolve_plan
from tests.sft.plan.machines import QWEN, MakeRecipe, cpu

WSD = "train.lr_scheduler_type=warmup_stable_decay"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (f"{WSD} train.lr_decay_steps=12", None),
        (f"{WSD} train.lr_decay_ratio=0.9 train.warmup_steps=2", "a warmup of 2 and a decay of 11 "),
        ("train.lr_scheduler_type=polynomial train.warmup_steps=12", "a warmup of 12 "),
    ],
)
def test_a_schedule_longer_than_the_run_is_refused_once_steps_are_counted(
    overrides: str, message: str | None, make_recipe: MakeRecipe
) -> None:
    recipe, data = make_recipe(*overrides.split()), DataFacts(2000, 100_000, 50_000, 96, exact=True)
    resolve_plan(recipe, cpu(), QWEN, replace(data, exact=False))
    with pytest.raises(PlanError, match=message) if message else nullcontext():
        resolve_plan(recipe, cpu(), QWEN, data)


def test_the_plan_shows_the_warmup(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe(WSD, "train.lr_decay_ratio=0.25", "train.warmup_ratio=0.1", "train.min_lr_ratio=0.1")
    unknown = resolve_plan(recipe, cpu(), QWEN)
    assert unknown.warmup_steps.value is None
    counted = resolve_plan(recipe, cpu(), QWEN, DataFacts(2000, 100_000, 50_000, 160, exact=True))
    assert (counted.warmup_steps.value, counted.warmup_steps.reason) == (2, "warmup_ratio 0.1 x 20 steps, rounded up")
    assert unknown.settings() == counted.settings()
