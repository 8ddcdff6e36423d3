"""Which optimizer runs where, and what it takes."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from sft.errors import PlanError
from sft.plan.deepspeed import DeepSpeedFile, load_deepspeed
from sft.plan.engine import order_of_engines
from sft.plan.hardware import Hardware
from sft.plan.optimizer import state_bytes
from sft.plan.resolve import resolve_plan
from tests.sft.plan.machines import QWEN, MakeRecipe, cpu, gpus, needs

WITHOUT_ZERO = DeepSpeedFile(Path("zero0.json"), {"zero_optimization": {"stage": 0}})


@pytest.mark.parametrize(
    ("overrides", "hardware", "message"),
    [
        *((f"train.optim={name}", hardware, None)
          for name in ("adamw", "adamw_8bit", "adafactor", "lion", "muon") for hardware in (cpu(), gpus(2))),
        ("train.optim=paged_adamw_8bit", cpu(), "no GPU here. Set train.optim=adamw_8bit"),
        ("train.optim=lion train.deepspeed=zero3", gpus(2), None),
        ("train.optim=muon train.deepspeed=zero3", gpus(2), "with zero3.json each rank steps on shards.*adamw or lion"),
        ("train.optim=adamw_8bit train.deepspeed=zero1", gpus(2), "with zero1.json each rank steps on shards"),
        ("train.optim=lion train.deepspeed=zero3_offload", gpus(2), "zero3_offload.json offloads.* Set train.optim=adamw"),
        ("train.optim=lion train.deepspeed=zero0", gpus(2), "zero0.json offloads, or is DeepSpeed without ZeRO"),
        ("train.optim=lion train.fsdp={\"state_dict_type\":\"full\"}", gpus(2), "saves the state of AdamW only"),
        ("train.optim=muon train.fsdp={}", gpus(1), None),
        ("train.optim=adafactor train.fsdp={}", gpus(2), "with train.fsdp each rank steps on shards.*adamw or lion"),
        ("train.optim=lion train.tensor_parallel_size=2", gpus(2), "train.tensor_parallel_size=2 with train.optim=lion"),
    ],
)  # fmt: skip
def test_an_optimizer_that_an_engine_cannot_take_is_refused_with_a_remedy(
    overrides: str, hardware: Hardware, message: str | None, make_recipe: MakeRecipe
) -> None:
    recipe = make_recipe(*overrides.split())
    name = recipe.train.deepspeed
    file = (WITHOUT_ZERO if name == "zero0" else load_deepspeed(name)) if name else None
    with pytest.raises(PlanError, match=message) if message else nullcontext():
        resolve_plan(recipe, hardware, QWEN, None, file)


def test_an_8_bit_optimizer_without_bitsandbytes_is_refused(make_recipe: MakeRecipe) -> None:
    with pytest.raises(PlanError, match=r"train.optim=adamw_8bit needs bitsandbytes.*qlora"):
        resolve_plan(make_recipe("train.optim=adamw_8bit"), replace(gpus(), has_bitsandbytes=False), QWEN)


def test_auto_tries_only_engines_that_take_the_optimizer(make_recipe: MakeRecipe) -> None:
    def order(optim: str) -> list[str]:
        return order_of_engines(make_recipe("train.parallel=auto", f"train.optim={optim}"), gpus(8), QWEN)

    assert order("muon") == order("adafactor") == order("adamw_8bit") == ["none"]
    assert order("lion") == ["zero2", "zero3"]
    assert "zero3_offload" in order("adamw")


BILLION = replace(QWEN, parameters=1_000_000_000, hidden_size=1000, num_hidden_layers=10, vocab_size=100_000)


@pytest.mark.parametrize(
    ("optim", "per_parameter"),
    [
        ("adamw", 8),
        ("adamw_8bit", 0.1 * 8 + 0.9 * 2.03125),
        ("adafactor", 0.008),
        ("lion", 4),
        ("muon", 0.1 * 8 + 0.9 * 4),
    ],
)
def test_the_plan_counts_the_optimizers_own_state(optim: str, per_parameter: float, make_recipe: MakeRecipe) -> None:
    """A tenth of the parameters are the embedding's."""
    recipe = make_recipe(f"train.optim={optim}", "train.precision=fp32")
    assert state_bytes(recipe, 1e9, 1e8, 1000) == pytest.approx(per_parameter * 1e9)
    estimate = needs(recipe, gpus(), BILLION, "none")
    assert estimate.gpu["optimizer"] == pytest.approx(per_parameter * 1e9)
    assert estimate.gpu["weights"] == 4e9


def test_the_plan_counts_the_logits_that_smoothed_labels_need(make_recipe: MakeRecipe) -> None:
    plain, smooth = (
        needs(
            make_recipe("train.precision=bf16", f"train.label_smoothing_factor={factor}", "data.max_length=4096"),
            gpus(), BILLION, "none",
        )
        for factor in (0.0, 0.1)
    )  # fmt: skip
    assert smooth.gpu_bytes - plain.gpu_bytes > 4096 * 100_000 * 12


def test_an_optimizer_without_copies_steps_on_fp32_weights(make_recipe: MakeRecipe) -> None:
    plans = {
        optim: resolve_plan(make_recipe(f"train.optim={optim}", "train.precision=bf16"), gpus(), BILLION)
        for optim in ("adamw", "lion")
    }
    assert plans["adamw"].weights.value == "bf16 with an fp32 copy"
    assert (plans["lion"].weights.value, plans["lion"].gradients.value) == ("fp32", "fp32")
