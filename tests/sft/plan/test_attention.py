"""Which attention runs: of every kind of model, on every kind of machine, one that computes what the model means."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest

from sft.errors import PlanError
from sft.hub.model_facts import Architecture
from sft.plan.attention import FLASH, choose_attention
from sft.plan.hardware import Gpu, Hardware
from sft.recipe.schema import Recipe

MakeRecipe = Callable[..., Recipe]
PLAIN = Architecture(head_dim=128)
CPU = Hardware(None, 1, 1, 2, 16.0)
H100 = Hardware(Gpu("H100", 80.0, 9.0), 1, 1, 16, 128.0)
A100 = replace(H100, gpu=Gpu("A100", 80.0, 8.0))
V100 = replace(H100, gpu=Gpu("V100", 32.0, 7.0))
B200 = replace(H100, gpu=Gpu("B200", 180.0, 10.0))
FA2, FA3 = "flash_attention_2", "flash_attention_3"
SDPA, EAGER = "auto or sdpa", "auto or eager"  # remedies
MLA = Architecture(head_dim=192, value_head_dim=128)


def with_flash(hardware: Hardware, second: bool = True, third: bool = False) -> Hardware:
    return replace(hardware, has_flash_attention=second, has_flash_attention_3=third)


@pytest.mark.parametrize(
    ("hardware", "precision", "architecture", "expected", "why"),
    [
        (CPU, "fp32", PLAIN, "varlen", "auto: sdpa, document by document; packed documents stay apart by their boundaries"),
        (A100, "bf16", PLAIN, "varlen", "auto: FlashAttention inside torch; packed"),
        (A100, "fp32", PLAIN, "sdpa", "no varlen, FlashAttention does not run in fp32; packed documents stay apart by a block mask"),
        (V100, "fp16", PLAIN, "sdpa", "compute capability 7.0) has no FlashAttention"),
        (with_flash(A100), "bf16", PLAIN, "flash_attention_2", "auto: flash-attn is installed"),
        (with_flash(H100, third=True), "bf16", PLAIN, "flash_attention_3", "auto: flash-attn 3 is installed"),
        (with_flash(B200, third=True), "bf16", PLAIN, "flash_attention_2", "flash-attn is installed"),
        (A100, "bf16", Architecture(head_dim=300), "sdpa", "no kernel for heads of 300 (values 300)"),
        (with_flash(A100), "bf16", Architecture(head_dim=300, dropout=0.1), "sdpa", "attention_dropout is 0.1"),
        (A100, "bf16", MLA, "sdpa", "no kernel for heads of 192 (values 128)"),
        (A100, "bf16", Architecture(dropout=0.1), "sdpa", "no varlen, the model's attention_dropout is 0.1"),
        (with_flash(H100, third=True), "bf16", Architecture(dropout=0.1), "flash_attention_2", "flash-attn is installed"),
        (A100, "bf16", Architecture(has_interface=False), "sdpa", "do not take another attention function"),
        (A100, "bf16", Architecture(mask_only=True), "sdpa", "say by a mask alone what a token sees"),
        (with_flash(A100), "bf16", Architecture(has_flash=False), "varlen", "inside torch"),
        (A100, "bf16", Architecture(softcap=True), "eager", "cap their attention scores, which sdpa cannot"),
        (with_flash(A100), "bf16", Architecture(sinks=True), "eager", "have attention sinks, which sdpa has not"),
        (CPU, "fp32", Architecture(has_sdpa=False, has_interface=False), "eager", "have no sdpa in transformers; packed"),
    ],
)  # fmt: skip
def test_auto(
    hardware: Hardware, precision: str, architecture: Architecture, expected: str, why: str, make_recipe: MakeRecipe
) -> None:
    found = choose_attention(make_recipe(), hardware, precision, "some_type", architecture)
    assert (found.value, why in found.reason) == (expected, True), found.reason
    assert found.reason.startswith("auto: ")


@pytest.mark.parametrize("wanted", ["auto", "sdpa", "eager", "varlen"])
def test_recurrent_models_are_not_packed(wanted: str, make_recipe: MakeRecipe) -> None:
    recurrent = Architecture(recurrent=True)
    with pytest.raises(PlanError) as error:
        choose_attention(make_recipe(f"model.attn_implementation={wanted}"), CPU, "fp32", "mamba", recurrent)
    assert str(error.value) == (
        "data.packing=true, and models of type mamba have recurrent layers, which carry their state from one packed document into "
        "the next. Set data.packing=false."
    )
    padded = make_recipe("data.packing=false", f"model.attn_implementation={wanted}")
    assert choose_attention(padded, CPU, "fp32", "mamba", recurrent).value


@pytest.mark.parametrize("wanted", ["auto", "sdpa", "eager"])
def test_models_whose_masks_do_not_follow_documents_are_not_packed_by_a_mask(
    wanted: str, make_recipe: MakeRecipe
) -> None:
    blind, function = Architecture(blind_mask=True, has_interface=False), "eager" if wanted == "eager" else "sdpa"
    recipe = make_recipe(f"model.attn_implementation={wanted}")
    with pytest.raises(PlanError) as error:
        choose_attention(recipe, CPU, "fp32", "opt", blind)
    assert str(error.value) == (
        "data.packing=true, and the masks of models of type opt do not follow documents: with "
        f"{function} they would see each other. Set data.packing=false."
    )
    padded = make_recipe("data.packing=false", f"model.attn_implementation={wanted}")
    assert choose_attention(padded, CPU, "fp32", "opt", blind).value == function
    assert choose_attention(make_recipe(), CPU, "fp32", "opt", Architecture(blind_mask=True)).value == "varlen"


def test_before_a_download_an_ordinary_model_is_assumed_and_one_with_its_own_code_takes_no_other_function(
    make_recipe: MakeRecipe,
) -> None:
    assert choose_attention(make_recipe(), CPU, "fp32", None, None).value == "varlen"
    found = choose_attention(make_recipe(), CPU, "fp32", "their_own", None)
    assert found.value == "sdpa"
    assert "models of type their_own do not take another attention function" in found.reason


@pytest.mark.parametrize(
    ("wanted", "hardware", "precision", "architecture", "reason", "remedy"),
    [
        ("varlen", CPU, "fp32", Architecture(has_interface=False), "THEY do not take another attention function", SDPA),
        ("varlen", CPU, "fp32", Architecture(mask_only=True), "THEY say by a mask alone what a token sees", SDPA),
        ("varlen", CPU, "fp32", Architecture(softcap=True), "THEY cap their attention scores, which sdpa cannot", EAGER),
        ("varlen", A100, "fp32", PLAIN, "FlashAttention does not run in fp32", SDPA),
        ("varlen", A100, "bf16", MLA, "FlashAttention has no kernel for heads of 192 (values 128)", SDPA),
        ("sdpa", CPU, "fp32", Architecture(sinks=True), "THEY have attention sinks, which sdpa has not", EAGER),
        (FA2, CPU, "fp32", PLAIN, "there is no GPU here", SDPA),
        (FA2, A100, "bf16", PLAIN, "the flash-attn package is not installed", SDPA),
        (FA3, with_flash(H100), "bf16", PLAIN, "the flash-attn 3 package is not installed", SDPA),
        (FA3, with_flash(A100, third=True), "bf16", PLAIN, "THIS (compute capability 8.0) is not one: it runs on Hopper only", SDPA),
        (FA3, with_flash(H100, third=True), "bf16", Architecture(dropout=0.1), "DROPS is 0.1, which it would leave out", SDPA),
        (FA2, with_flash(A100), "bf16", Architecture(sinks=True), "THEY have attention sinks, which it has not", EAGER),
        (FA2, with_flash(A100), "bf16", Architecture(head_dim=300), "it has no kernel for heads of 300", SDPA),
    ],
)  # fmt: skip
def test_what_does_not_run_is_refused_with_value_reason_and_remedy(
    wanted: str,
    hardware: Hardware,
    precision: str,
    architecture: Architecture,
    reason: str,
    remedy: str,
    make_recipe: MakeRecipe,
) -> None:
    with pytest.raises(PlanError) as error:
        choose_attention(make_recipe(f"model.attn_implementation={wanted}"), hardware, precision, "odd", architecture)
    reason = (
        reason.replace("DROPS", "the model's attention_dropout")
        .replace("THEY", "models of type odd")
        .replace("THIS", "this GPU")
    )
    assert str(error.value) == f"model.attn_implementation={wanted}, and {reason}. Set it to {remedy}."


def test_a_remedy_is_never_refused_itself(make_recipe: MakeRecipe) -> None:
    """Over all kinds of models and machines."""
    machines = [CPU, V100, A100, B200, with_flash(A100), with_flash(H100, third=True)]
    flags = [
        Architecture(*values, dropout=dropout) for values in product([True, False], repeat=6) for dropout in (0.0, 0.1)
    ]
    asked = {
        name: make_recipe(f"model.attn_implementation={name}") for name in ("auto", "eager", "sdpa", "varlen", *FLASH)
    }
    refused = 0
    for hardware, precision, architecture, wanted in product(machines, ("fp32", "bf16"), flags, asked):
        try:
            choose_attention(asked[wanted], hardware, precision, "odd", architecture)
        except PlanError as error:
            refused += 1
            remedies = re.search(r"Set it to (\w+) or (\w+)\.$", str(error))
            assert remedies, error
            for remedy in remedies.groups():
                choose_attention(asked[remedy], hardware, precision, "odd", architecture)
    assert refused > 1000
