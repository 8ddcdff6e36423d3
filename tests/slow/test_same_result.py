"""Law 1 on real processes: launcher, engine and number of ranks change who computes what, never the result."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from sft.recipe import REPOSITORY
from sft.run_directory import Run
from tests.slow.conftest import decisions, losses, write_recipe

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TORCHRUN = ["torchrun", "--standalone", "--nproc-per-node", "2", "-m"]
# `--multi_gpu` is accelerate's word for several processes; without a GPU they are CPU ranks.
ACCELERATE = ["accelerate", "launch", "--multi_gpu", "--num_processes", "2", "-m"]
DEEPSPEED = ["deepspeed", "--num_gpus", "2", "--master_port", "29511", "--module"]
SFT_SH = ["bash", str(REPOSITORY / "scripts" / "sft.sh")]

WAYS = {
    "one process, ZeRO-2": (["python", "-m", "sft.train"], 1, "ZeRO-2", "zero2"),
    "sft.sh, DDP": (SFT_SH, 2, "DDP", "null"),
    "sft.sh, ZeRO-2": (SFT_SH, 2, "ZeRO-2", "zero2"),
    "sft.sh, ZeRO-3": (SFT_SH, 2, "ZeRO-3", "zero3"),
    "torchrun, ZeRO-3": ([*TORCHRUN, "sft.train"], 2, "ZeRO-3", "zero3"),
    "accelerate, DDP": ([*ACCELERATE, "sft.train"], 2, "DDP", "null"),
    "accelerate, ZeRO-2": ([*ACCELERATE, "sft.train"], 2, "ZeRO-2", "zero2"),
    "deepspeed, ZeRO-2": ([*DEEPSPEED, "sft.train"], 2, "ZeRO-2", "zero2"),
}
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module", params=[True, False], ids=["packed", "padded"])
def recipe(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """26 steps of 8 sequences over a set that does not divide by 8, so that they cross an epoch's uneven end."""
    folder = tmp_path_factory.mktemp("same")
    from sft.demo import make_demo

    rows = make_demo(folder).train.read_text().splitlines()[:200]
    (folder / "rows.jsonl").write_text("\n".join(rows[:197] if request.param else rows[:101]))
    return write_recipe(
        folder / "same.yaml",
        model={"name_or_path": "builtin:demo"},
        data={"train": str(folder / "rows.jsonl"), "max_length": 128, "packing": request.param},
        train={
            "global_batch_size": 8,
            "micro_batch_size": 2,
            "learning_rate": 1e-3,
            "weight_decay": 0.1,
            "max_steps": 26,
            "logging_steps": 1,
            "save_steps": 100,
        },
    )


@pytest.fixture(scope="module")
def alone(recipe: Path, command: Command) -> Run:
    """The same recipe trained by one plain process."""
    command(["python", "-m", "sft.train", recipe, "tracking.run_name=alone"])
    return Run(recipe.parent / "outputs" / "same" / "alone")


@pytest.mark.parametrize("way", WAYS)
def test_every_launcher_and_engine_trains_alike(way: str, recipe: Path, alone: Run, command: Command) -> None:
    launcher, ranks, engine, deepspeed = WAYS[way]
    name = "".join(letter if letter.isalnum() else "-" for letter in way)
    command([*launcher, recipe, f"train.deepspeed={deepspeed}", f"tracking.run_name={name}"], NPROC=str(ranks))
    run = Run(alone.path.parent / name)
    assert decisions(run)["engine"] == engine
    assert run.record["ranks"] == ranks
    assert decisions(run)["gradient_accumulation_steps"] * ranks == 4
    assert decisions(run)["steps_per_epoch"] == decisions(alone)["steps_per_epoch"] > 1
    assert len(losses(run)) == 26
    assert losses(run) == pytest.approx(losses(alone), abs=1e-5)
    trained, expected = (AutoModelForCausalLM.from_pretrained(path.final) for path in (run, alone))
    for name, weight in trained.state_dict().items():
        torch.testing.assert_close(weight, expected.state_dict()[name], atol=2e-4, rtol=0, msg=name)
