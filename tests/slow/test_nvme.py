"""ZeRO-3 with weights and Adam on a disk trains as one process does, and really puts them there.

`extra`: in a new environment DeepSpeed builds its operations for minutes first.
"""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from sft.hub.demo import make_demo
from sft.recipe.schema import REPOSITORY
from sft.run.directory import Run
from tests.slow.conftest import losses, write_recipe
from tests.slow.ranks import Ranks

pytestmark = [pytest.mark.slow, pytest.mark.extra, pytest.mark.timeout(1500)]  # DeepSpeed builds two operations first
HEADER = Path("/usr/include/libaio.h")


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """The demo's model, wide enough that a rank's share of a matrix is more than the 1 MiB that DeepSpeed leaves in memory."""
    demo, folder = make_demo(tmp_path).model, tmp_path / "large"
    wide = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 2, "num_attention_heads": 8}
    config = AutoConfig.from_pretrained(demo, **wide, num_key_value_heads=8, layer_types=["full_attention"] * 2)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for file in demo.iterdir():
        if not (folder / file.name).exists() and file.suffix != ".safetensors":
            shutil.copyfile(file, folder / file.name)
    return folder


@pytest.fixture
def on_disk(tmp_path: Path) -> Path:
    """The shipped file with a folder of this test, and buffers that suit the model: the default takes 2 GB a rank."""
    config = json.loads((REPOSITORY / "ds_configs" / "zero3_nvme.json").read_text())
    zero = config["zero_optimization"]
    for section in ("offload_optimizer", "offload_param"):
        zero[section]["nvme_path"] = str(tmp_path / "disk")
    zero["offload_param"]["buffer_size"] = 2_000_000
    (tmp_path / "nvme.json").write_text(json.dumps(config))
    return tmp_path / "nvme.json"


@pytest.mark.skipif(
    not HEADER.exists(), reason=f"DeepSpeed's reading from disks needs libaio-dev, and there is no {HEADER}"
)
def test_weights_and_adam_on_a_disk_train_alike(large: Path, on_disk: Path, tmp_path: Path, ranks: Ranks) -> None:
    recipe = write_recipe(
        tmp_path / "job.yaml",
        model={"name_or_path": str(large)},
        data={"train": "builtin:demo", "max_length": 128},
        train={
            "global_batch_size": 4,
            "micro_batch_size": 2,
            "max_steps": 4,
            "logging_steps": 1,
            "learning_rate": 1e-3,
        },
    )
    ranks.run(1, ["sft.train", recipe, "tracking.run_name=alone"])
    ranks.run(2, ["sft.train", recipe, f"train.deepspeed={on_disk}", "tracking.run_name=disk"])
    alone, run = (Run(tmp_path / "outputs" / "job" / name) for name in ("alone", "disk"))
    found = {"engine": "ZeRO-3", "offloaded": "optimizer on nvme, parameters on nvme"}
    assert run.record["running"].items() >= found.items()
    assert losses(run) == pytest.approx(losses(alone), abs=1e-4)
    # A share of fp32 weights and two moments is 8.9M x 12 / 2 bytes.
    assert sum(file.stat().st_size for file in (tmp_path / "disk").rglob("*.swp")) > 40_000_000
