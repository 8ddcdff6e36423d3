"""A config of another tool converts to a recipe that trains as it is."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

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
    "output_dir": "out",
    "logging_steps": 1,
}


def test_axolotls_config_trains_three_steps_of_its_batch(tmp_path: Path) -> None:
    (tmp_path / "axolotl.yml").write_text(yaml.safe_dump(AXOLOTL))
    for words in (
        ["convert", "axolotl.yml", "--gpus", "2", "-o", "recipe.yaml"],
        ["train", "recipe.yaml", "eval.chat=false"],
    ):
        command = [sys.executable, "-m", "sft.cli", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "out" / "recipe" / "latest"
    decisions = json.loads((run / "plan.json").read_text())["decisions"]
    assert {one["name"]: one["value"] for one in decisions}["global_batch_size"] == 2 * 2 * 2
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rates = {step["step"]: step["learning_rate"] for step in steps if "learning_rate" in step}
    assert max(rates) == 3
    assert max(rates.values()) <= 2e-4
    assert (run / "final" / "adapter").is_dir()
