"""The best checkpoint by the eval loss becomes final/, under every engine, and early stopping ends the training."""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sft.run.directory import Run
from tests.slow.conftest import latest, plain, rows, write_recipe
from tests.slow.engine_runs import ENGINES, lines
from tests.slow.ranks import Ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers are drawn by chance: the eval loss falls while the model learns their form, then rises while it learns them by heart."""
    folder, draw = tmp_path_factory.mktemp("best"), random.Random(0)
    for name, count in (("train", 64), ("held_out", 32)):
        pairs = [
            {"prompt": f"Number {draw.randrange(10**6)}", "completion": str(draw.randrange(1000))} for _ in range(count)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return write_recipe(
        folder / "best.yaml",
        data={"train": str(folder / "train.jsonl"), "held_out": str(folder / "held_out.jsonl"), "max_length": 128},
        train={
            "global_batch_size": 2,
            "learning_rate": 5e-3,
            "lr_scheduler_type": "constant",
            "max_steps": 200,
            "save_steps": 10,
            "save_total_limit": 2,
            "load_best_model_at_end": True,
            "early_stopping_patience": 4,
        },
    )


def check_best(run: Run) -> tuple[int, int]:
    """The steps of the best checkpoint and of the last; final/ holds the tensors of the best."""
    measured = {line["step"]: line["held_out_loss"] for line in lines(run) if "held_out_loss" in line}
    best, last = min(measured, key=lambda step: measured[step]), max(measured)
    found = run.record["best"]
    assert (found["metric"], found["step"], found["last_step"]) == ("eval_loss", best, last)
    assert found["value"] == pytest.approx(measured[best])
    assert best < last < 200 and last == best + 40
    assert {path.name for path in run.all_checkpoints()} == {f"checkpoint-{step}" for step in (best, last - 10, last)}
    assert run.record["status"] == "finished"
    return best, last


LION = ("train.optim=lion", "train.learning_rate=1e-3")
CASES = {
    "1": ("1", ()),
    "1, lion": ("1", LION),
    "2 DDP": ("2 DDP", ()),
    "2 ZeRO-2": ("2 ZeRO-2", ()),
    "2 ZeRO-2, lion": ("2 ZeRO-2", LION),
    "2 ZeRO-3": ("2 ZeRO-3", ()),
    "2 FSDP2": ("2 FSDP2", ()),
    "2 FSDP2, lion": ("2 FSDP2", LION),
}
"""Engines and overrides: weights are loaded whatever the optimizer's state is."""
OTHER = {"2 DDP": "2 ZeRO-3", "2 ZeRO-2": "2 ZeRO-3", "2 ZeRO-3": "2 ZeRO-2"}
"""Under which engine the run ends once more: the checkpoints are another engine's."""


@pytest.mark.parametrize("case", rows(list(CASES), ["1, lion", "2 ZeRO-3"]))
def test_final_is_the_best_checkpoint_and_a_killed_run_ends_the_same(case: str, recipe: Path, ranks: Ranks) -> None:
    engine, overrides = CASES[case]
    words = ["sft.train", recipe, *ENGINES[engine].overrides, *overrides, f"tracking.run_name=engine-{plain(case)}"]
    ranks.run(ENGINES[engine].ranks, words)
    run = latest(recipe)
    best, last = check_best(run)
    final = load_file(run.final / "model.safetensors")
    if engine == "1":
        weights = load_file(run.checkpoints / f"checkpoint-{best}" / "model.safetensors")
        after = load_file(run.checkpoints / f"checkpoint-{last}" / "model.safetensors")
        assert all(torch.equal(weights[name], tensor) for name, tensor in final.items())
        assert not all(torch.equal(after[name], tensor) for name, tensor in final.items())
    # As if it had been killed between its last step and final/: nothing more is trained.
    for other in (engine, *([OTHER[case]] if case in OTHER else [])):
        shutil.rmtree(run.final)
        run.update(status="running")
        words = ["sft.train", recipe, *ENGINES[other].overrides, *overrides, words[-1]]
        ranks.run(ENGINES[other].ranks, words)
        assert latest(recipe) == run
        assert check_best(run) == (best, last)
        again = load_file(run.final / "model.safetensors")
        assert all(torch.equal(again[name], tensor) for name, tensor in final.items())


def test_a_damaged_best_checkpoint_is_named_and_not_loaded(recipe: Path, ranks: Ranks) -> None:
    words = ["sft.train", recipe, "tracking.run_name=damaged"]
    ranks.run(1, words)
    run = latest(recipe)
    best, _ = check_best(run)
    weights = run.checkpoints / f"checkpoint-{best}" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    shutil.rmtree(run.final)
    run.update(status="running")
    printed = ranks.run(1, words)
    assert f"checkpoint-{best}" in printed["stdout"] and "model.safetensors" in printed["stdout"]
    assert run.record["best"]["step"] in (best + 30, best + 40)
    assert any(f"checkpoint-{best}" in warning for warning in run.record["warnings"]["best"])


def test_adapters_and_checkpoints_by_epoch(recipe: Path, ranks: Ranks) -> None:
    by_epoch = [
        "train.save_strategy=epoch",
        "train.max_steps=null",
        "train.num_train_epochs=2",
        "train.early_stopping_patience=null",
    ]
    ranks.run(
        1,
        [
            "sft.train",
            recipe,
            "model.lora={}",
            "tracking.run_name=epochs",
            *by_epoch,
            "train.early_stopping_threshold=0",
        ],
    )
    run = latest(recipe)
    measured = [line["step"] for line in lines(run) if "held_out_loss" in line]
    per_epoch = next(
        row["value"] for row in json.loads(run.plan_file.read_text())["decisions"] if row["name"] == "steps_per_epoch"
    )
    assert measured == [per_epoch, 2 * per_epoch]
    assert run.record["best"]["step"] in measured
    assert (run.final / "model.safetensors").is_file()


def test_a_metric_that_no_task_has_is_refused_before_step_1(recipe: Path, ranks: Ranks) -> None:
    overrides = ["tracking.run_name=metric", "eval.tasks=[builtin:demo]", "eval.every_steps=10", "eval.every_limit=2"]
    printed = ranks.run(1, ["sft.train", recipe, *overrides, "train.metric_for_best_model=demo/accuracy"], expect=2)
    assert "train.metric_for_best_model=demo/accuracy" in printed["stderr"]
    assert not latest(recipe).all_checkpoints()
