"""What the plan decides and shows, what it warns of, and what a resumed run keeps of it."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sft.data.facts import DataFacts
from sft.errors import PlanError
from sft.hub.model_facts import ModelFacts
from sft.plan.deepspeed import load_deepspeed
from sft.plan.hardware import Hardware
from sft.plan.job import REASON, Job, keep_decisions
from sft.plan.memory_estimate import memory_bars
from sft.plan.plan import print_plan
from sft.plan.precision import MASTER, resolve_precision
from sft.plan.resolve import resolve_plan
from sft.plan.warnings import plan_warnings
from sft.recipe.schema import Recipe
from tests.sft.plan.machines import MODELS, QWEN, MakeRecipe, cpu, gpus

VOLTA, AMPERE = gpus(capability=7.0), gpus(capability=8.0)


@pytest.mark.parametrize(
    ("wanted", "hardware", "stored", "precision"),
    [
        ("auto", cpu(), "bfloat16", "fp32"),
        ("auto", AMPERE, "float16", "bf16"),
        ("auto", VOLTA, "bfloat16", "fp16"),
        ("fp16", VOLTA, "float32", "fp16"),
    ],
)
def test_precision(wanted: str, hardware: Hardware, stored: str, precision: str, make_recipe: MakeRecipe) -> None:
    model = ModelFacts("some/model", dtype=stored)
    plan = resolve_plan(make_recipe(f"train.precision={wanted}"), hardware, model)
    assert plan.precision.value == precision
    assert plan.precision.reason.startswith("auto: " if wanted == "auto" else "the recipe")


@pytest.mark.parametrize(
    ("overrides", "ranks", "kind"),
    [([], 1, "gemma3_text"), (["train.fsdp={}"], 2, "qwen2"), (["train.tensor_parallel_size=2"], 2, "qwen2")],
)
def test_a_gpu_without_bf16_computes_in_fp32_where_fp16_does_not_work(
    overrides: list[str], ranks: int, kind: str, make_recipe: MakeRecipe
) -> None:
    hardware, model = gpus(ranks, capability=7.5), ModelFacts("some/model", kind, "bfloat16")
    assert resolve_precision(make_recipe(*overrides), hardware, model).value == "fp32"
    assert resolve_precision(make_recipe(*overrides), gpus(ranks), model).value == "bf16"
    with pytest.raises(PlanError, match=r"train\.precision"):
        resolve_plan(make_recipe("train.precision=fp16", *overrides), hardware, model)


def test_fp16_for_a_model_of_bf16_is_warned_of(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe()
    for stored, warns in (("bfloat16", True), ("float16", False)):
        model = ModelFacts("some/model", "qwen2", stored)
        warnings = plan_warnings(recipe, resolve_plan(recipe, VOLTA, model), VOLTA, model)
        assert any("set train.precision=fp32" in one for one in warnings) == warns


@pytest.mark.parametrize(
    ("overrides", "ranks", "file", "weights"),
    [
        (["train.precision=bf16"], 1, None, MASTER),
        (["train.precision=bf16"], 2, None, "fp32"),
        (["train.precision=fp16"], 1, None, "fp32"),
        (["train.precision=bf16", "model.lora={}"], 1, None, "bf16, frozen"),
        (["train.precision=bf16"], 2, "zero3", MASTER),
    ],
)
def test_what_is_trained_is_fp32_or_has_an_fp32_copy(
    overrides: list[str], ranks: int, file: str | None, weights: str, make_recipe: MakeRecipe
) -> None:
    recipe, deepspeed = make_recipe("train.micro_batch_size=1", *overrides), load_deepspeed(file) if file else None
    plan = resolve_plan(recipe, gpus(ranks), ModelFacts("m"), None, deepspeed)
    assert (plan.weights.value, plan.gradients.value) == (weights, "fp32")


def test_gradients_of_several_micro_batches_are_added_up_in_fp32(make_recipe: MakeRecipe) -> None:
    for batch, gradients in ((8, "fp32"), (1, "bf16")):  # of one micro-batch nothing is added up
        recipe = make_recipe(f"train.global_batch_size={batch}", "train.micro_batch_size=1")
        assert resolve_plan(recipe, gpus(), ModelFacts("m")).gradients.value == gradients


def test_expectations_are_arithmetic(make_recipe: MakeRecipe) -> None:
    data = DataFacts(documents=100, tokens=6400, trained_tokens=3200)  # 50 packs of 128
    plan = resolve_plan(make_recipe("train.num_train_epochs=1.5"), cpu(), QWEN, data)
    assert plan.steps_per_epoch.value == 7  # 50 / 8, rounded up
    assert plan.max_steps.value == 11  # 1.5 x 7, rounded up
    padded = resolve_plan(make_recipe("data.packing=false"), cpu(), QWEN, data)
    assert padded.steps_per_epoch.value == 13  # 100 / 8
    counted = resolve_plan(make_recipe(), cpu(), QWEN, replace(data, sequences=51, exact=True))
    assert counted.steps_per_epoch.value == 7
    assert counted.steps_per_epoch.reason.startswith("counted: 51")
    unknown = resolve_plan(make_recipe(), cpu(), QWEN)
    assert (unknown.steps_per_epoch.value, unknown.max_steps.value) == (None, None)
    assert resolve_plan(make_recipe("train.max_steps=3"), cpu(), QWEN).max_steps.value == 3


def test_the_table_shows_every_decision(make_recipe: MakeRecipe, capsys: pytest.CaptureFixture[str]) -> None:
    plan = resolve_plan(make_recipe("train.global_batch_size=1", "train.max_steps=1"), cpu(), QWEN)
    print_plan(plan, "a title with [brackets]", ["and a note"])
    shown = capsys.readouterr().out
    words = [line.split() for line in shown.splitlines() if line.startswith("  ")]
    rows = {line[0]: line[1] for line in words if len(line) > 1}
    assert {decision["name"] for decision in plan.decisions()} <= rows.keys()
    # A count of one is a number, and a switch a word.
    assert (rows["global_batch_size"], rows["max_steps"], rows["gradient_checkpointing"]) == ("1", "1", "off")
    assert "[brackets]" in shown
    assert "and a note" in shown


@pytest.mark.parametrize(
    ("overrides", "sequences", "parameters", "told"),
    [
        ("train.global_batch_size=80", 960, None, "12 optimizer step(s)"),
        ("train.global_batch_size=80 train.max_steps=12", 960, None, None),  # somebody has decided so
        ("train.global_batch_size=64", 60, None, "larger than the data"),
        ("train.warmup_steps=120", 960, None, "train.warmup_steps=120"),
        ("train.warmup_steps=119", 960, None, None),
        ("train.min_lr_ratio=0.1 train.lr_scheduler_type=linear", 960, None, "train.min_lr_ratio=0.1"),
        ("model.lora={}", 960, None, "train.learning_rate=1e-05"),
        ("model.lora={} train.learning_rate=1e-4", 960, 3e9, None),
        ("train.learning_rate=2e-4", 960, 3e9, "train.learning_rate=0.0002"),
        ("train.learning_rate=2e-3", 960, 1e7, None),  # a tiny model takes more
        ("train.learning_rate=2e-2", 960, 1e7, "train.learning_rate=0.02"),
        ("train.learning_rate=1e-12", 960, 3e9, "train.learning_rate=1e-12"),
        ("train.adam_beta1=0.999 train.adam_beta2=0.9", 960, None, "train.adam_beta1=0.999"),
        ("eval={every_steps: 121, tasks: [a]}", 960, None, "eval.every_steps=121"),
    ],
)
def test_a_plan_warns_of_what_would_surprise_its_author(
    overrides: str, sequences: int, parameters: float | None, told: str | None, make_recipe: MakeRecipe
) -> None:
    model, data = replace(QWEN, parameters=parameters), DataFacts(2000, 100_000, 50_000, sequences, exact=True)
    recipe = make_recipe(*re.split(r" (?=train\.|model\.)", overrides))
    warnings = plan_warnings(recipe, resolve_plan(recipe, gpus(), model, data), gpus(), model, data)
    assert [told in warning for warning in warnings] == ([True] if told else []), warnings


def test_a_large_model_on_a_cpu_is_warned_of(make_recipe: MakeRecipe) -> None:
    for parameters, count in ((10**9, 1), (10**8, 0)):
        model, recipe = replace(QWEN, parameters=parameters), make_recipe()
        assert len(plan_warnings(recipe, resolve_plan(recipe, cpu(), model), cpu(), model)) == count


# What a resumed run keeps.

LARGE = replace(QWEN, parameters=3_000_000_000)
DATA = DataFacts(1000, 100_000, 50_000, 640, exact=True)


def job_of(recipe: Recipe, hardware: Hardware) -> Job:
    plan = resolve_plan(recipe, hardware, LARGE)
    return Job(recipe, hardware, LARGE, None, plan, recipe_path=Path("mine.yaml"), overrides=())


def decisions(job: Job) -> dict[str, Any]:
    return {row["name"]: row["value"] for row in job.with_data(DATA).plan.decisions()}


def test_a_resumed_run_keeps_what_the_recipe_leaves_open(make_recipe: MakeRecipe) -> None:
    job = job_of(make_recipe("train.global_batch_size=64"), gpus())
    here = decisions(job)
    then = here | {"attention": "eager", "precision": "fp32", "gradient_checkpointing": 2, "micro_batch_size": 2}
    then["kernels"] = "none"
    planned = keep_decisions(job, DATA, then).plan
    found = {name: getattr(planned, name).value for name in then}
    follow = {"gradient_accumulation_steps", "weights", "memory"}
    opened = {"attention", "kernels", "precision", "gradient_checkpointing", "micro_batch_size"}
    assert {name for name, value in found.items() if value != here[name]} == opened | follow
    assert (planned.gradient_accumulation_steps.value, planned.weights.value) == (32, "fp32")
    assert planned.attention.reason == REASON
    assert keep_decisions(job_of(job.recipe, cpu()), DATA, decisions(job)).plan.kernels.value == "none"
    # On another number of ranks a micro-batch is another question.
    assert keep_decisions(job_of(job.recipe, gpus(2)), DATA, then).plan.micro_batch_size.value != 2


def test_a_machine_that_cannot_resume_as_before_is_refused(make_recipe: MakeRecipe) -> None:
    job = job_of(make_recipe(), gpus())
    with pytest.raises(PlanError, match=r"resumes with what it was .*model.attn_implementation=flash_attention_2"):
        keep_decisions(job, DATA, decisions(job) | {"attention": "flash_attention_2"})


def test_the_json_has_bytes_of_each_category_that_add_up_to_the_peak(make_recipe: MakeRecipe) -> None:
    found = resolve_plan(make_recipe(), gpus(8), MODELS["Qwen/Qwen2.5-3B"]).as_json(time={"hours": [1, 2]})
    memory = json.loads(json.dumps(found))["memory"]
    parts = ("weights", "gradients", "optimizer", "activations", "buffers", "reserve")
    assert abs(sum(memory[name] for name in parts) - memory["peak"]) <= len(parts)
    assert memory["available"] == 80 * 2**30
    assert not memory["simulated"]
    assert found["decisions"]["engine"]["value"] == "DDP"
    assert found["time"] == {"hours": [1, 2]}


def test_bars_say_what_is_too_much() -> None:
    sizes = {"weights": 2**33, "activations": 2**32, "reserve": 1, "peak": 3 * 2**32 + 1, "available": 2**32}
    *_, rest, machine = over = memory_bars(sizes | {"machine": 2**34, "machine_available": 2**33}, "#")
    assert rest.split() == ["too", "much", "#" * 32, "8.0", "of", "4"]
    assert machine.split() == ["machine", "#" * 48, "16.0", "of", "8"]
    assert len({len(line) for line in over[1:4]}) == 1
