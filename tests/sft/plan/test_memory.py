"""What each engine needs, against other people's arithmetic; and what fits where, for five real models."""

from collections.abc import Callable
from itertools import product

import pytest

from sft.errors import PlanError
from sft.hub.model_facts import ModelFacts
from sft.plan.deepspeed import load_deepspeed
from sft.plan.engine import MEMORIES, choose_engine, engine_words, first_that_fits, resolve_memory
from sft.plan.hardware import Gpu, Hardware, described_hardware, machine
from sft.plan.memory import CPU_FACTOR, ENGINES, GIB, Engine, engine_of, estimate_memory
from sft.plan.plan import resolve_plan
from sft.recipe.schema import Data, Model, Recipe, Train

MakeRecipe = Callable[..., Recipe]
ROWS = ((1, 1), (1, 2), (1, 4), (1, 8), (2, 8), (8, 8))
"""Machines and GPUs of each."""

MODELS = {
    name: ModelFacts(name, kind, "bfloat16", 32768, parameters, words, hidden, layers)
    for name, kind, parameters, words, hidden, layers in (
        ("Qwen/Qwen2.5-3B", "qwen2", 3_085_938_688, 151_936, 2048, 36),
        ("meta-llama/Llama-3.1-8B", "llama", 8_030_261_248, 128_256, 4096, 32),
        ("Qwen/Qwen2.5-14B", "qwen2", 14_770_033_664, 152_064, 5120, 48),
        ("Qwen/Qwen2.5-32B", "qwen2", 32_763_876_352, 152_064, 5120, 64),
        ("meta-llama/Llama-3.1-70B", "llama", 70_553_706_496, 128_256, 8192, 80),
    )
}
"""Their config.json's numbers, and the parameters that follow from them."""


def example(model: str, length: int = 4096) -> Recipe:
    """All weights of a model, in whatever engine fits."""
    train = Train(global_batch_size=64, parallel="auto")
    data = Data(train="data.jsonl", max_length=length)
    return Recipe(schema_version=1, version=1, model=Model(name_or_path=model), data=data, train=train)


STATES = ("weights", "gradients", "optimizer")
# From config.json: intermediate_size, key-value heads x head_dim, biases of q, k and v, tied embeddings.
SIZES = {name: model.parameters or 0 for name, model in MODELS.items()}


def on(words: str) -> Hardware:
    return described_hardware(words)


def states(recipe: Recipe, hardware: Hardware, model: ModelFacts, engine: Engine) -> float:
    need = estimate_memory(recipe, hardware, model, engine)
    return sum(need.gpu[name] for name in STATES)


def test_bytes_a_parameter_are_those_of_the_tables_of_the_documentation() -> None:
    model = ModelFacts("m", parameters=10**9)
    eight, alone = on("8x80GB"), on("1x80GB")
    recipe = example("m")
    expected = {"zero1": 8 + 12 / 8, "zero2": 2 + 16 / 8, "zero3": 18 / 8, "zero2_offload": 2, "zero3_offload": 0}
    for name, bytes_each in expected.items():
        assert states(recipe, eight, model, ENGINES[name]) == pytest.approx(bytes_each * 10**9), name
    assert states(recipe, alone, model, ENGINES["none"]) == 18e9
    # fp32 weights, gradients and moments, and autocast's copies; the buckets hold the gradients once more.
    ddp = estimate_memory(recipe, eight, model, ENGINES["none"])
    assert (sum(ddp.gpu[name] for name in STATES), ddp.gpu["buffers"]) == (18e9, 4e9)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("nodes", "gpus"), [(1, 1), (1, 2), (1, 4), (1, 8), (2, 8), (8, 8)])
def test_model_states_agree_with_deepspeeds_own_estimates(name: str, nodes: int, gpus: int) -> None:
    """They count weights, gradients and optimizer, no activations and no buckets.

    Where they differ: for ZeRO-2 DeepSpeed counts the share of 16-bit gradients beside the one in fp32, 2/N bytes, which with
    data_types.grad_accum_dtype=fp32 are in the buckets; for ZeRO-3 it adds the largest layer, which is in our buffers. Of the
    machine's memory it counts what loading takes too, so that for ZeRO-2 with more than four ranks its figure is larger, and it
    does not share ZeRO-2's out over machines.
    """
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as zero3
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs as zero2

    recipe, model, size = example(name), MODELS[name], SIZES[name]
    hardware, ranks = machine(Gpu("GPU", 80.0, 8.0), nodes, gpus), nodes * gpus
    _, theirs = zero2(size, gpus, nodes, cpu_offload=False)
    assert states(recipe, hardware, model, ENGINES["zero2"]) + 2 * size / ranks == pytest.approx(theirs, abs=2)
    _, theirs, largest = zero3(size, 0, gpus, nodes, cpu_offload=False)
    assert states(recipe, hardware, model, ENGINES["zero3"]) + largest == pytest.approx(theirs, abs=2)

    cpu, theirs = zero2(size, gpus, nodes, cpu_offload=True, additional_buffer_factor=CPU_FACTOR)
    ours = estimate_memory(recipe, hardware, model, ENGINES["zero2_offload"])
    assert sum(ours.gpu[name] for name in STATES) == pytest.approx(theirs, abs=2)
    assert ours.cpu <= cpu + 2
    if ranks <= 4:
        assert ours.cpu == pytest.approx(cpu, abs=2)
    cpu, theirs, _ = zero3(size, 0, gpus, nodes, additional_buffer_factor=CPU_FACTOR)
    ours = estimate_memory(recipe, hardware, model, ENGINES["zero3_offload"])
    assert sum(ours.gpu[name] for name in STATES) == theirs == 0
    assert ours.cpu == pytest.approx(cpu, abs=2)


@pytest.mark.parametrize("lora", ["null", "{}"])
@pytest.mark.parametrize("precision", ["auto", "fp32", "fp16"])
@pytest.mark.parametrize("name", MODELS)
def test_every_cell_is_an_engine_that_fits_or_a_refusal_that_names_one_that_does(
    name: str, precision: str, lora: str, make_recipe: MakeRecipe
) -> None:
    words = ["train.parallel=auto", f"train.precision={precision}", f"model.lora={lora}", "data.max_length=4096"]
    recipe, model = make_recipe(*words), MODELS[name]
    for shape, memory in product(ROWS, MEMORIES):
        hardware = machine(Gpu("GPU", float(memory), 8.0), *shape)
        try:
            found = choose_engine(recipe, hardware, model)
        except PlanError as error:
            for offer in str(error).partition("The smallest that does: ")[2].split(" | "):
                assert offer
                check_offer(offer, recipe, model)
            continue
        need = estimate_memory(recipe, hardware, model, ENGINES[found.value or "none"])
        assert need.gpu_bytes <= memory * GIB
        assert need.cpu <= hardware.cpu_memory_gib * GIB
        shown = resolve_memory(recipe, hardware, model, load_deepspeed(found.value) if found.value else None)
        assert shown.value == round(need.gpu_bytes / GIB, 1)
        assert "WARNING" not in shown.reason
        assert need.words(hardware) in shown.reason


def check_offer(offer: str, recipe: Recipe, model: ModelFacts) -> None:
    """What a refusal offers is what the machine would then be given."""
    from sft.recipe.schema import Lora

    if offer.startswith("with model.lora={}: "):
        offer = offer.removeprefix("with model.lora={}: ")
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"lora": Lora()})})
    if offer.startswith("here"):
        return
    shape, _, engine = offer.partition(" with ")
    hardware = on(shape.replace(" ", ""))
    found, _ = first_that_fits(recipe, hardware, model)
    assert found is not None
    assert engine.rstrip(".").partition(" and ")[0] == engine_words(found, recipe, hardware)


"""One process and ZeRO-2 alike: a second GPU cannot be used without an engine."""


@pytest.mark.parametrize("name", MODELS)
def test_checkpointing_that_keeps_less_needs_less(name: str, make_recipe: MakeRecipe) -> None:
    def of(mode: str) -> float:
        recipe = make_recipe(f"train.gradient_checkpointing={mode}", "data.max_length=8192")
        return estimate_memory(recipe, on("8x80GB"), MODELS[name], ENGINES["zero3_offload"]).gpu["activations"]

    assert of("offload") < of("true") == of("auto") < of("selective") < of("2") < of("4") < of("false")


def test_the_memory_of_the_machine_decides_about_offload() -> None:
    recipe, model = example("m"), MODELS["Qwen/Qwen2.5-14B"]
    assert choose_engine(recipe, on("2x141GB+400GB"), model).value == "zero2_offload"
    with pytest.raises(PlanError, match=r"zero2_offload needs 330 of 300 GiB of the machine's memory"):
        choose_engine(recipe, on("2x141GB+300GB"), model)


def test_an_engine_that_the_recipe_names_is_warned_about_and_not_refused(make_recipe: MakeRecipe) -> None:
    recipe, model, hardware = make_recipe("train.deepspeed=zero2"), MODELS["meta-llama/Llama-3.1-70B"], on("8x80GB")
    memory = resolve_plan(recipe, hardware, model, None, load_deepspeed("zero2")).memory
    assert memory.reason.startswith("WARNING: does not fit, ")
    assert memory.value is not None and memory.value > 80
    assert "The smallest that does: " in memory.reason
    fits = resolve_plan(recipe, hardware, MODELS["Qwen/Qwen2.5-3B"], None, load_deepspeed("zero2")).memory
    assert "WARNING" not in fits.reason


def test_a_file_of_the_users_counts_as_what_it_asks_for() -> None:
    for name, engine in ENGINES.items():
        if name != "none":
            assert engine_of(load_deepspeed(name)) == engine
    assert engine_of(None) == ENGINES["none"]
    assert engine_of(load_deepspeed("zero3_nvme")) == Engine(3, "nvme", "nvme")
