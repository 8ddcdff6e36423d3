"""Configs with any values for the keys of the tables: none crashes, and every key is accounted for."""

import copy
import random
from typing import Any

import pytest

from sft.convert.conversion import Conversion, flatten
from sft.convert.main import TOOLS, recipe_text
from sft.errors import UserError
from sft.recipe.load import parse_recipe

LEAST: dict[str, dict[str, Any]] = {
    "trl": {"model_name_or_path": "m"},
    "alignment-handbook": {"model_name_or_path": "m"},
    "transformers": {},
    "axolotl": {"base_model": "m", "datasets": [{"path": "d"}]},
    "LLaMA-Factory": {"model_name_or_path": "m", "dataset": "d"},
    "torchtune": {
        "model": {"_component_": "torchtune.models.llama3_1.lora_llama3_1_8b"},
        "checkpointer": {"_component_": "torchtune.training.FullModelHFCheckpointer", "checkpoint_dir": "m"},
        "dataset": {"_component_": "torchtune.datasets.alpaca_dataset"},
        "optimizer": {"_component_": "torch.optim.AdamW"},
    },
}
TEXTS = "2e-5|auto|x|true|no|epoch|all||a,b|train[:20%]|cosine|adamw_torch|zero3|lora|full_shard auto_wrap|wandb|{{ x }}|${output_dir}|null"
VALUES: list[Any] = [True, False, None, 0, 1, -1, 8, 0.5, 1e-4, 10**20, float("inf"), float("nan"), [], {}, [1, 2]]
VALUES += [["a", "b"], {"a": 1}, *TEXTS.split("|"), "é\n# x: {", "1:30", ": ", "\u2028", "'", "/"]


def put(config: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key of a table, where `*.` is a list's one mapping and a last `*` any name."""
    name, dot, rest = key.partition(".")
    inner = config.get(name)
    if not dot:
        config["any" if name == "*" else name] = value
    elif rest.startswith("*."):
        config[name] = inner if isinstance(inner, list) and inner and isinstance(inner[0], dict) else [{}]
        put(config[name][0], rest.removeprefix("*."), value)
    else:
        config[name] = inner if isinstance(inner, dict) else {}
        put(config[name], rest, value)


@pytest.mark.parametrize("tool", TOOLS)
def test_any_values_convert_or_are_refused(tool: str) -> None:
    converted = 0
    for seed in range(60):
        draw = random.Random(f"{tool}{seed}")
        config = copy.deepcopy(LEAST[tool])
        for key in draw.sample(list(TOOLS[tool][1]), 25):
            put(config, key, copy.deepcopy(draw.choice(VALUES)))
        keys = flatten(config)
        c = Conversion(tool, "theirs.yml", dict(keys), 8)
        try:
            TOOLS[tool][0](c)
            assert set(keys) <= c.carried.keys() | c.changed.keys() | c.dropped.keys()
            assert len(c.carried) + len(c.changed) + len(c.dropped) == len({*c.carried, *c.changed, *c.dropped})
            parse_recipe(recipe_text(c, "sft convert"))
            converted += 1
        except UserError:
            continue
    assert converted > 10
