from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sft.data.facts import DataFacts
from sft.errors import PlanError
from sft.hub.model_facts import ModelFacts
from sft.plan.hardware import Gpu, Hardware
from sft.plan.job import REASON, Job, keep_decisions
from sft.plan.plan import resolve_plan
from sft.recipe.schema import Recipe

MakeRecipe = Callable[..., Recipe]
QWEN = ModelFacts("some/model", "qwen2", "bfloat16", 32768, 3_000_000_000)
DATA = DataFacts(1000, 100_000, 50_000, 640, exact=True)


def gpus(ranks: int = 1, memory: float = 80.0) -> Hardware:
    return Hardware(Gpu("NVIDIA Test", memory, 9.0), ranks, min(ranks, 8), 16, 128.0)


def job_of(recipe: Recipe, hardware: Hardware) -> Job:
    return Job(recipe, Path("mine.yaml"), (), hardware, QWEN, None, resolve_plan(recipe, hardware, QWEN))


def decisions(job: Job) -> dict[str, Any]:
    return {row["name"]: row["value"] for row in job.plan.decisions()}


def test_what_the_recipe_leaves_open_is_what_it_was(make_recipe: MakeRecipe) -> None:
    job = job_of(make_recipe("train.global_batch_size=64"), gpus())
    here = decisions(job.with_data(DATA))
    then = here | {"attention": "eager", "precision": "fp32", "gradient_checkpointing": 2, "micro_batch_size": 2}
    planned = keep_decisions(job, DATA, then).plan
    found = {name: getattr(planned, name).value for name in then}
    assert found["weights"] == "fp32"  # follows from the format
    assert {name: value for name, value in found.items() if value != here[name]}.keys() == {
        "attention",
        "precision",
        "gradient_checkpointing",
        "micro_batch_size",
        "gradient_accumulation_steps",
        "weights",
        "memory",
    }
    assert planned.gradient_accumulation_steps.value == 32
    assert planned.attention.reason == REASON
    assert planned.steps_per_epoch.value == 10


def test_what_the_recipe_sets_it_sets(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe("train.global_batch_size=64", "train.micro_batch_size=8", "train.gradient_checkpointing=false")
    job = job_of(recipe, gpus())
    then = decisions(job.with_data(DATA)) | {"micro_batch_size": 2, "gradient_checkpointing": True}
    planned = keep_decisions(job, DATA, then).plan
    assert (planned.micro_batch_size.value, planned.gradient_checkpointing.value) == (8, False)
    assert planned.micro_batch_size.reason == "the recipe"


def test_gradients_are_added_up_as_before_on_a_machine_of_another_memory(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe("train.global_batch_size=64", "train.micro_batch_size=8")
    small, large = (job_of(recipe, gpus(memory=memory)) for memory in (56.0, 80.0))
    then = decisions(small.with_data(DATA))
    assert (then["gradients"], decisions(large.with_data(DATA))["gradients"]) == ("bf16", "fp32")
    planned = keep_decisions(large, DATA, then).plan
    assert (planned.gradients.value, planned.gradients.reason) == ("bf16", REASON)
    # Another micro-batch, which the recipe sets now, is another question.
    other = job_of(make_recipe("train.global_batch_size=64", "train.micro_batch_size=4"), gpus(memory=80.0))
    assert keep_decisions(other, DATA, then).plan.gradients.value == "fp32"


def test_a_machine_that_cannot_do_the_same_says_so(make_recipe: MakeRecipe) -> None:
    job = job_of(make_recipe(), gpus())
    then = decisions(job.with_data(DATA)) | {"attention": "flash_attention_2"}
    with pytest.raises(
        PlanError, match=r"resumes with what it was started with .*model.attn_implementation=flash_attention_2"
    ):
        keep_decisions(job, DATA, then)
