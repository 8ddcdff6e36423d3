from collections.abc import Callable

import pytest

from sft.hub.model_facts import ModelFacts
from sft.plan.deepspeed import DeepSpeedFile, load_deepspeed
from sft.plan.hardware import Gpu, Hardware
from sft.plan.plan import Plan, resolve_plan
from sft.plan.precision import MASTER
from sft.recipe.schema import Recipe

MakeRecipe = Callable[..., Recipe]


def machine(ranks: int = 1, memory: float = 140.0) -> Hardware:
    return Hardware(Gpu("GPU", memory, 9.0), ranks, ranks, 16, 128.0)


def plan(
    recipe: Recipe, hardware: Hardware, parameters: float | None = None, file: DeepSpeedFile | None = None
) -> Plan:
    return resolve_plan(recipe, hardware, ModelFacts("m", parameters=parameters and int(parameters)), None, file)


@pytest.mark.parametrize(
    ("overrides", "ranks", "file", "weights", "gradients"),
    [
        (["train.precision=bf16"], 1, None, MASTER, "fp32"),
        (["train.precision=bf16"], 2, None, "fp32", "fp32"),
        (["train.precision=fp16"], 1, None, "fp32", "fp32"),
        (["train.precision=fp32"], 1, None, "fp32", "fp32"),
        (["train.precision=bf16", "model.lora={}"], 1, None, "bf16, frozen", "fp32"),
        (["train.precision=bf16"], 1, "zero2", MASTER, "fp32"),
        (["train.precision=bf16"], 2, "zero3", MASTER, "fp32"),
        (["train.precision=fp32"], 2, "zero2", "fp32", "fp32"),
    ],
)
def test_what_is_trained_is_fp32_or_has_an_fp32_copy(
    overrides: list[str], ranks: int, file: str | None, weights: str, gradients: str, make_recipe: MakeRecipe
) -> None:
    recipe = make_recipe("train.micro_batch_size=1", *overrides)
    planned = plan(recipe, machine(ranks), file=load_deepspeed(file) if file else None)
    assert (planned.weights.value, planned.gradients.value) == (weights, gradients)


@pytest.mark.parametrize(
    ("parameters", "memory", "batch", "gradients"),
    [
        (3.1e9, 80, 8, "fp32"),  # 18 x 3.1e9 = 52 GiB
        (7.6e9, 140, 8, "bf16"),  # 127 GiB leave 9%; 16 bytes are 113 GiB
        (7.6e9, 180, 8, "fp32"),
        (7.6e9, 140, 1, "bf16"),  # one micro-batch: nothing is added up
        (0.5e9, 140, 1, "bf16"),
        (None, 24, 8, "fp32"),
    ],
)
def test_gradients_are_added_up_in_fp32_where_that_leaves_room(
    parameters: float | None, memory: float, batch: int, gradients: str, make_recipe: MakeRecipe
) -> None:
    recipe = make_recipe(f"train.global_batch_size={batch}", "train.micro_batch_size=1")
    assert plan(recipe, machine(memory=memory), parameters).gradients.value == gradients
