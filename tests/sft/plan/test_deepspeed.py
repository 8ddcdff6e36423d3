import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sft.errors import PlanError
from sft.hub.model_facts import ModelFacts
from sft.plan.deepspeed import SHIPPED, DeepSpeedFile, check_deepspeed, load_deepspeed, size_buckets
from sft.plan.resolve import resolve_plan
from tests.sft.plan.machines import MODELS, MakeRecipe, cpu, gpus

FILES = sorted(SHIPPED.glob("*.json"))


def leaves(config: dict[str, Any]) -> Iterator[str]:
    for key, value in config.items():
        yield key
        if isinstance(value, dict):
            yield from leaves(value)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_shipped_file_fits_any_recipe_and_is_what_its_name_says(path: Path, make_recipe: MakeRecipe) -> None:
    name, file = path.stem, load_deepspeed(path.stem)
    assert file.stage == int(name[4])
    assert file.offload == {"zero2_offload": "cpu", "zero3_offload": "cpu", "zero3_nvme": "nvme"}.get(name)
    model, batch = ModelFacts("some/model", dtype="float16"), ("train.global_batch_size=48", "train.max_grad_norm=0.3")
    for capability, precision in ((7.0, "fp16"), (9.0, "bf16"), (9.0, "fp32")):
        recipe = make_recipe(f"train.deepspeed={name}", f"train.precision={precision}", *batch)
        for ranks in (1, 8):
            plan = resolve_plan(recipe, gpus(ranks, capability=capability), model, None, file)
            assert plan.engine.value == f"ZeRO-{file.stage}"
    told, keys = (path.parent / "README.md").read_text(), set(leaves(json.loads(path.read_text())))
    assert len(keys) > 8
    assert {key for key in keys if f"`{key}" not in told and f"{key}`" not in told} == set(), "not explained"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_deepspeed_takes_every_value_of_a_shipped_file(path: Path) -> None:
    """As its own classes read it, once the sizes are numbers and transformers has put in what the recipe decides."""
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    config = size_buckets(load_deepspeed(path.stem), MODELS["Qwen/Qwen2.5-3B"]).config
    zero = config["zero_optimization"]
    assert "auto" not in zero.values()
    read = DeepSpeedZeroConfig(strict=True, **zero)
    assert not read.model_extra
    dumped = read.model_dump(mode="json", by_alias=True)
    for key, value in zero.items():
        assert value.items() <= dumped[key].items() if isinstance(value, dict) else dumped[key] == value, key
    assert not any(getattr(section, "model_extra", None) for section in (read.offload_optimizer, read.offload_param))
    for section, kind in (("bf16", DeepSpeedBF16Config), ("fp16", DeepSpeedFP16Config)):
        assert set(config[section]) == {"enabled"} <= kind.model_fields.keys()
    assert config["data_types"] == {"grad_accum_dtype": "fp32"}


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"train_batch_size": 16}, "train_batch_size is 16, and train.global_batch_size is 8"),
        ({"train_micro_batch_size_per_gpu": 3}, "train_micro_batch_size_per_gpu is 3, and train.micro_batch_size is 4"),
        ({"gradient_clipping": 0.5}, "gradient_clipping is 0.5, and train.max_grad_norm is 1.0"),
        ({"bf16": {"enabled": False}}, "bf16.enabled is false, and train.precision (bf16) is true"),
        ({"fp16": {"enabled": True}}, "fp16.enabled is true, and train.precision (bf16) is false"),
        ({"bf16": {"check_grad_overflow": False}}, "bf16.check_grad_overflow is false"),
        ({"scheduler": {"type": "WarmupLR", "params": {}}}, '"WarmupLR"'),
        ({"optimizer": {"type": "Lion", "params": {"lr": 3e-4}}}, '"Lion"'),
        ({"zero_optimization": {"stage": 3}}, "stage3_gather_16bit_weights_on_model_save is not true"),
    ],
)
def test_a_contradiction_is_named_with_both_values(config: dict[str, Any], told: str, make_recipe: MakeRecipe) -> None:
    recipe = make_recipe("train.micro_batch_size=4")
    plan = resolve_plan(recipe, gpus(), ModelFacts("some/model"))  # a batch of 8 = 4 x 2
    with pytest.raises(PlanError) as error:
        check_deepspeed(DeepSpeedFile(Path("mine.json"), config), recipe, plan)
    heading, line, remedy = str(error.value).splitlines()
    assert heading == "mine.json contradicts the recipe:"
    assert told in line
    assert remedy == 'Write "auto" in the JSON for what the recipe decides.'


def test_a_file_that_is_missing_comes_with_those_that_there_are() -> None:
    with pytest.raises(PlanError, match=r"zero4: there is no such file; did you mean `zero\d`\? Shipped: zero1, zero2"):
        load_deepspeed("zero4")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "is not readable JSON"),
        ('{"zero_optimisation": {}}', "zero_optimisation: unknown to DeepSpeed; did you mean `zero_optimization`?"),
        ('{"zero_optimization": {"stage": 4}}', "zero_optimization.stage"),
        ('{"zero_optimization": 2}', "zero_optimization: must be a section"),
        ('{"zero_optimization": {"stagee": 2}}', "zero_optimization.stagee: Extra inputs are not permitted"),
        ('{"zero_optimization": {"stage": 2, "offload_optimizer": "cpu"}}', "offload_optimizer"),
        ('{"zero_optimization": {"stage": 1}, "bf16": true}', "bf16: must be a section"),
        ('{"tensorboard": {"enabled": true, "output_path": "/"}}', "would write outside of the run's folder"),
        ('{"zero_optimization": {"stage": 1}, "scheduler": "WarmupLR"}', "scheduler"),
        ('{"zero_optimization": {"stage": 1}, "optimizer": 5}', "optimizer"),
    ],
)
def test_a_file_that_deepspeed_would_not_follow_is_one_message(
    text: str, told: str, tmp_path: Path, make_recipe: MakeRecipe
) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(PlanError, match=re.escape(told)) as error:
        resolve_plan(make_recipe(), cpu(), ModelFacts("some/model"), None, load_deepspeed(str(path)))
    assert "mine.json" in str(error.value)


def sizes(file: DeepSpeedFile) -> dict[str, Any]:
    zero = file.config["zero_optimization"]
    return {key: value for key, value in zero.items() if "bucket_size" in key or "threshold" in key}


def test_buckets_are_as_large_as_a_layer_at_least_and_never_larger_than_half_a_billion() -> None:
    model = MODELS["Qwen/Qwen2.5-7B"]
    assert model.hidden_size
    found = sizes(size_buckets(load_deepspeed("zero3"), model))
    assert found["reduce_bucket_size"] == 500_000_000
    assert 12 * model.hidden_size**2 < found["stage3_prefetch_bucket_size"] < 400_000_000  # one layer: 233 million
    assert found["stage3_param_persistence_threshold"] == 10 * model.hidden_size
    zero2 = sizes(size_buckets(load_deepspeed("zero2"), model))
    assert zero2 == {"reduce_bucket_size": 500_000_000, "allgather_bucket_size": 500_000_000}
    # DeepSpeed asserts that they are even.
    assert set(sizes(size_buckets(load_deepspeed("zero2"), ModelFacts("m", parameters=101))).values()) == {102}
