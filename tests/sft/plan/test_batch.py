"""Who shares a batch, what an uneven share is filled with, and what another batch does to the learning rate."""

from collections.abc import Callable
from itertools import product
from math import sqrt

import pytest

from sft.errors import PlanError
from sft.hub.model_facts import ModelFacts
from sft.plan.batch import resolve_data_parallel_ranks, split_batch
from sft.plan.deepspeed import load_deepspeed
from sft.plan.hardware import Gpu, Hardware
from sft.plan.plan import Plan, resolve_plan
from sft.recipe.schema import Recipe

MakeRecipe = Callable[..., Recipe]
MODEL = ModelFacts("some/model", "qwen2", "bfloat16", 32768)


def gpus(ranks: int) -> Hardware:
    return Hardware(Gpu("GPU", 80.0, 9.0), ranks, min(ranks, 8), 16, 512.0)


def plan_of(recipe: Recipe, ranks: int) -> Plan:
    return resolve_plan(recipe, gpus(ranks), MODEL)


def places(plan: Plan) -> int:
    return plan.micro_batch_size.value * plan.gradient_accumulation_steps.value * plan.data_parallel_ranks.value


@pytest.mark.parametrize("micro", ["auto", 1, 2, 3, 7])
def test_a_filled_step_has_places_for_its_sequences_and_no_forward_pass_too_many(
    micro: int | str, make_recipe: MakeRecipe
) -> None:
    for batch, ranks in product((1, 2, 7, 8, 12, 97), (1, 2, 3, 5, 8, 16)):
        plan = plan_of(
            make_recipe(f"train.global_batch_size={batch}", f"train.micro_batch_size={micro}", "train.remainder=fill"),
            ranks,
        )
        one_pass = plan.micro_batch_size.value * ranks
        assert plan.empty_sequences_per_step.value == places(plan) - batch
        assert 0 <= plan.empty_sequences_per_step.value < one_pass
        assert plan.global_batch_size.value == batch


def test_eight_sequences_on_three_ranks_are_nine_places(make_recipe: MakeRecipe) -> None:
    plan = plan_of(make_recipe("train.remainder=fill"), 3)
    assert (places(plan), plan.empty_sequences_per_step.value) == (9, 1)
    assert "9 places for 8 sequences" in plan.empty_sequences_per_step.reason
    assert "8 = 1 x 3 x 3 - 1 empty" in plan.gradient_accumulation_steps.reason


@pytest.mark.parametrize(("tensor", "sequence"), [(2, 1), (1, 2), (2, 2), (1, 4)])
def test_ranks_that_share_a_batch_count_once(tensor: int, sequence: int, make_recipe: MakeRecipe) -> None:
    words = [f"train.tensor_parallel_size={tensor}", f"train.sequence_parallel_size={sequence}", "data.packing=false"]
    words += ["train.parallel=auto"]
    together, ranks = make_recipe(*words), resolve_data_parallel_ranks(make_recipe(*words), gpus(8))
    fewer = gpus(8 // (tensor * sequence))
    assert ranks.value == fewer.ranks
    shares = (
        split_batch(together, gpus(8), 8, "sdpa"),
        split_batch(make_recipe("data.packing=false"), fewer, 8, "sdpa"),
    )
    assert shares[0][0] == shares[1][0]
    assert shares[0][1].value == shares[1][1].value
    for size, word in ((tensor, f"/ {tensor} that share the matrices"), (sequence, f"/ {sequence} that share a seq")):
        assert (word in ranks.reason) == (size > 1)


def test_a_message_about_groups_counts_in_gpus_that_can_be_started(make_recipe: MakeRecipe) -> None:
    words = ["train.global_batch_size=9", "train.tensor_parallel_size=2"]
    with pytest.raises(PlanError, match=r"by 4 groups of GPUs \(train.tensor_parallel_size=2\)") as error:
        plan_of(make_recipe(*words), 8)
    assert "a number of GPUs that divides it: 2, 6." in str(error.value)
    for ranks in (2, 6):
        micro, accumulation = split_batch(make_recipe(*words), gpus(ranks), 9, "sdpa")
        assert micro.value * accumulation.value * ranks // 2 == 9


def test_deepspeed_is_given_the_places_as_its_batch(make_recipe: MakeRecipe) -> None:
    recipe, file = make_recipe("train.remainder=fill", "train.deepspeed=zero2"), load_deepspeed("zero2")
    file.config["train_batch_size"] = 9
    resolve_plan(recipe, gpus(3), MODEL, deepspeed=file)
    file.config["train_batch_size"] = 8
    with pytest.raises(
        PlanError, match=r"train_batch_size is 8, and train.global_batch_size with its 1 empty places is 9"
    ):
        resolve_plan(recipe, gpus(3), MODEL, deepspeed=file)


@pytest.mark.parametrize(
    ("scaling", "base", "factor"), [("linear", 4, 2.0), ("linear", 16, 0.5), ("sqrt", 2, 2.0), ("sqrt", 16, sqrt(0.5))]
)
def test_the_learning_rate_follows_the_batch_by_the_rule(
    scaling: str, base: int, factor: float, make_recipe: MakeRecipe
) -> None:
    recipe = make_recipe(f"train.lr_scaling={scaling}", f"train.base_batch_size={base}")
    found = plan_of(recipe, 2).learning_rate
    assert found.value == pytest.approx(1e-5 * factor, rel=1e-12)
    assert found.reason == f"1e-5 x {factor:.6g} ({scaling}: 8 / base_batch_size {base})"
    assert plan_of(recipe, 8).learning_rate == found


def test_the_learning_rate_scales_in_tokens_where_the_batch_is_in_tokens(make_recipe: MakeRecipe) -> None:
    words = ["train.global_batch_size=null", "train.global_batch_tokens=1024"]
    recipe = make_recipe(*words, "train.lr_scaling=linear", "train.base_batch_size=512")
    assert plan_of(recipe, 2).learning_rate.value == 2e-5
    assert plan_of(make_recipe(), 2).learning_rate.value == 1e-5
