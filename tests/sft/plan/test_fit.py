"""What is proposed is planned again here, from the words that are shown; and who changes the result stands behind who does not."""

from dataclasses import replace

import pytest

from sft.errors import PlanError
from sft.hub.flops import AttentionLayers, Matmuls, ModelFlops
from sft.hub.model_facts import ModelFacts
from sft.plan.fit import Fit, changed, describe, fit
from sft.plan.hardware import Hardware, described_hardware
from sft.plan.resolve import planned
from sft.recipe.load import parse_recipe
from sft.recipe.schema import Recipe
from tests.sft.plan.machines import MODELS

RECIPE = """
schema_version: 1
version: 1
model: {name_or_path: m}
data: {train: x, max_length: 4096}
train: {global_batch_size: 64, learning_rate: 1e-5}
"""
RESULT = ("train.optim", "data.max_length", "data.pack_length", "model.lora", "model.quantization")


def sized(name: str) -> ModelFacts:
    model = MODELS[name]
    layers, hidden = model.num_hidden_layers or 0, model.hidden_size or 0
    flops = ModelFlops(Matmuls(model.body_parameters), (AttentionLayers(layers, hidden),))
    widths = {"linear_parameters": model.body_parameters, "linear_widths": 20 * layers * hidden}
    return replace(model, flops=flops, **widths)


B3, B7, B14, B70 = (sized(name) for name in MODELS)


def fitted(model: ModelFacts, on: str, *overrides: str) -> tuple[Fit, Recipe, Hardware]:
    recipe, hardware = parse_recipe(RECIPE, overrides), described_hardware(on)
    return fit(recipe, hardware, model, None), recipe, hardware


DO_NOT_FIT = [
    (B3, "1x24GB", []),
    (B3, "1x80GB", ["train.gradient_checkpointing=false", "data.pack_length=16384"]),
    (B7, "8xH100", []),
    (B14, "4x80GB", ["train.deepspeed=zero2"]),
    (B14, "8x80GB", ["train.deepspeed=zero3", "train.gradient_checkpointing=false", "data.pack_length=32768"]),
    (B14, "1x16GB", ["model.lora={}"]),
    (B70, "8x80GB", ["train.parallel=auto"]),
    (B70, "1x24GB", ["model.lora={}", "model.quantization=nf4"]),
]


@pytest.mark.parametrize(("model", "on", "overrides"), DO_NOT_FIT)
def test_each_proposal_runs_and_fits_when_it_is_planned_as_it_is_shown(
    model: ModelFacts, on: str, overrides: list[str]
) -> None:
    found, _, hardware = fitted(model, on, *overrides)
    assert found.lack is not None
    assert found.proposals
    for one in found.proposals:
        words, _, machine = describe(one).partition("--on ")
        there = described_hardware(machine) if machine else hardware
        case = planned(parse_recipe(RECIPE, [*overrides, *words.split()]), there, model, None)
        estimate = case.plan.memory_estimate
        assert estimate is not None and estimate.lack is None, describe(one)
        assert (estimate.gpu, estimate.cpu) == (one.memory.gpu, one.memory.cpu)


@pytest.mark.parametrize(("model", "on", "overrides"), DO_NOT_FIT)
def test_what_changes_the_result_comes_last_and_says_so(model: ModelFacts, on: str, overrides: list[str]) -> None:
    found, _, _ = fitted(model, on, *overrides)
    changes = [any(key in one.values for key in RESULT) for one in found.proposals]
    assert changes == sorted(changes)
    assert [one.result != "none but rounding" for one in found.proposals] == changes
    assert all(one.cost for one in found.proposals)


def shown(model: ModelFacts, on: str, *overrides: str) -> list[str]:
    return [describe(one) for one in fitted(model, on, *overrides)[0].proposals]


def test_the_smallest_change_is_proposed_and_none_that_holds_it() -> None:
    no_checkpointing = ["train.gradient_checkpointing=false", "data.pack_length=32768", "train.deepspeed=zero3"]
    assert shown(B14, "8x80GB", *no_checkpointing)[0] == "train.gradient_checkpointing=true"
    for words in shown(B14, "8x80GB", *no_checkpointing):
        assert words == "train.gradient_checkpointing=true" or "checkpointing" not in words
    assert "train.deepspeed=zero1" in shown(B7, "8xH100-NVL")
    assert shown(B7, "8xH100-NVL")[0].startswith("train.deepspeed=zero1")
    # Adapters fit, so that a base in 4 bits is no smaller change; where there are adapters already, it is.
    assert "model.lora={}" in shown(B3, "1x24GB")
    assert not any("quantization" in words for words in shown(B3, "1x24GB"))
    assert "model.quantization=nf4" in shown(B14, "1x16GB", "model.lora={}")


def test_a_step_of_shorter_packs_holds_as_many_tokens() -> None:
    words = shown(B3, "1x80GB", "train.gradient_checkpointing=false", "data.pack_length=16384", "train.optim=lion")
    shorter = next(one for one in words if "pack_length" in one)
    values = dict(word.split("=") for word in shorter.split())
    assert int(values["data.pack_length"]) * int(values["train.global_batch_size"]) == 16384 * 64


def test_costs_are_by_arithmetic() -> None:
    found, _, _ = fitted(B3, "1x80GB", "train.gradient_checkpointing=false", "data.pack_length=16384")
    costs = {describe(one): one.cost for one in found.proposals}
    # Each layer's forward pass again, but for attention itself.
    body, attention = B3.body_parameters, 6 * 36 * 2048 * 4096
    again = f"{(8 * body + attention) / (6 * body + attention):.2f} x the compute"
    assert costs["train.gradient_checkpointing=selective"] == again
    machines, _, _ = fitted(B14, "4x80GB", "train.deepspeed=zero2")
    costs = {describe(one): one.cost for one in machines.proposals}
    assert "1/2 of the time" in costs["--on 8x80GB"]
    sent = [int(word.replace(",", "")) for word in costs["train.deepspeed=zero3"].split() if word[0].isdigit()]
    # 16 micro-batches of one pack: weights twice and gradients once in each, in bf16; ZeRO-2 gathers once.
    parameters = B14.parameters or 0
    assert sent == [round(16 * 6 * parameters / 1e9), round(17 * 2 * parameters / 1e9)]


def test_zero_1_sends_an_all_reduce_and_the_weights_and_ddp_gradients_in_fp32() -> None:
    cost = next(
        one.cost for one in fitted(B7, "8xH100-NVL")[0].proposals if one.values.get("train.deepspeed") == "zero1"
    )
    sent = [int(word) for word in cost.split() if word.isdigit()]
    assert sent == [round(6 * (B7.parameters or 0) / 1e9), round(8 * (B7.parameters or 0) / 1e9)]


def test_another_machine_has_more_gpus_or_larger_ones() -> None:
    for model, on, overrides in DO_NOT_FIT:
        found, _, hardware = fitted(model, on, *overrides)
        assert hardware.gpu
        for one in found.proposals:
            if one.machine is not None:
                other = described_hardware(one.machine)
                assert other.gpu
                larger = other.gpu.memory_gib > hardware.gpu.memory_gib
                assert larger or other.ranks > hardware.ranks
                assert (other.gpu.name == hardware.gpu.name) is not larger or hardware.gpu.name == "GPU"


def test_what_fits_needs_no_change() -> None:
    found, _, hardware = fitted(B3, "8xH100", "train.parallel=auto")
    assert (found.lack, found.proposals) == (None, ())
    assert found.memory is not None and found.memory.hardware == hardware


def test_a_recipe_that_could_not_run_with_any_memory_is_refused_as_by_the_plan() -> None:
    for parallel in ("auto", "null"):
        with pytest.raises(PlanError, match=r"model\.lora\.r=9999 is more than"):
            fitted(B70, "1x24GB", f"train.parallel={parallel}", "model.lora={r: 9999}")


def test_a_change_is_validated_and_keeps_the_rest() -> None:
    recipe = parse_recipe(RECIPE)
    other = changed(recipe, {"train.fsdp": {}, "model.lora": {}})
    assert other.train.fsdp is not None and other.model.lora is not None
    assert other.train.learning_rate == 1e-5
    assert recipe.train.fsdp is None
    with pytest.raises(ValueError, match="global_batch_size"):
        changed(recipe, {"train.global_batch_size": 0})
