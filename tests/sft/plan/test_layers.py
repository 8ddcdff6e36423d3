"""Which attention runs: of every kind of model, on every kind of machine, one that computes what the model means."""

from dataclasses import replace

import pytest

from sft.errors import PlanError
from sft.hub.model_facts import Architecture, ModelFacts
from sft.plan.hardware import Hardware
from sft.plan.layers import resolve_attention, resolve_kernels
from tests.sft.plan.machines import MakeRecipe, cpu, gpus

PLAIN = Architecture(head_dim=128)
MLA = Architecture(head_dim=192, value_head_dim=128)
CPU, V100, A100, H100 = cpu(), gpus(capability=7.0), gpus(capability=8.0), gpus(capability=9.0)
A100_FLASH, H100_FLASH = gpus(capability=8.0, flash=True), gpus(capability=9.0, flash=True, flash_3=True)
B200_FLASH = gpus(capability=10.0, flash=True, flash_3=True)
FA2, FA3 = "flash_attention_2", "flash_attention_3"
H100_TORCH = replace(H100_FLASH, has_varlen_fa3=True, has_varlen_fa4=True)
A100_TORCH, B200_TORCH = replace(A100, has_varlen_fa3=True), replace(B200_FLASH, has_varlen_fa4=True)
SDPA, EAGER = "auto or sdpa", "auto or eager"  # remedies


@pytest.mark.parametrize(
    ("hardware", "precision", "architecture", "expected", "why"),
    [
        (CPU, "fp32", PLAIN, "varlen", "auto: the first that runs here; packed documents stay apart by their boundaries"),
        (A100, "fp32", PLAIN, "sdpa", "no varlen, FlashAttention does not run in fp32; packed documents stay apart by a block mask"),
        (V100, "fp16", PLAIN, "sdpa", "compute capability 7.0) has no FlashAttention"),
        (A100_FLASH, "bf16", PLAIN, FA2, "auto"),
        (H100_FLASH, "bf16", PLAIN, FA3, "auto"),
        (H100_TORCH, "bf16", PLAIN, "varlen_fa3", "auto"),
        (H100_TORCH, "bf16", Architecture(has_interface=False), FA3, "auto"),
        (B200_TORCH, "bf16", PLAIN, "varlen_fa4", "auto"),
        (B200_TORCH, "bf16", Architecture(head_dim=256), FA2, "auto"),
        (A100, "bf16", MLA, "sdpa", "no kernel for heads of 192 (values 128)"),
        (A100, "bf16", Architecture(dropout=0.1), "sdpa", "no varlen, the model's attention_dropout is 0.1"),
        (H100_FLASH, "bf16", Architecture(dropout=0.1), FA2, "auto"),
        (A100, "bf16", Architecture(has_interface=False), "sdpa", "do not take another attention function"),
        (A100, "bf16", Architecture(mask_only=True), "sdpa", "express by a mask alone what a token sees"),
        (A100_FLASH, "bf16", Architecture(has_flash=False), "varlen", "auto"),
        (A100, "bf16", Architecture(softcap=True), "eager", "cap their attention scores"),
        (A100_FLASH, "bf16", Architecture(sinks=True), "eager", "have attention sinks"),
        (CPU, "fp32", Architecture(has_sdpa=False, has_interface=False), "eager", "no sdpa, models of type some_type have no sdpa"),
    ],
)  # fmt: skip
def test_auto(
    hardware: Hardware, precision: str, architecture: Architecture, expected: str, why: str, make_recipe: MakeRecipe
) -> None:
    found = resolve_attention(make_recipe(), hardware, precision, "some_type", architecture)
    assert (found.value, why in found.reason) == (expected, True), found.reason
    assert found.reason.startswith("auto: ")


@pytest.mark.parametrize("wanted", ["auto", "sdpa", "eager", "varlen"])
def test_recurrent_models_and_masks_that_do_not_follow_documents_are_not_packed(
    wanted: str, make_recipe: MakeRecipe
) -> None:
    recurrent, blind = Architecture(recurrent=True), Architecture(blind_mask=True, has_interface=wanted == "varlen")
    recipe = make_recipe(f"model.attn_implementation={wanted}")
    with pytest.raises(PlanError, match=r"type mamba have recurrent layers.*Set data.packing=false"):
        resolve_attention(recipe, CPU, "fp32", "mamba", recurrent)
    padded = make_recipe("data.packing=false", f"model.attn_implementation={wanted}")
    assert resolve_attention(padded, CPU, "fp32", "mamba", recurrent).value
    if wanted == "varlen":
        assert resolve_attention(recipe, CPU, "fp32", "opt", blind).value == "varlen"
    else:
        with pytest.raises(PlanError, match=r"masks of models of type opt do not follow documents.*data.packing=false"):
            resolve_attention(recipe, CPU, "fp32", "opt", blind)
    assert resolve_attention(padded, CPU, "fp32", "opt", blind).value


def test_before_a_download_an_ordinary_model_is_assumed_and_one_with_its_own_code_takes_no_other_function(
    make_recipe: MakeRecipe,
) -> None:
    assert resolve_attention(make_recipe(), CPU, "fp32", None, None).value == "varlen"
    found = resolve_attention(make_recipe(), CPU, "fp32", "their_own", None)
    assert found.value == "sdpa"
    assert "models of type their_own do not take another attention function" in found.reason


@pytest.mark.parametrize(
    ("wanted", "hardware", "precision", "architecture", "reason", "remedy"),
    [
        ("varlen", CPU, "fp32", Architecture(mask_only=True), "models of type odd express by a mask alone", SDPA),
        ("sdpa", CPU, "fp32", Architecture(sinks=True), "models of type odd have attention sinks", EAGER),
        (FA2, CPU, "fp32", PLAIN, "there is no GPU here", SDPA),
        ("varlen_fa3", H100, "bf16", PLAIN, "it needs the flash-attn 3 package, and a torch that can switch to it", SDPA),
        ("varlen_fa3", A100_TORCH, "bf16", PLAIN, "this GPU (compute capability 8.0) is not a Hopper", SDPA),
        ("varlen_fa4", H100_TORCH, "bf16", PLAIN, "this GPU (compute capability 9.0) is not a B200", SDPA),
        (FA3, H100, "bf16", PLAIN, "the flash-attn 3 package is not installed", SDPA),
        (FA3, H100_FLASH, "bf16", Architecture(dropout=0.1), "the model's attention_dropout is 0.1", SDPA),
        (FA2, A100_FLASH, "bf16", Architecture(head_dim=300), "FlashAttention has no kernel for heads of 300", SDPA),
    ],
)  # fmt: skip
def test_what_does_not_run_is_refused_with_value_reason_and_remedy(
    wanted: str, hardware: Hardware, precision: str, architecture: Architecture, reason: str, remedy: str, make_recipe: MakeRecipe
) -> None:  # fmt: skip
    with pytest.raises(PlanError) as error:
        resolve_attention(make_recipe(f"model.attn_implementation={wanted}"), hardware, precision, "odd", architecture)
    assert str(error.value).startswith(f"model.attn_implementation={wanted}, and {reason}")
    assert str(error.value).endswith(f". Set it to {remedy}.")


@pytest.mark.parametrize(
    ("overrides", "hardware", "has_liger", "expected", "why"),
    [
        ("", H100, True, "liger", "auto: fused norms"),
        ("", H100, False, "none", "auto: Liger has no kernels for models of type some_type"),
        ("", CPU, True, "none", "auto: Liger's kernels do not run on a CPU"),
        ("model.compile=true", H100, True, "none", "auto: with model.compile=true"),
        ("train.tensor_parallel_size=2", gpus(2), True, "none", "auto: with train.tensor_parallel_size=2"),
        ("model.kernels=liger", H100, True, "liger", "the recipe"),
        ("model.kernels=liger", CPU, True, "none", "the recipe asks for liger, whose kernels do not run on a CPU"),
    ],
)
def test_kernels(
    overrides: str, hardware: Hardware, has_liger: bool | None, expected: str, why: str, make_recipe: MakeRecipe
) -> None:
    found = resolve_kernels(
        make_recipe(*overrides.split()), hardware, ModelFacts("m", "some_type", has_liger=has_liger)
    )
    assert (found.value, found.reason.startswith(why)) == (expected, True), found.reason
