"""The schedule's steps: counted, and refused where they do not fit into the run."""

import pytest

from sft.data.facts import DataFacts
from sft.errors import PlanError
from sft.plan.resolve import resolve_plan
from tests.sft.plan.machines import QWEN, MakeRecipe, cpu

WSD = "train.lr_scheduler_type=warmup_stable_decay"
POLYNOMIAL = "train.lr_scheduler_type=polynomial"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (f"{WSD} train.lr_decay_steps=12", None),
        (f"{WSD} train.lr_decay_steps=13", "a warmup of 0 and a decay of 13 steps or more are longer than the run's 12"),
        (f"{WSD} train.lr_decay_ratio=0.9 train.warmup_steps=2", "a warmup of 2 and a decay of 11 "),
        (f"{WSD} train.lr_decay_ratio=0.5 train.warmup_ratio=0.5", None),
        (f"{POLYNOMIAL} train.warmup_steps=12", "a warmup of 12 "),
        (f"{POLYNOMIAL} train.warmup_steps=11", None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("counted", [True, False])
def test_a_schedule_longer_than_the_run_is_refused(
    overrides: str, message: str | None, counted: bool, make_recipe: MakeRecipe
) -> None:
    """Where the steps are counted or stated, and not by an estimate."""
    recipe, data = make_recipe(*overrides.split()), DataFacts(2000, 100_000, 50_000, 96, exact=counted)
    if message is None or not counted:
        resolve_plan(recipe, cpu(), QWEN, data)
    else:
        with pytest.raises(PlanError, match=message):
            resolve_plan(recipe, cpu(), QWEN, data)


def test_the_plan_shows_the_warmup(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe(WSD, "train.lr_decay_ratio=0.25", "train.warmup_ratio=0.1", "train.min_lr_ratio=0.1")
    unknown = resolve_plan(recipe, cpu(), QWEN)
    assert unknown.warmup_steps.value is None
    counted = resolve_plan(recipe, cpu(), QWEN, DataFacts(2000, 100_000, 50_000, 160, exact=True))
    assert (counted.warmup_steps.value, counted.warmup_steps.reason) == (2, "warmup_ratio 0.1 x 20 steps, rounded up")
    assert unknown.settings() == counted.settings()
