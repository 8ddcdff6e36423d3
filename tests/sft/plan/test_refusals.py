"""Each reason why a recipe cannot run on a machine, known before anything is loaded."""

import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sft.errors import PlanError
from sft.hub.model_facts import PER_LAYER, Architecture, ModelFacts
from sft.plan.case import Case
from sft.plan.deepspeed import DeepSpeedFile, load_deepspeed
from sft.plan.hardware import Hardware
from sft.plan.plan import Decision
from sft.plan.refusals import refuse
from sft.plan.resolve import resolve_plan
from tests.sft.plan.machines import QWEN, MakeRecipe, cpu, gpus

LLAMA = ModelFacts(
    "model",
    "llama",
    num_attention_heads=32,
    num_key_value_heads=8,
    intermediate_size=11008,
    architecture=Architecture(head_dim=128, tensor_plan=frozenset({"colwise", "rowwise"})),
)


def zero(stage: int, **settings: Any) -> DeepSpeedFile:
    return DeepSpeedFile(Path(f"zero{stage}.json"), {"zero_optimization": {"stage": stage} | settings})


def limit(positions: int) -> dict[str, Any]:
    return {"model": ModelFacts("m", max_position_embeddings=positions)}


def architecture(**changes: Any) -> dict[str, Any]:
    return {"model": replace(LLAMA, architecture=Architecture(**changes))}


def check(make_recipe: MakeRecipe, overrides: str, hardware: Hardware, **changes: Any) -> None:
    """Refuse what cannot run over Llama, with these decisions in the plan."""
    decided = {
        "precision": "fp32",
        "attention": "sdpa",
        "kernels": "none",
        "micro_batch_size": 1,
        "learning_rate": 1e-5,
    }
    decided |= {name: changes.pop(name) for name in decided if name in changes}
    any_plan = resolve_plan(make_recipe("train.remainder=fill"), hardware, QWEN)
    plan = replace(any_plan, **{name: Decision(value, "") for name, value in decided.items()})
    case = {"recipe": make_recipe(*overrides.split()), "hardware": hardware, "model": LLAMA, "deepspeed": None}
    refuse(Case(**(case | changes), plan=plan))


def rope(kind: str | None) -> dict[str, Any]:
    return {"model": replace(LLAMA, rope_type=kind, max_position_embeddings=1024)}


def architecture_of_its_own() -> dict[str, Any]:
    return {"model": replace(LLAMA, rope_type="default", max_position_embeddings=1024, architecture=None)}


YARN = "model.rope_scaling.rope_type=yarn model.rope_scaling.factor=4.0"
Z2: dict[str, Any] = {"deepspeed": zero(2)}
WINDOW = {"model": replace(LLAMA, sliding_window=16)}
TENSOR = "train.tensor_parallel_size="
QLORA = "model.lora={} model.quantization="
SEQUENCE = "train.deepspeed=zero2 data.packing=false train.sequence_parallel_size="


@pytest.mark.parametrize(
    ("overrides", "hardware", "changes", "message"),
    [
        (TENSOR + "2", cpu(2), {}, None),
        (TENSOR + "2", gpus(2), {}, None),
        (TENSOR + "2", cpu(4), {}, "there are 4 ranks.*Start 2 ranks, set the size to 4"),
        (TENSOR + "2 model.kernels=liger", gpus(2), {"kernels": "liger"}, "model.kernels=liger, and with train.tensor_parallel_size=2"),
        ("model.kernels=liger", gpus(), {"model": replace(LLAMA, has_liger=False)}, "has no kernels for models of type llama. Set"),
        ("model.kernels=liger", cpu(), {"model": replace(LLAMA, has_liger=False)}, None),
        ("model.compile=true model.kernels=liger", gpus(2), {"kernels": "liger"}, "model.compile=true.*untested. Set model.kernels=auto"),
        (TENSOR + "16", cpu(16), {}, "must divide .*, and does not divide 8"),
        (TENSOR + "2", cpu(2), architecture(), "transformers has no tested plan"),
        (TENSOR + "2", cpu(2), architecture(tensor_plan=frozenset({"moe_tp_experts"})), "transformers has no tested plan"),
        (TENSOR + "4", cpu(4, per_node=2), {}, "a node has 2 ranks"),
        (SEQUENCE + "2", cpu(4, per_node=2), Z2, None),
        (SEQUENCE + "4", cpu(4, per_node=2), Z2, "a node has 2 ranks"),
        (SEQUENCE + "2", cpu(6), {"deepspeed": zero(1)}, "Set train.deepspeed=zero2 or zero3"),
        (SEQUENCE + "2", cpu(6), {"deepspeed": zero(2, reduce_scatter=False)}, "remove reduce_scatter from zero2.json"),
        (SEQUENCE + "3", cpu(6), Z2, "does not divide the model's 32 attention heads"),
        (SEQUENCE + "2", cpu(6), Z2 | {"model": replace(LLAMA, num_key_value_heads=3)}, "3 key and value heads"),
        (SEQUENCE + "2", cpu(6), Z2 | {"attention": "eager"}, "eager needs a mask.*Set model.attn_implementation=auto"),
        (SEQUENCE + "2", cpu(6), Z2 | architecture(recurrent=True), "cannot exchange tokens"),
        (SEQUENCE + "2", cpu(6), Z2 | WINDOW, "sees 16 tokens.*max_length to at most 16"),
        (SEQUENCE + "2 data.packing=true", cpu(2), Z2, "sdpa needs a mask"),
        (SEQUENCE + "2 data.packing=true", cpu(2), Z2 | {"attention": "varlen", "micro_batch_size": 2}, r"Set it to 1"),
        (SEQUENCE + "2 data.packing=true", cpu(2), Z2 | {"attention": "varlen"} | WINDOW, None),
        ("train.fsdp.sharding_strategy=hybrid_shard", gpus(6, 4), {}, "6 processes, 4 on this node"),
        (QLORA + "nf4 train.fsdp={}", gpus(2), {}, None),
        (QLORA + "nf4", replace(gpus(), has_bitsandbytes=False), {}, "pip install .*qlora.*Or set model.quantization=null"),
        (QLORA + "int8", gpus(2), Z2, None),
        (QLORA + "nf4", gpus(), {"model": replace(LLAMA, quantization="fp8")}, "is stored quantized .fp8.*Name the model"),
        ("model.lora={}", gpus(), {"model": replace(LLAMA, quantization="bitsandbytes")}, "is stored quantized .bitsa"),
        ("model.lora={}", gpus(), {"model": replace(LLAMA, quantization="mxfp4")}, None),
        (QLORA + "nf4", gpus(), {"model": replace(LLAMA, parameters=100, linear_parameters=49)}, "49 of this model's 100"),
        ("model.lora.modules_to_save=[norm] model.lora.use_dora=true", gpus(2), Z2, None),
        ("train.gradient_checkpointing=offload", cpu(), {}, "there is no GPU here. Set it to true or auto"),
        ("train.weight_decay=1000", gpus(), {"learning_rate": 1e-3}, "train.weight_decay=1000 x learning rate 0.001"),
        ("data.max_length=1024", cpu(), limit(1024), None),
        ("data.max_length=1025", cpu(), limit(1024), "the model's 1024 positions. Set it to at most 1024, or extend"),
        (YARN + " data.max_length=4096", cpu(), rope("default"), None),
        (YARN + " data.max_length=4097", cpu(), rope("default"), "the model's 4096 positions. Set it to at most 4096"),
        (YARN, cpu(), rope(None), "type llama have no rotary positions"),
        (YARN, cpu(), rope(PER_LAYER), "others in each kind of layer"),
        (YARN, cpu(), rope("llama3"), "1024 positions are already scaled .llama3.*original_max_position_embeddings"),
        (YARN + " model.rope_scaling.original_max_position_embeddings=512", cpu(), rope("llama3"), None),
        (YARN, cpu(), rope("default") | architecture_of_its_own(), "code of their own"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused_with_value_and_remedy(
    overrides: str, hardware: Hardware, changes: dict[str, Any], message: str | None, make_recipe: MakeRecipe
) -> None:
    with pytest.raises(PlanError, match=message) if message else nullcontext():
        check(make_recipe, overrides, hardware, **changes)


Z3: dict[str, Any] = {"deepspeed": zero(3)}
NVME = {"deepspeed": zero(3, offload_optimizer={"device": "nvme", "nvme_path": "x"})}


@pytest.mark.parametrize(
    ("overrides", "ranks", "changes", "pair"),
    [
        (TENSOR + "2", 2, {"precision": "fp16"}, "train.tensor_parallel_size=2 with train.precision=fp16"),
        (TENSOR + "2 model.lora={}", 2, {}, "train.tensor_parallel_size=2 with model.lora"),
        (TENSOR + "2 train.neftune_noise_alpha=5", 2, {}, "train.tensor_parallel_size=2 with train.neftune_noise_alpha"),
        (TENSOR + "2 train.parallel=auto train.sequence_parallel_size=2", 4, {}, "with train.sequence_parallel_size=2"),
        (SEQUENCE + "2 model.compile=true", 2, Z2, "train.sequence_parallel_size=2 with model.compile=true"),
        (TENSOR + "2 eval.every_steps=5 eval.tasks=[a]", 2, {}, "eval.every_steps with train.tensor_parallel_size=2"),
        (SEQUENCE + "2 train.trainer_args.loss_type=dft", 2, Z2, "with train.trainer_args.loss_type"),
        ("train.label_smoothing_factor=0.1 train.trainer_args.loss_type=dft", 1, {}, "train.label_smoothing_factor with"),
        ("train.fsdp={} model.lora={} model.new_tokens=['<|a|>']", 2, {}, "train.fsdp with model.new_tokens and model.lora"),
        (QLORA + "nf4 model.compile=true", 1, {}, "model.quantization=nf4 with model.compile=true"),
        (QLORA + "int8", 2, Z3, "train.deepspeed=zero3.json with model.quantization=int8"),
        (QLORA + "int8 model.lora.use_dora=true", 1, {}, "model.quantization=int8 with model.lora.use_dora=true"),
        (QLORA + "nf4 model.lora.init_lora_weights=olora", 1, {}, "with model.lora.init_lora_weights=olora"),
        ("model.lora.modules_to_save=[norm]", 2, Z3, "train.deepspeed=zero3.json with model.lora.modules_to_save"),
        ("model.lora={} model.freeze=[embed]", 1, {}, "model.freeze with model.lora"),
        ("model.compile=true", 2, Z3, "train.deepspeed=zero3.json with model.compile=true"),
        ("train.gradient_checkpointing=selective", 1, {"attention": "eager"}, "with model.attn_implementation=eager"),
        ("train.gradient_checkpointing=selective model.lora={}", 2, Z3, "with train.gradient_checkpointing=selective and model.lora"),
        ("train.load_best_model_at_end=true data.held_out=0.1", 2, NVME, "zero3.json with train.load_best_model_at_end=true"),
        ("train.load_best_model_at_end=true data.held_out=0.1", 2, {"deepspeed": zero(0)}, "without ZeRO with train.load_best_"),
    ],
)  # fmt: skip
def test_what_was_never_tried_together_is_refused_by_both_keys(
    overrides: str, ranks: int, changes: dict[str, Any], pair: str, make_recipe: MakeRecipe
) -> None:
    with pytest.raises(PlanError, match=re.escape(pair) + ".* does not work, or is untested"):
        check(make_recipe, overrides, gpus(ranks), **changes)


@pytest.mark.parametrize(
    ("wanted", "hardware", "remedy"),
    [
        ("fp16", cpu(), "Set train.precision=fp32 or auto"),
        ("fp16", gpus(capability=8.0), "Set train.precision=bf16"),
        ("bf16", gpus(capability=7.0), "Set train.precision=auto"),
    ],
)
def test_a_precision_that_cannot_be_had_names_one_that_can(
    wanted: str, hardware: Hardware, remedy: str, make_recipe: MakeRecipe
) -> None:
    with pytest.raises(PlanError, match=f"train.precision={wanted}.*{remedy}"):
        resolve_plan(make_recipe(f"train.precision={wanted}"), hardware, ModelFacts("some/model", dtype="bfloat16"))


def test_a_plan_refuses_with_every_problem_a_line(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe("train.deepspeed=zero3", "model.compile=true", "model.kernels=none", "data.max_length=40000")
    with pytest.raises(PlanError) as error:
        resolve_plan(recipe, gpus(2), QWEN, deepspeed=load_deepspeed("zero3"))
    first, second = str(error.value).splitlines()
    assert "zero3.json with model.compile=true" in first and "32768 positions" in second
