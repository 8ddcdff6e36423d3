"""`train.remainder: fill` on real processes: a batch that the ranks cannot share evenly is trained as by one process.

Chosen is DDP on packed sequences; ZeRO-2 on padded ones is `extra`.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from sft.hub.demo import make_demo
from sft.run.directory import Run
from tests.slow.conftest import decisions, losses, write_recipe
from tests.slow.ranks import Ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("packed", "words"),
    [
        pytest.param(True, ["train.micro_batch_size=1"], id="packed"),
        pytest.param(
            False, ["train.micro_batch_size=2", "train.deepspeed=zero2"], id="padded, ZeRO-2", marks=pytest.mark.extra
        ),
    ],
)
def test_three_ranks_train_eight_sequences_as_one_process_does(
    packed: bool, words: list[str], tmp_path: Path, ranks: Ranks
) -> None:
    rows = make_demo(tmp_path).train.read_text().splitlines()[: 91 if packed else 45]
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
    ranks.run(1, ["sft.train", recipe, "train.micro_batch_size=4", "tracking.run_name=alone"])
    ranks.run(3, ["sft.train", recipe, *words, "tracking.run_name=three"])
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

    # In the middle of the second epoch: the batches that are skipped are counted with their fillers, and are those of that epoch.
    assert decisions(three)["steps_per_epoch"] < 7
    assert 7 % decisions(three)["steps_per_epoch"] > 0
    metrics = three.metrics_file.read_text()
    interrupt(three, 7)
    ranks.run(3, ["sft.train", recipe, *words, "tracking.run_name=three"])
    # DDP of three ranks may add up in another order after a start; another epoch's order is off by hundredths.
    assert losses(three) == pytest.approx([json.loads(line)["loss"] for line in metrics.splitlines()], abs=2e-6)


def column(run: Run, key: str) -> list[float]:
    return [json.loads(line)[key] for line in run.metrics_file.read_text().splitlines()]


def interrupt(run: Run, step: int) -> None:
    """As if the run had been stopped behind the checkpoint of a step."""
    for folder in run.checkpoints.iterdir():
        if folder.name != f"checkpoint-{step}":
            shutil.rmtree(folder)
    run.update(status="interrupted")


def same_weights(one: Path, other: Path) -> None:
    found, expected = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (one, other))
    for name, weight in found.items():
        torch.testing.assert_close(weight, expected[name], atol=2e-4, rtol=0, msg=name)
