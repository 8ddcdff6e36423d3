"""Hours, energy and money against hand arithmetic, and what is not known said instead."""

from dataclasses import replace
from typing import Any

import pytest

from sft.data.facts import DataFacts
from sft.errors import PlanError
from sft.hub.flops import AttentionLayers, Matmuls, ModelFlops
from sft.hub.model_facts import ModelFacts
from sft.plan.case import Case
from sft.plan.engine import open_deepspeed
from sft.plan.hardware import Gpu, Hardware, described_hardware
from sft.plan.resolve import resolve_plan
from sft.plan.time import check_price, cost_line, estimate_time, resolve_time, time_json
from tests.sft.plan.machines import QWEN, MakeRecipe, cpu

BODY, HEAD, LAYERS, CHANNELS, WIDTHS = 10**9, 10**8, 10, 1000, 10**6
FLOPS = ModelFlops(Matmuls(BODY, 0, HEAD, 0), (AttentionLayers(LAYERS, CHANNELS),))
MODEL = replace(QWEN, parameters=BODY + HEAD, flops=FLOPS, linear_widths=WIDTHS)
# 1,000 documents of 100 tokens, and one of 28,000.
DATA = DataFacts(1001, 128_000, 50_000, 1000, squared_lengths=1000 * 100**2 + 28_000**2, exact=True)
H100 = described_hardware("8xH100")
OFF = "train.gradient_checkpointing=false"


def case(recipe: Any, hardware: Hardware = H100, model: ModelFacts = MODEL, data: DataFacts | None = DATA) -> Case:
    file = open_deepspeed(recipe, hardware, model)
    return Case(recipe, hardware, model, file, resolve_plan(recipe, hardware, model, data, file), data)


def seconds(found: Case) -> float:
    """At the guess's lower end of speed."""
    estimate = estimate_time(found)
    assert not isinstance(estimate, str), estimate
    return estimate.hours[1] * 3600 * 0.3 * 8 * 989e12


BODY_WORK, HEAD_WORK = 6 * BODY * 128_000, 6 * HEAD * 50_000
ATTENTION = 12 * LAYERS * CHANNELS * (1000 * 100**2 + 28_000**2) / 2


@pytest.mark.parametrize(
    ("overrides", "flops"),
    [
        ([OFF], BODY_WORK + HEAD_WORK + ATTENTION),
        (["train.gradient_checkpointing=true"], BODY_WORK * 4 / 3 + HEAD_WORK + ATTENTION * 4 / 3),
        (["train.gradient_checkpointing=selective"], BODY_WORK * 4 / 3 + HEAD_WORK + ATTENTION),
        (["train.gradient_checkpointing=2"], BODY_WORK * 7 / 6 + HEAD_WORK + ATTENTION * 7 / 6),
        ([OFF, "train.num_train_epochs=3"], 3 * (BODY_WORK + HEAD_WORK + ATTENTION)),
        ([OFF, "train.max_steps=250"], 250 * 8 / 1000 * (BODY_WORK + HEAD_WORK + ATTENTION)),
        # A frozen weight takes 4; an adapter of rank 16 has 16 numbers for each input and output.
        ([OFF, "model.lora={r: 16}"], (4 * BODY + 6 * 16 * WIDTHS) * 128_000 + HEAD_WORK * 4 / 6 + ATTENTION),
    ],
)
def test_the_time_is_that_of_the_flops_with_what_is_recomputed(
    overrides: list[str], flops: float, make_recipe: MakeRecipe
) -> None:
    planned = case(make_recipe("train.global_batch_size=8", *overrides))
    assert seconds(planned) == pytest.approx(flops, rel=1e-3)


def test_hours_energy_and_money_follow_from_each_other_and_the_guess_is_named(make_recipe: MakeRecipe) -> None:
    planned = case(make_recipe("train.global_batch_size=8", "train.num_train_epochs=5000"))
    found = time_json(planned, 2.5)
    assert found["hours"][1] / found["hours"][0] == pytest.approx(0.5 / 0.3)
    assert found["gpu_hours"] == pytest.approx([8 * one for one in found["hours"]])
    assert found["kwh"] == pytest.approx([0.7 * one for one in found["gpu_hours"]])
    assert found["cost"] == pytest.approx([2.5 * one for one in found["gpu_hours"]])
    assert "cost" not in time_json(planned, None)
    assert (found["tokens"], found["target_tokens"]) == (5000 * 128_000, 5000 * 50_000)
    assert "a guess" in resolve_time(planned).reason
    assert "a guess" in cost_line(planned, 2.5)


@pytest.mark.parametrize(
    ("hardware", "overrides", "words"),
    [
        (cpu(), [], "on a CPU no time is planned"),
        (described_hardware("8x80GB"), [], "such as 8xH100"),
        (Hardware(Gpu("Tesla P100", 16.0, 6.0), 1, 1, 4, 32.0), [], "Tesla P100"),
        (H100, ["train.precision=fp32"], "compute in fp32"),
        (H100, ["train.deepspeed=zero2_offload"], "offload"),
    ],
)
def test_what_is_not_known_is_said_and_not_guessed(
    hardware: Hardware, overrides: list[str], words: str, make_recipe: MakeRecipe
) -> None:
    planned = case(make_recipe("train.global_batch_size=8", *overrides), hardware)
    decision = resolve_time(planned)
    assert (decision.value, words in decision.reason) == (None, True)
    assert words in cost_line(planned, 2.5)
    assert words in time_json(planned, 2.5)["why"]


@pytest.mark.parametrize("price", [0.0, float("nan")])
def test_what_is_no_price_is_refused(price: float) -> None:
    with pytest.raises(PlanError, match=r"--price .*2\.5"):
        check_price(price)
