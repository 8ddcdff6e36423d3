"""`train.remainder: fill` on real processes: a batch that the ranks cannot share evenly is trained as by one process."""

import json
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
Command = Callable[..., subprocess.CompletedProcess[str]]
SFT_SH = ["bash", str(REPOSITORY / "scripts" / "sft.sh")]


@pytest.mark.parametrize(
    ("packed", "words"),
    [
        (True, ["train.micro_batch_size=1"]),
        (False, ["train.micro_batch_size=2", "train.deepspeed=zero2"]),
    ],
    ids=["packed", "padded, ZeRO-2"],
)
def test_three_ranks_train_eight_sequences_as_one_process_does(
    packed: bool, words: list[str], tmp_path: Path, command: Command
) -> None:
    from sft.demo import make_demo

    rows = make_demo(tmp_path).train.read_text().splitlines()[: 101 if packed else 45]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    recipe = write_recipe(
        tmp_path / "fill.yaml",
        model={"name_or_path": "builtin:demo"},
        data={"train": str(tmp_path / "rows.jsonl"), "max_length": 128, "packing": packed},
        train={
            "global_batch_size": 8,
            "remainder": "fill",
            "learning_rate": 5e-4,
            "lr_scaling": "linear",
            "base_batch_size": 4,
            "max_steps": 14,
            "save_steps": 7,
            "logging_steps": 1,
        },
    )
    runs = tmp_path / "outputs" / "fill"
    command(["python", "-m", "sft.train", recipe, "train.micro_batch_size=4", "tracking.run_name=alone"])
    command([*SFT_SH, recipe, *words, "tracking.run_name=three"], NPROC="3")
    alone, three = Run(runs / "alone"), Run(runs / "three")
    assert decisions(alone)["empty_sequences_per_step"] == 0
    assert decisions(three)["empty_sequences_per_step"] == (1 if packed else 4)
    assert decisions(three)["data_parallel_ranks"] == 3
    assert decisions(three)["steps_per_epoch"] == decisions(alone)["steps_per_epoch"] in range(2, 8)
    assert len(losses(three)) == 14
    assert losses(three) == pytest.approx(losses(alone), abs=1e-5)
    for key in ("tokens_seen", "learning_rate", "epoch"):
        assert column(three, key) == pytest.approx(column(alone, key)), key
    assert max(column(three, "learning_rate")) == pytest.approx(1e-3)
    same_weights(three.final, alone.final)

    # From a checkpoint in the middle of an epoch or at its end: the batches that are skipped are counted with their fillers.
    metrics = three.metrics_file.read_text()
    interrupt(three, 7)
    command([*SFT_SH, recipe, *words, "tracking.run_name=three"], NPROC="3")
    again = [json.loads(line) for line in three.metrics_file.read_text().splitlines()]
    assert [line["loss"] for line in again] == [json.loads(line)["loss"] for line in metrics.splitlines()]


def column(run: Run, key: str) -> list[float]:
    return [json.loads(line)[key] for line in run.metrics_file.read_text().splitlines()]


def interrupt(run: Run, step: int) -> None:
    """As if the run had been stopped behind the checkpoint of a step."""
    import shutil

    for folder in run.checkpoints.iterdir():
        if folder.name != f"checkpoint-{step}":
            shutil.rmtree(folder)
    run.update(status="interrupted")


def same_weights(one: Path, other: Path) -> None:
    found, expected = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (one, other))
    for name, weight in found.items():
        torch.testing.assert_close(weight, expected[name], atol=2e-4, rtol=0, msg=name)
