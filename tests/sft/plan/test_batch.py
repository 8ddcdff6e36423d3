"""Who shares a batch, what fills an uneven share, and what another batch does to the learning rate."""

import re
from itertools import product
from math import sqrt

import pytest

from sft.data.facts import DataFacts
from sft.errors import PlanError
from sft.plan.batch import resolve_data_parallel_ranks, split_batch
from sft.plan.deepspeed import load_deepspeed
from sft.plan.plan import Plan
from sft.plan.resolve import resolve_plan
from sft.recipe.schema import Recipe
from tests.sft.plan.machines import QWEN, MakeRecipe, gpus


def plan_of(recipe: Recipe, ranks: int) -> Plan:
    return resolve_plan(recipe, gpus(ranks), QWEN)


def with_batch(recipe: Recipe, batch: int | None, micro: int | str = "auto", tokens: int | None = None) -> Recipe:
    values = {"global_batch_size": batch, "micro_batch_size": micro, "global_batch_tokens": tokens}
    return recipe.model_copy(update={"train": recipe.train.model_copy(update=values)})


def slots(plan: Plan) -> int:
    return plan.micro_batch_size.value * plan.gradient_accumulation_steps.value * plan.data_parallel_ranks.value


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def test_the_parts_of_a_batch_give_it_exactly_or_the_message_names_values_that_do(make_recipe: MakeRecipe) -> None:
    recipe, refused, planned = make_recipe(), 0, 0
    for ranks, batch, micro in product(range(1, 17), range(1, 121, 3), ["auto", 1, 2, 3]):
        try:
            plan = plan_of(with_batch(recipe, batch, micro), ranks)
        except PlanError as error:
            refused += 1
            if match := re.search(r"Set train\.micro_batch_size to (.*)\.$", str(error)):
                for better in numbers(match[1]):
                    assert slots(plan_of(with_batch(recipe, batch, better), ranks)) == batch
                continue
            match = re.search(r"Set train\.global_batch_size to (.*), use a number", str(error))
            assert match, error
            for better in numbers(match[1]):
                assert slots(plan_of(with_batch(recipe, better, micro), ranks)) == better
        else:
            planned += 1
            assert slots(plan) == batch
            assert micro in ("auto", plan.micro_batch_size.value)
    assert refused > 100
    assert planned > 100


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_a_step_and_the_number_of_steps_are_the_same_on_any_number_of_gpus(ranks: int, make_recipe: MakeRecipe) -> None:
    data, recipe = (
        DataFacts(documents=1000, tokens=64_000, trained_tokens=20_000),
        make_recipe("train.global_batch_size=64"),
    )
    plan, alone = (resolve_plan(recipe, gpus(number), QWEN, data) for number in (ranks, 1))
    for name in ("global_batch_size", "steps_per_epoch", "max_steps"):
        assert getattr(plan, name) == getattr(alone, name)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("tokens", [1, 1000])
def test_a_batch_in_tokens_that_does_not_divide_names_ones_that_do(
    tokens: int, ranks: int, make_recipe: MakeRecipe
) -> None:
    with pytest.raises(PlanError, match=f"train.global_batch_tokens={tokens}") as error:
        plan_of(with_batch(make_recipe(), None, tokens=tokens), ranks)
    offered = numbers(str(error.value).rpartition("Set it to")[2])
    assert offered
    for better in offered:
        assert plan_of(with_batch(make_recipe(), None, tokens=better), ranks).global_batch_size.value * 128 == better


@pytest.mark.parametrize("micro", ["auto", 3])
def test_a_filled_step_has_slots_for_its_sequences_and_no_forward_pass_too_many(
    micro: int | str, make_recipe: MakeRecipe
) -> None:
    recipe = make_recipe("train.remainder=fill")
    for batch, ranks in product((1, 2, 7, 8, 12, 97), (1, 2, 3, 5, 8, 16)):
        plan = plan_of(with_batch(recipe, batch, micro), ranks)
        assert plan.empty_sequences_per_step.value == slots(plan) - batch
        assert 0 <= plan.empty_sequences_per_step.value < plan.micro_batch_size.value * ranks
        assert plan.global_batch_size.value == batch


def test_eight_sequences_on_three_ranks_are_nine_slots_for_deepspeed_too(make_recipe: MakeRecipe) -> None:
    recipe, file = make_recipe("train.remainder=fill", "train.deepspeed=zero2"), load_deepspeed("zero2")
    file.config["train_batch_size"] = 9
    plan = resolve_plan(recipe, gpus(3), QWEN, deepspeed=file)
    assert (slots(plan), plan.empty_sequences_per_step.value) == (9, 1)
    assert "9 slots for 8 sequences" in plan.empty_sequences_per_step.reason
    assert "8 = 1 x 3 x 3 - 1 empty" in plan.gradient_accumulation_steps.reason
    file.config["train_batch_size"] = 8
    with pytest.raises(
        PlanError, match=r"train_batch_size is 8, and train.global_batch_size with its 1 empty slots is 9"
    ):
        resolve_plan(recipe, gpus(3), QWEN, deepspeed=file)


@pytest.mark.parametrize(("tensor", "sequence"), [(2, 1), (2, 2)])
def test_ranks_that_share_a_batch_count_once(tensor: int, sequence: int, make_recipe: MakeRecipe) -> None:
    words = [f"train.tensor_parallel_size={tensor}", f"train.sequence_parallel_size={sequence}", "data.packing=false"]
    recipe, fewer = make_recipe(*words, "train.parallel=auto"), gpus(8 // (tensor * sequence))
    ranks = resolve_data_parallel_ranks(recipe, gpus(8))
    assert ranks.value == fewer.ranks
    ours = split_batch(recipe, gpus(8), 8, "sdpa")
    theirs = split_batch(make_recipe("data.packing=false"), fewer, 8, "sdpa")
    assert [one.value for one in ours] == [one.value for one in theirs]
    with pytest.raises(PlanError, match=rf"groups of {tensor * sequence} ranks, and 9 is no multiple"):
        resolve_data_parallel_ranks(recipe, gpus(9))


@pytest.mark.parametrize(("scaling", "base", "factor"), [("linear", 4, 2.0), ("sqrt", 16, sqrt(0.5))])
def test_the_learning_rate_follows_the_batch_by_the_rule(
    scaling: str, base: int, factor: float, make_recipe: MakeRecipe
) -> None:
    recipe = make_recipe(f"train.lr_scaling={scaling}", f"train.base_batch_size={base}")
    found = plan_of(recipe, 2).learning_rate
    assert found.value == pytest.approx(1e-5 * factor, rel=1e-12)
    assert found.reason == f"1e-05 x {factor:.6g} ({scaling}: 8 / base_batch_size {base})"
    assert plan_of(recipe, 8).learning_rate == found
    assert plan_of(make_recipe(), 2).learning_rate.value == 1e-5
    tokens = make_recipe("train.global_batch_size=null", "train.global_batch_tokens=1024", *(
        f"train.{key}" for key in (f"lr_scaling={scaling}", f"base_batch_size={128 * base}")
    ))  # fmt: skip
    assert plan_of(tokens, 2).learning_rate.value == found.value
