"""What each engine needs, against other people's arithmetic; and the cheapest that fits, for real models."""

from dataclasses import replace
from typing import Any

import pytest

from sft.errors import PlanError
from sft.hub.model_facts import ModelFacts
from sft.plan.deepspeed import load_deepspeed
from sft.plan.engine import choose_engine, open_deepspeed
from sft.plan.hardware import Gpu, Hardware, described_hardware, machine
from sft.plan.memory import CPU_FACTOR, estimate_memory
from sft.plan.parallelism import mesh_shape, resolve_fsdp
from sft.plan.resolve import resolve_plan
from sft.recipe.schema import Recipe
from tests.sft.plan.machines import MODELS, QWEN, MakeRecipe, cpu, gpus, needs

AUTO = "train.parallel=auto"
LONG = (AUTO, "train.global_batch_size=64", "data.max_length=4096")
THREE_MICRO_BATCHES = ["train.global_batch_size=48", "train.micro_batch_size=2"]
STATES = ("weights", "gradients", "optimizer")
QWEN_3B, QWEN_7B = MODELS["Qwen/Qwen2.5-3B"], MODELS["Qwen/Qwen2.5-7B"]


@pytest.mark.parametrize(
    ("hardware", "model", "overrides", "engine"),
    [
        (gpus(1), QWEN_3B, [], "one process"),
        (gpus(8), QWEN_7B, [], "ZeRO-2"),  # (2 + 16/8) x 7.6e9 = 28 GiB, and buffers
        (gpus(8, memory=94), QWEN_7B, THREE_MICRO_BATCHES, "ZeRO-1"),  # which send 6, not 8 bytes
        (gpus(8, memory=40), QWEN_7B, THREE_MICRO_BATCHES, "ZeRO-2"),  # 67 GiB do not fit
        (gpus(4, memory=24), QWEN_3B, [], "ZeRO-3"),
        (gpus(2, memory=24), QWEN_3B, [], "ZeRO-2"),  # its optimizer in the machine's memory
        (gpus(8), ModelFacts("m"), [], "ZeRO-2"),  # the size is not known
        (cpu(2), QWEN_7B, [], "DDP"),  # in fp32 it sends less
        (cpu(2), QWEN_7B, ["train.precision=bf16"], "ZeRO-2"),
        (gpus(8, memory=24), QWEN_7B, ["model.lora={}"], "DDP"),  # 14 GiB
        (gpus(8, memory=16), QWEN_7B, ["model.lora={}"], "ZeRO-3"),
        (gpus(4, memory=40), QWEN_3B, ["train.precision=fp32"], "ZeRO-2"),  # (4 + 16/4) bytes: 23 GiB
        (gpus(4), QWEN_3B, ["train.sequence_parallel_size=2", "model.lora={}", "data.packing=false"], "ZeRO-2"),
    ],
)
def test_auto_is_the_cheapest_engine_that_holds_the_model(
    hardware: Hardware, model: ModelFacts, overrides: list[str], engine: str, make_recipe: MakeRecipe
) -> None:
    recipe = make_recipe(AUTO, *overrides)
    planned = resolve_plan(recipe, hardware, model, None, open_deepspeed(recipe, hardware, model)).engine
    assert planned.value == engine
    assert planned.reason == choose_engine(recipe, hardware, model).reason
    assert planned.reason.startswith("auto: ")


def states(recipe: Recipe, hardware: Hardware, model: ModelFacts, engine: str) -> float:
    need = needs(recipe, hardware, model, engine)
    return sum(need.gpu[name] for name in STATES)


def test_bytes_a_parameter_are_those_of_the_tables_of_the_documentation(make_recipe: MakeRecipe) -> None:
    model, recipe, eight = ModelFacts("m", parameters=10**9), make_recipe(*LONG), described_hardware("8x80GB")
    expected = {"zero1": 8 + 12 / 8, "zero2": 2 + 16 / 8, "zero3": 18 / 8, "zero2_offload": 2, "zero3_offload": 0}
    for name, bytes_each in expected.items():
        assert states(recipe, eight, model, name) == pytest.approx(bytes_each * 10**9), name
    assert states(recipe, described_hardware("1x80GB"), model, "none") == 18e9
    # fp32 weights, gradients and moments, and autocast's copies; the buckets hold the gradients once more.
    ddp = needs(recipe, eight, model, "none")
    assert (states(recipe, eight, model, "none"), ddp.gpu["buffers"]) == (18e9, 4e9)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize(("nodes", "gpus"), [(1, 1), (1, 4), (8, 8)])
def test_model_states_agree_with_deepspeeds_own_estimates(
    model: ModelFacts, nodes: int, gpus: int, make_recipe: MakeRecipe
) -> None:
    """They count weights, gradients and optimizer, no activations and no buckets.

    Where they differ: for ZeRO-2 DeepSpeed counts the shard of 16-bit gradients beside the one in fp32, 2/N bytes, which with
    data_types.grad_accum_dtype=fp32 are in the buckets; for ZeRO-3 it adds the largest layer, which is in our buffers. Of the
    machine's memory it counts what loading takes too, so that for ZeRO-2 with more than four ranks its figure is larger, and it
    does not divide ZeRO-2's over nodes.
    """
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as zero3
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs as zero2

    recipe, hardware, ranks = make_recipe(*LONG), machine(Gpu("GPU", 80.0, 8.0), nodes, gpus), nodes * gpus
    size = model.parameters
    assert size
    _, theirs = zero2(size, gpus, nodes, cpu_offload=False)
    assert states(recipe, hardware, model, "zero2") + 2 * size / ranks == pytest.approx(theirs, abs=2)
    _, theirs, largest = zero3(size, 0, gpus, nodes, cpu_offload=False)
    assert states(recipe, hardware, model, "zero3") + largest == pytest.approx(theirs, abs=2)
    memory, theirs = zero2(size, gpus, nodes, cpu_offload=True, additional_buffer_factor=CPU_FACTOR)
    assert states(recipe, hardware, model, "zero2_offload") == pytest.approx(theirs, abs=2)
    ours = needs(recipe, hardware, model, "zero2_offload").cpu
    assert ours == pytest.approx(memory, abs=2) if ranks <= 4 else ours <= memory + 2
    memory, theirs, _ = zero3(size, 0, gpus, nodes, additional_buffer_factor=CPU_FACTOR)
    assert states(recipe, hardware, model, "zero3_offload") == theirs == 0
    assert needs(recipe, hardware, model, "zero3_offload").cpu == pytest.approx(memory, abs=2)


def test_checkpointing_that_keeps_less_needs_less(make_recipe: MakeRecipe) -> None:
    def of(mode: str) -> float:
        recipe = make_recipe(f"train.gradient_checkpointing={mode}", "data.max_length=8192")
        estimate = needs(recipe, described_hardware("8x80GB"), QWEN_7B, "zero3_offload")
        return estimate.gpu["activations"]

    assert of("offload") < of("true") == of("auto") < of("selective") < of("2") < of("4") < of("false")


def test_the_memory_of_the_machine_decides_about_offload(make_recipe: MakeRecipe) -> None:
    recipe, model = make_recipe(*LONG), MODELS["Qwen/Qwen2.5-14B"]
    assert choose_engine(recipe, described_hardware("2x141GB+400GB"), model).value == "zero2_offload"
    with pytest.raises(PlanError, match=r"zero2_offload needs .* 330 of 300 GiB of the machine's memory"):
        choose_engine(recipe, described_hardware("2x141GB+300GB"), model)


def test_an_engine_that_the_recipe_names_is_warned_about_and_not_refused(make_recipe: MakeRecipe) -> None:
    recipe, hardware, file = make_recipe("train.deepspeed=zero2"), gpus(8), load_deepspeed("zero2")
    memory = resolve_plan(recipe, hardware, MODELS["meta-llama/Llama-3.1-70B"], None, file).memory
    assert memory.reason.startswith("WARNING: does not fit, ")
    assert memory.value is not None and memory.value > 80
    assert "`sft plan RECIPE --fit`" in memory.reason
    assert "WARNING" not in resolve_plan(recipe, hardware, QWEN_3B, None, file).memory.reason


def test_a_file_that_offloads_to_a_disk_needs_no_memory_for_it(make_recipe: MakeRecipe) -> None:
    nvme, cpu_memory = (needs(make_recipe(), gpus(8), QWEN_7B, name) for name in ("zero3_nvme", "zero3_offload"))
    assert (nvme.gpu, nvme.cpu) == (cpu_memory.gpu, 0)
    assert cpu_memory.cpu > 0


def test_buckets_are_those_of_the_file_and_of_what_is_trained(make_recipe: MakeRecipe) -> None:
    recipe, adapters = make_recipe("train.deepspeed=zero2"), make_recipe("train.deepspeed=zero2", "model.lora={}")
    # Where gradients are added up in fp32 on each rank, ZeRO-1 reduces them in fp32.
    for name, width in (("zero2", 2), ("zero1", 4)):
        file = load_deepspeed(name)
        file.config["zero_optimization"]["reduce_bucket_size"] = 10**8
        found = estimate_memory(recipe, gpus(8), QWEN_7B, file)
        assert found is not None and found.gpu["buffers"] == 2 * width * 10**8
    sized = open_deepspeed(adapters, gpus(8), QWEN_7B)
    assert sized is not None and sized.zero["reduce_bucket_size"] == QWEN_7B.adapter_parameters(adapters.model.lora)
    found = estimate_memory(adapters, gpus(8), QWEN_7B, sized)
    assert found is not None and found.gpu["buffers"] == 4 * sized.zero["reduce_bucket_size"]


@pytest.mark.parametrize(("strategy", "mesh"), [("full_shard", (1, 16)), ("hybrid_shard", (2, 8))])
def test_fsdp_shards_over_all_ranks_and_hybrid_within_a_node(
    strategy: str, mesh: tuple[int, int], make_recipe: MakeRecipe
) -> None:
    recipe = make_recipe(f"train.fsdp={{sharding_strategy: {strategy}}}", "train.global_batch_size=48")
    fsdp, plan = resolve_fsdp(recipe, gpus(16, 8)), resolve_plan(recipe, gpus(16, 8), QWEN)
    assert fsdp is not None
    assert mesh_shape(fsdp, gpus(16, 8)) == mesh
    assert (plan.engine.value, plan.weights.value, plan.gradients.value) == ("FSDP2", "fp32", "fp32")
    assert resolve_fsdp(recipe, gpus(1)) is None


def test_a_quantized_base_takes_its_bytes_and_a_frozen_weight_no_optimizer(make_recipe: MakeRecipe) -> None:
    model, one = replace(MODELS["Qwen/Qwen2.5-7B"], linear_parameters=6_525_616_128), gpus(1, memory=24)

    def states(*overrides: str, **facts: Any) -> dict[str, float]:
        recipe = make_recipe("train.precision=bf16", *overrides)
        return dict(needs(recipe, one, replace(model, **facts), "none").gpu)

    plain, nf4 = states("model.lora={}"), states("model.lora={}", "model.quantization=nf4")
    saved = 6_525_616_128 * (2 - 0.5 - 1 / 64 - 1 / 4096)
    assert plain["weights"] - nf4["weights"] == pytest.approx(saved)
    int8, fp4 = (states("model.lora={}", f"model.quantization={kind}") for kind in ("int8", "fp4"))
    assert plain["weights"] - int8["weights"] == pytest.approx(6_525_616_128)
    assert fp4 == nf4
    half = states(frozen_parameters=7_615_616_512 // 2)
    assert half["optimizer"] == pytest.approx(states()["optimizer"] / 2, rel=1e-3)
    assert half["weights"] == states()["weights"]


def test_fsdp2_shards_what_zero_3_shards_of_fp32_weights(make_recipe: MakeRecipe) -> None:
    model, eight = ModelFacts("m", parameters=10**9), described_hardware("8x80GB")

    def gpu(*overrides: str) -> dict[str, float]:
        recipe = make_recipe("train.global_batch_size=64", *overrides)
        return dict(needs(recipe, eight, model).gpu)

    assert sum(gpu("train.fsdp={}")[name] for name in STATES) == (4 + 4 + 8) / 8 * 10**9
    kept = gpu("train.fsdp={sharding_strategy: shard_grad_op}")
    assert kept["buffers"] >= 2e9  # all weights stay gathered
    offloaded = gpu("train.fsdp={offload_params: true}")
    assert all(offloaded[name] == 0 for name in STATES)


def test_an_open_micro_batch_is_counted_as_planned_and_is_the_largest_that_fits(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe(*LONG[1:], "data.packing=false", "train.deepspeed=zero2")
    for memory, size in ((80, 4), (48, 2), (38, 1)):
        hardware, file = described_hardware(f"8x{memory}GB"), load_deepspeed("zero2")
        plan = resolve_plan(recipe, hardware, QWEN_7B, None, file)
        assert (plan.micro_batch_size.value, f"for a micro-batch of {size}:" in plan.memory.reason) == (size, True)
        stated = recipe.model_copy(update={"train": recipe.train.model_copy(update={"micro_batch_size": size})})
        assert resolve_plan(stated, hardware, QWEN_7B, None, file).memory == plan.memory
        assert "WARNING" not in plan.memory.reason
    assert plan.micro_batch_size.reason.endswith("2 would not fit")


def test_gradients_take_what_the_plan_adds_them_up_in(make_recipe: MakeRecipe) -> None:
    for micro, width in ((2, 4), (8, 2)):
        recipe = make_recipe("train.global_batch_size=8", f"train.micro_batch_size={micro}")
        plan = resolve_plan(recipe, gpus(1), QWEN_3B)
        assert plan.gradients.value == ("fp32" if width == 4 else "bf16")
        assert plan.memory_estimate is not None
        assert plan.memory_estimate.gpu["gradients"] == width * (QWEN_3B.parameters or 0)


def test_ranks_that_share_layers_hold_shards_and_gather_the_head(make_recipe: MakeRecipe) -> None:
    recipe, embedding = make_recipe("train.tensor_parallel_size=4"), 152_064 * 3584
    need = needs(recipe, gpus(4), QWEN_7B, "none")
    shard = (QWEN_7B.parameters or 0) / 4
    assert need.gpu["weights"] == pytest.approx(6 * shard, rel=0.1)
    assert (need.gpu["gradients"], need.gpu["optimizer"]) == (4 * shard, 8 * shard)
    assert need.gpu["buffers"] == 4 * embedding
