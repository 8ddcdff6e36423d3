"""A run that ends early: what is left, and how it goes on. A second precision is `extra`."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sft.run.directory import Run
from tests.slow.conftest import latest, lines_of, losses, rows, until, write_recipe
from tests.slow.ranks import Ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def recipe(own_recipe: Path) -> Path:
    return write_recipe(
        own_recipe,
        model={"name_or_path": "builtin:demo"},
        data={"train": "builtin:demo", "max_length": 128},
        # One sequence at a time: long enough steps for a signal to meet the run.
        train={
            "global_batch_size": 8,
            "micro_batch_size": 1,
            "learning_rate": 1e-3,
            "max_steps": 40,
            "save_steps": 10,
            "logging_steps": 4,
        },
    )


def tokens_seen(run: Run) -> list[int]:
    return [json.loads(line)["tokens_seen"] for line in run.metrics_file.read_text().splitlines()]


def start_and_signal(recipe: Path, number: signal.Signals, lines: int) -> tuple[int, Run]:
    """Start training, send the signal once so many lines are logged, and return the exit status and the run."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen([sys.executable, "-m", "sft.train", str(recipe)], env=environment, text=True)
    try:
        until(lambda: lines_of(latest(recipe)) >= lines, process)
        process.send_signal(number)
        return process.wait(timeout=60), latest(recipe)
    finally:
        process.kill()


@pytest.mark.parametrize("precision", rows(["fp32", "bf16"], ["bf16"]))
def test_a_killed_run_goes_on_and_ends_as_an_undisturbed_one(precision: str, recipe: Path, ranks: Ranks) -> None:
    """In bf16 the fp32 copies of the weights go on too."""
    recipe.write_text(recipe.read_text().replace("train:\n", f"train:\n  precision: {precision}\n"))
    status, run = start_and_signal(recipe, signal.SIGKILL, lines=6)
    assert status == -signal.SIGKILL
    checkpoint = run.last_checkpoint()
    assert checkpoint is not None
    assert checkpoint.name in ("checkpoint-10", "checkpoint-20", "checkpoint-30")
    resumed = ranks.run(1, ["sft.train", recipe])
    assert f"resumes from {checkpoint.name}" in resumed["stdout"]
    assert run.record["status"] == "finished"
    undisturbed = Run(run.path.parent / "undisturbed")
    ranks.run(1, ["sft.train", recipe, "tracking.run_name=undisturbed"])
    assert losses(run) == losses(undisturbed)
    assert tokens_seen(run) == tokens_seen(undisturbed)
    assert run.record["train_loss"] == undisturbed.record["train_loss"]
    weights, expected = (load_file(path.final / "model.safetensors") for path in (run, undisturbed))
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16 if precision == "bf16" else torch.float32}
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stopped_run_says_so(recipe: Path, number: signal.Signals, status: int) -> None:
    found, run = start_and_signal(recipe, number, lines=1)
    assert found == status
    assert run.record["status"] == "interrupted"


def test_a_finished_run_is_not_written_over(recipe: Path, command: Command) -> None:
    words = [sys.executable, "-m", "sft.train", recipe, "train.max_steps=1", "tracking.run_name=once"]
    command(words)
    report = (recipe.parent / "outputs" / recipe.stem / "once" / "report.md").read_bytes()
    again = command(words, expect=2)
    assert "exists and is never overwritten" in again.stderr
    assert "Traceback" not in again.stderr
    assert (recipe.parent / "outputs" / recipe.stem / "once" / "report.md").read_bytes() == report
