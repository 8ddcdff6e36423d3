"""What is proposed is planned again here, from the words that are shown; and who changes the result stands behind who does not."""

from dataclasses import replace

import pytest

from sft.errors import PlanError
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


B3, B7, B14, B70 = (replace(one, linear_parameters=one.body_parameters) for one in MODELS.values())


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
def test_each_proposal_fits_as_it_is_shown_and_what_changes_the_result_comes_last(
    model: ModelFacts, on: str, overrides: list[str]
) -> None:
    found, _, hardware = fitted(model, on, *overrides)
    assert found.lack is not None
    assert found.proposals
    for one in found.proposals:
        words, _, machine = describe(one).partition("--on ")
        there = described_hardware(machine) if machine else hardware
        assert there.ranks > hardware.ranks or not machine
        case = planned(parse_recipe(RECIPE, [*overrides, *words.split()]), there, model, None)
        estimate = case.plan.memory_estimate
        assert estimate is not None and estimate.lack is None, describe(one)
        assert (estimate.gpu, estimate.cpu) == (one.memory.gpu, one.memory.cpu)
        assert one.cost
    changes = [any(key in describe(one) for key in RESULT) for one in found.proposals]
    assert changes == sorted(changes)
    assert [one.result != "none but rounding" for one in found.proposals] == changes


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


def test_what_fits_needs_no_change() -> None:
    found, _, hardware = fitted(B3, "8xH100", "train.parallel=auto")
    assert (found.lack, found.proposals) == (None, ())
    assert found.memory is not None and found.memory.hardware == hardware


def test_a_recipe_that_could_not_run_with_any_memory_is_refused_as_by_the_plan() -> None:
    for parallel in ("auto", "null"):
        with pytest.raises(PlanError, match=r"data\.max_length=99999 is more than"):
            fitted(B70, "1x24GB", f"train.parallel={parallel}", "data.max_length=99999")


def test_a_change_is_validated_and_keeps_the_rest() -> None:
    recipe = parse_recipe(RECIPE)
    other = changed(recipe, ["train.fsdp={}", "model.lora={}"])
    assert other.train.fsdp is not None and other.model.lora is not None
    assert other.train.learning_rate == 1e-5
    assert recipe.train.fsdp is None
    with pytest.raises(ValueError, match="global_batch_size"):
        changed(recipe, ["train.global_batch_size=0"])
