"""Which ranks share layers or sequences, and each reason why they cannot, known before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sft.errors import PlanError
from sft.hub.model_facts import Architecture, ModelFacts
from sft.plan.deepspeed import DeepSpeedFile
from sft.plan.hardware import Gpu, Hardware
from sft.plan.parallelism import (
    mesh_shape,
    resolve_fsdp,
    resolve_sequence_parallel,
    resolve_tensor_parallel,
)
from sft.plan.plan import Plan, resolve_plan
from sft.recipe.schema import Recipe

LLAMA = ModelFacts(
    "model",
    "llama",
    num_attention_heads=32,
    num_key_value_heads=8,
    intermediate_size=11008,
    architecture=Architecture(head_dim=128, tensor_plan=frozenset({"colwise", "rowwise"})),
)
Make = Callable[..., Recipe]


def cpu(ranks: int, per_node: int | None = None) -> Hardware:
    return Hardware(None, ranks, per_node or ranks, 2, 16.0)


def zero(stage: int) -> DeepSpeedFile:
    return DeepSpeedFile(Path(f"zero{stage}.json"), {"zero_optimization": {"stage": stage}})


def tensor(
    recipe: Recipe,
    hardware: Hardware,
    model: ModelFacts = LLAMA,
    deepspeed: DeepSpeedFile | None = None,
    kernels: str = "none",
    precision: str = "fp32",
) -> int:
    return resolve_tensor_parallel(recipe, hardware, model, deepspeed, kernels, precision).value


def sequence(
    recipe: Recipe,
    hardware: Hardware,
    model: ModelFacts = LLAMA,
    stage: int | None = 2,
    attention: str = "sdpa",
    micro: int = 1,
) -> int:
    deepspeed = None if stage is None else zero(stage)
    return resolve_sequence_parallel(recipe, hardware, model, deepspeed, attention, micro).value


def sizes(tensor: int = 1, sequence: int = 1) -> list[str]:
    engine = ["train.deepspeed=zero2"] if sequence > 1 else []
    return [f"train.tensor_parallel_size={tensor}", f"train.sequence_parallel_size={sequence}", *engine]


@pytest.mark.parametrize(
    ("size", "ranks", "changes", "message"),
    [
        (2, 4, {}, "there are 4 ranks.*Start 2 ranks, set the size to 4"),
        (2, 2, {"deepspeed": zero(2)}, "zero2.json is DeepSpeed's.*Set train.deepspeed and train.parallel to null"),
        (2, 2, {"kernels": "liger"}, "model.kernels=liger .set model.kernels=none"),
        (2, 2, {"precision": "fp16"}, "train.precision=fp16 .set train.precision=bf16 or fp32"),
        (16, 16, {}, "does not divide the model's 8 key and value heads. Set it to 2, 4, 8"),
        (3, 3, {}, "32 attention heads and 8 key and value heads and 11008 feed-forward units. Set it to 2, 4, 8"),
        (2, 2, {"model": replace(LLAMA, architecture=Architecture())}, "transformers has no plan"),
        (2, 2, {"model": replace(LLAMA, architecture=Architecture(tensor_plan=frozenset({"moe_tp_experts"})))}, "moe_tp"),
        (2, 2, {"model": replace(LLAMA, architecture=None)}, "transformers has no plan"),
    ],
)  # fmt: skip
def test_what_tensor_parallelism_cannot_do_is_refused(
    size: int, ranks: int, changes: dict[str, Any], message: str, make_recipe: Make
) -> None:
    with pytest.raises(PlanError, match=rf"train.tensor_parallel_size={size}.*{message}"):
        tensor(make_recipe(*sizes(size)), cpu(ranks), **changes)


@pytest.mark.parametrize(
    ("override", "name"),
    [
        ("model.lora={}", "model.lora"),
        ("model.compile=true", "model.compile"),
        ("model.new_tokens=[<x>]", "new_tokens"),
    ],
)
def test_what_is_untested_over_divided_layers_is_refused(override: str, name: str, make_recipe: Make) -> None:
    with pytest.raises(PlanError, match=f"is untested, with .*{name}"):
        tensor(make_recipe(*sizes(2), override), cpu(2))


def test_a_group_over_machines_is_refused(make_recipe: Make) -> None:
    with pytest.raises(PlanError, match="a machine has 2 ranks"):
        tensor(make_recipe(*sizes(4)), cpu(4, per_node=2))
    with pytest.raises(PlanError, match="a machine has 2 ranks"):
        sequence(make_recipe(*sizes(1, 4)), cpu(4, per_node=2), attention="varlen")
    assert sequence(make_recipe(*sizes(1, 2)), cpu(4, per_node=2), attention="varlen") == 2


@pytest.mark.parametrize(
    ("size", "changes", "message"),
    [
        (2, {"stage": None}, "train.deepspeed is not set. Set train.deepspeed=zero2 or zero3"),
        (2, {"stage": 1}, "zero1.json is ZeRO-1"),
        (3, {}, "does not divide the model's 32 attention heads. Set it to 2, 4, 8, 16, 32"),
        (2, {"model": replace(LLAMA, num_key_value_heads=3)}, "3 key and value heads"),
        (2, {"attention": "eager"}, "Set model.attn_implementation=sdpa"),
        (2, {"model": replace(LLAMA, architecture=Architecture(recurrent=True))}, "carry a state"),
        (2, {"model": replace(LLAMA, sliding_window=16)}, "sees 16 tokens back.*data.max_length to at most 16"),
    ],
)
def test_what_sequence_parallelism_cannot_do_is_refused(
    size: int, changes: dict[str, Any], message: str, make_recipe: Make
) -> None:
    recipe = make_recipe(*sizes(1, size), "data.packing=false")
    with pytest.raises(PlanError, match=rf"train.sequence_parallel_size={size}.*{message}"):
        sequence(recipe, cpu(6), **changes)


def test_packs_are_shared_one_at_a_time_and_never_through_a_mask(make_recipe: Make) -> None:
    recipe = make_recipe(*sizes(1, 2), "data.packing=true")
    assert sequence(recipe, cpu(2), attention="varlen") == 2
    assert sequence(recipe, cpu(2), replace(LLAMA, sliding_window=16), attention="varlen") == 2
    with pytest.raises(PlanError, match=r"micro_batch_size is 2\. Set it to 1"):
        sequence(recipe, cpu(2), attention="varlen", micro=2)
    with pytest.raises(PlanError, match="sdpa keeps packed documents apart by a mask"):
        sequence(recipe, cpu(2), attention="sdpa")


QWEN = ModelFacts("some/model", "qwen2", "bfloat16", 32768)


def gpus(ranks: int, per_node: int | None = None) -> Hardware:
    return Hardware(Gpu("NVIDIA Test", 80.0, 9.0), ranks, per_node or min(ranks, 8), 16, 128.0)


def plan_of(recipe: Recipe, hardware: Hardware) -> Plan:
    return resolve_plan(recipe, hardware, QWEN)


def test_the_engine_and_what_the_weights_are_kept_in_follow_from_the_section(make_recipe: Make) -> None:
    recipe = make_recipe("train.fsdp={sharding_strategy: shard_grad_op, offload_params: true}")
    plan = plan_of(recipe, gpus(4))
    assert plan.engine.value == "FSDP2"
    assert plan.engine.reason == (
        "train.fsdp, shard_grad_op: shared by 4 ranks; wraps decoder layers, offloaded to the machine's memory"
    )
    assert (plan.precision.value, plan.weights.value, plan.gradients.value) == ("bf16", "fp32", "fp32")


@pytest.mark.parametrize(
    ("strategy", "ranks", "per_node", "mesh"),
    [
        ("full_shard", 16, 8, (1, 16)),
        ("shard_grad_op", 4, 4, (1, 4)),
        ("hybrid_shard", 16, 8, (2, 8)),
        ("hybrid_shard", 8, 8, (1, 8)),
        ("hybrid_shard", 12, 4, (3, 4)),
    ],
)
def test_copies_times_shards_are_the_ranks_and_hybrid_shares_within_a_machine(
    strategy: str, ranks: int, per_node: int, mesh: tuple[int, int], make_recipe: Make
) -> None:
    recipe = make_recipe(f"train.fsdp={{sharding_strategy: {strategy}}}", "train.global_batch_size=48")
    hardware = gpus(ranks, per_node)
    fsdp = resolve_fsdp(recipe, hardware)
    assert fsdp is not None
    assert mesh_shape(fsdp, hardware) == mesh
    assert mesh[0] * mesh[1] == ranks
    assert f"shared by {mesh[1]} ranks" in plan_of(recipe, hardware).engine.reason


HYBRID = ["train.fsdp={sharding_strategy: hybrid_shard}", "train.global_batch_size=48"]


@pytest.mark.parametrize(
    ("overrides", "hardware", "message"),
    [
        (HYBRID, gpus(6, 4), "6 processes are no multiple of the 4"),
        (HYBRID, gpus(2, 1), "there is one process on each"),
        (["train.fsdp={}", "train.precision=fp16"], gpus(2), "train.deepspeed=zero3"),
        (["train.fsdp={}", "model.lora={}", "model.new_tokens=['<|a|>']"], gpus(2), "train.deepspeed=zero2"),
        (["train.fsdp={}", "train.tensor_parallel_size=2"], gpus(4), "set both sizes to 1"),
    ],
)
def test_what_it_cannot_do_here_is_refused_with_what_can(
    overrides: list[str], hardware: Hardware, message: str, make_recipe: Make
) -> None:
    model = ModelFacts("some/model", "qwen2", "float16", 32768)
    with pytest.raises(PlanError, match=message):
        resolve_plan(make_recipe(*overrides), hardware, model)
