import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sft.errors import PlanError
from sft.hub.model_facts import ModelFacts
from sft.plan.deepspeed import DeepSpeedFile, check_deepspeed, load_deepspeed, size_buckets
from sft.plan.hardware import Gpu, Hardware
from sft.plan.plan import resolve_plan
from sft.recipe.schema import REPOSITORY, Recipe

MakeRecipe = Callable[..., Recipe]
OWNED = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
SHIPPED = sorted((REPOSITORY / "ds_configs").glob("*.json"))


def check(config: dict[str, Any], recipe: Recipe, precision: str = "bf16") -> None:
    """A batch of 8 = 4 x 2."""
    check_deepspeed(DeepSpeedFile(Path("mine.json"), config), recipe, 4, 2, precision)


def contradictions(config: dict[str, Any], recipe: Recipe, precision: str = "bf16") -> list[str]:
    with pytest.raises(PlanError) as error:
        check(config, recipe, precision)
    heading, *lines, remedy = str(error.value).splitlines()
    assert heading == "mine.json contradicts the recipe:"
    assert remedy == 'Write "auto" in the JSON for what the recipe decides.'
    return [line.strip() for line in lines]


def leaves(config: dict[str, Any]) -> Iterator[str]:
    for key, value in config.items():
        yield key
        if isinstance(value, dict):
            yield from leaves(value)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_file_fits_any_recipe_and_is_what_its_name_says(path: Path, make_recipe: MakeRecipe) -> None:
    name = path.stem
    file = load_deepspeed(name)
    assert file.stage == int(name[4])
    assert file.offload == {"zero2_offload": "cpu", "zero3_offload": "cpu", "zero3_nvme": "nvme"}.get(name)
    model = ModelFacts("some/model", dtype="float16")
    for capability, precision in ((7.0, "fp16"), (9.0, "bf16"), (9.0, "fp32")):
        for ranks in (1, 2, 4, 8):
            recipe = make_recipe(
                f"train.deepspeed={name}", f"train.precision={precision}", "train.learning_rate=3e-4",
                "train.max_grad_norm=0.3", "train.global_batch_size=48",
            )  # fmt: skip
            hardware = Hardware(Gpu("GPU", 80.0, capability), ranks, ranks, 16, 128.0)
            assert resolve_plan(recipe, hardware, model, None, file).engine.value == f"ZeRO-{file.stage}"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_key_of_a_shipped_file_is_explained(path: Path) -> None:
    told = (path.parent / "README.md").read_text()
    keys = set(leaves(json.loads(path.read_text())))
    assert len(keys) > 8
    assert {key for key in keys if f"`{key}" not in told and f"{key}`" not in told} == set()


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_deepspeed_takes_every_value_of_a_shipped_file(path: Path) -> None:
    """As its own classes read it, once the sizes are numbers and transformers has put in what the recipe decides."""
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    model = ModelFacts("m", parameters=3_000_000_000, hidden_size=2048, num_hidden_layers=36, vocab_size=151_936)
    config = size_buckets(load_deepspeed(path.stem), model).config
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
    assert set(config) <= {*OWNED, "bf16", "fp16", "data_types", "zero_optimization"}
    assert config["data_types"] == {"grad_accum_dtype": "fp32"}


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"train_batch_size": 16}, "train_batch_size is 16, and train.global_batch_size is 8"),
        ({"train_micro_batch_size_per_gpu": 3}, "train_micro_batch_size_per_gpu is 3, and train.micro_batch_size is 4"),
        ({"gradient_accumulation_steps": 1}, "gradient_accumulation_steps is 1, and accumulation in the plan is 2"),
        ({"gradient_clipping": 0.5}, "gradient_clipping is 0.5, and train.max_grad_norm is 1.0"),
        ({"bf16": {"enabled": False}}, "bf16.enabled is false, and train.precision (bf16) is true"),
        ({"fp16": {"enabled": True}}, "fp16.enabled is true, and train.precision (bf16) is false"),
        ({"scheduler": {"type": "WarmupLR", "params": {}}}, '"WarmupLR"'),
        ({"optimizer": {"type": "Lion", "params": {"lr": 3e-4}}}, '"Lion"'),
        ({"zero_optimization": {"stage": 3}}, "stage3_gather_16bit_weights_on_model_save is not true"),
    ],
)
def test_a_contradiction_is_named_with_both_values(config: dict[str, Any], told: str, make_recipe: MakeRecipe) -> None:
    (line,) = contradictions(config, make_recipe())
    assert told in line


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("zero4", r"train.deepspeed=zero4: there is no such file; did you mean `zero\d`\? Shipped: zero1, zero2"),
        ("ds_configs/zero22.json", "there is no such file"),
        (".", "is not readable JSON"),
    ],
)
def test_a_file_that_is_missing_comes_with_those_that_there_are(name: str, told: str) -> None:
    with pytest.raises(PlanError, match=told):
        load_deepspeed(name)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "is not readable JSON"),
        ("[]", "holds no JSON object"),
        ('{"zero_optimisation": {}}', "zero_optimisation: unknown to DeepSpeed; did you mean `zero_optimization`?"),
        ('{"gradient_cliping": 1, "trian_batch_size": 2}', "trian_batch_size: unknown to DeepSpeed"),
        ('{"zero_optimization": {"stage": 4}}', "zero_optimization.stage"),
        ('{"zero_optimization": {"stage": "2"}}', "zero_optimization.stage must be 0, 1, 2 or 3"),
        ('{"zero_optimization": 2}', "zero_optimization: must be a section"),
        ('{"zero_optimization": {"stagee": 2}}', "stagee"),
        ('{"zero_optimization": {"stage": 2, "offload_optimizer": "cpu"}}', "offload_optimizer"),
        ('{"zero_optimization": {"stage": 1}, "bf16": true}', "bf16"),
        ('{"zero_optimization": {"stage": 1}, "scheduler": "WarmupLR"}', "scheduler"),
        ('{"zero_optimization": {"stage": 1}, "optimizer": 5}', "optimizer"),
    ],
)
def test_a_file_of_the_wrong_shape_is_one_message(
    text: str, told: str, tmp_path: Path, make_recipe: MakeRecipe
) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(PlanError, match=re.escape(told)) as error:
        resolve_plan(
            make_recipe(), Hardware(None, 1, 1, 2, 16.0), ModelFacts("some/model"), None, load_deepspeed(str(path))
        )
    assert "mine.json" in str(error.value)


@pytest.mark.parametrize(
    "section",
    [
        '"tensorboard": {"enabled": true, "output_path": "/"}',
        '"csv_monitor": {"enabled": true}',
        '"flops_profiler": {"output_file": "/x"}',
    ],
)
def test_a_deepspeed_file_does_not_say_where_files_are_written(section: str, tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(f'{{"zero_optimization": {{"stage": 2}}, {section}}}')
    with pytest.raises(PlanError, match=r"would write outside of the run's folder"):
        load_deepspeed(str(tmp_path / "mine.json"))
