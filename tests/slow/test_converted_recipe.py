"""A config of another tool converts to a recipe that trains as it is."""

import json
from pathlib import Path

import pytest
import yaml

from tests.slow.conftest import decisions, latest
from tests.slow.ranks import Ranks

pytestmark = pytest.mark.slow

AXOLOTL = {
    "base_model": "builtin:demo",
    "datasets": [{"path": "builtin:demo", "type": "chat_template"}],
    "sequence_len": 128,
    "sample_packing": True,
    "val_set_size": 0.05,
    "adapter": "lora",
    "lora_r": 4,
    "lora_alpha": 8,
    "lora_target_linear": True,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 3,
    "learning_rate": "2e-4",
    "lr_scheduler": "linear",
    "warmup_ratio": 0.4,
    "bf16": False,
    "logging_steps": 1,
}


def test_axolotls_config_trains_three_steps_of_its_batch(tmp_path: Path, ranks: Ranks) -> None:
    config, recipe = tmp_path / "axolotl.yml", tmp_path / "recipe.yaml"
    config.write_text(yaml.safe_dump(AXOLOTL | {"output_dir": str(tmp_path / "outputs")}))
    ranks.run(1, ["sft.cli", "convert", config, "--gpus", "2", "-o", recipe])
    ranks.run(1, ["sft.train", recipe, "eval.chat=false"])
    run = latest(recipe)
    assert decisions(run)["global_batch_size"] == 2 * 2 * 2
    steps = [json.loads(line) for line in run.metrics_file.read_text().splitlines()]
    rates = {step["step"]: step["learning_rate"] for step in steps if "learning_rate" in step}
    assert max(rates) == 3
    assert max(rates.values()) <= 2e-4
    assert (run.final / "adapter").is_dir()
