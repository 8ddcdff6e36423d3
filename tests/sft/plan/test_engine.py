from collections.abc import Callable
from typing import Any

import pytest

from sft.hub.model_facts import ModelFacts
from sft.plan.deepspeed import DeepSpeedFile, load_deepspeed, size_buckets
from sft.plan.engine import choose_engine, open_deepspeed
from sft.plan.hardware import Gpu, Hardware
from sft.plan.plan import resolve_plan
from sft.recipe.schema import Recipe

MakeRecipe = Callable[..., Recipe]
AUTO = "train.parallel=auto"
# Qwen2.5-3B and 7B: parameters, vocabulary, hidden size, layers.
QWEN_3B = ModelFacts("m", "qwen2", "bfloat16", 32768, 3_085_938_688, 151_936, hidden_size=2048, num_hidden_layers=36)
QWEN_7B = ModelFacts("m", "qwen2", "bfloat16", 32768, 7_615_616_512, 152_064, hidden_size=3584, num_hidden_layers=28)


def gpus(ranks: int, memory: float = 80.0) -> Hardware:
    return Hardware(Gpu("GPU", memory, 9.0), ranks, ranks, 16, 128.0)


def cpu(ranks: int) -> Hardware:
    return Hardware(None, ranks, ranks, 2, 16.0)


@pytest.mark.parametrize(
    ("hardware", "model", "overrides", "engine"),
    [
        (gpus(1), QWEN_3B, [], "one process"),
        (cpu(1), QWEN_3B, [], "one process"),
        (gpus(8), QWEN_3B, [], "ZeRO-2"),  # (2 + 16/8) x 3.1e9 = 11 GiB, and buffers
        (gpus(8), QWEN_7B, [], "ZeRO-2"),  # 28 GiB
        (gpus(2, memory=40), QWEN_3B, [], "ZeRO-2"),  # (2 + 16/2) x 3.1e9 = 29 GiB of 40
        (gpus(4, memory=24), QWEN_3B, [], "ZeRO-3"),
        (gpus(2, memory=24), QWEN_3B, [], "ZeRO-2"),  # its optimizer in the machine's memory
        (gpus(1, memory=40), QWEN_3B, [], "ZeRO-2"),
        (gpus(8), ModelFacts("m"), [], "ZeRO-2"),  # the size is not known
        (cpu(2), QWEN_7B, [], "DDP"),  # in fp32 it sends less
        (cpu(2), QWEN_7B, ["train.precision=bf16"], "ZeRO-2"),
        (gpus(8, memory=24), QWEN_7B, ["model.lora={}"], "DDP"),  # 14 GiB
        (gpus(8, memory=16), QWEN_7B, ["model.lora={}"], "ZeRO-3"),
        (gpus(2, memory=80), QWEN_3B, ["train.precision=fp32"], "DDP"),  # (16 + 4) bytes: 57 GiB
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


def sizes(file: DeepSpeedFile) -> dict[str, Any]:
    zero = file.config["zero_optimization"]
    return {key: value for key, value in zero.items() if "bucket" in key or "threshold" in key}


@pytest.mark.parametrize("model", [QWEN_3B, QWEN_7B])
def test_buckets_are_as_large_as_a_layer_at_least_and_never_larger_than_half_a_billion(model: ModelFacts) -> None:
    found = sizes(size_buckets(load_deepspeed("zero3"), model))
    assert found["reduce_bucket_size"] == 500_000_000
    assert model.hidden_size
    # One layer: attention and three matrices of the MLP, 75 or 233 million.
    assert found["stage3_prefetch_bucket_size"] > 12 * model.hidden_size**2
    assert found["stage3_prefetch_bucket_size"] < 400_000_000
    assert found["stage3_param_persistence_threshold"] == 10 * model.hidden_size
    zero2 = sizes(size_buckets(load_deepspeed("zero2"), model))
    assert zero2 == {"reduce_bucket_size": 500_000_000, "allgather_bucket_size": 500_000_000}


def test_without_a_known_size_buckets_are_deepspeeds_own() -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    for name in ("zero2", "zero3"):
        for key, value in sizes(size_buckets(load_deepspeed(name), ModelFacts("m"))).items():
            field = DeepSpeedZeroConfig.model_fields[key.removeprefix("stage3_")]
            assert value == field.default, key
