"""The demo on one GPU, in the precision and with the kernels that the plan chooses there: `bash scripts/test.sh --gpu`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sft.run.directory import Run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def train(recipe: Path, *overrides: str) -> Run:
    words = [sys.executable, "-m", "sft.train", str(recipe), "train.max_steps=60", "train.logging_steps=1", *overrides]
    done = subprocess.run(words, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return Run((recipe.parent / "outputs" / recipe.stem / "latest").resolve())


@pytest.fixture
def recipe(recipe_file: Path) -> Path:
    recipe_file.write_text(recipe_file.read_text() + f"output_dir: {recipe_file.parent / 'outputs'}\n")
    return recipe_file


def losses(run: Run) -> list[float]:
    return [json.loads(line)["loss"] for line in run.metrics_file.read_text().splitlines()]


def test_bf16_and_liger_learn_as_fp32_and_plain_layers_do(recipe: Path) -> None:
    planned = train(recipe, "train.learning_rate=2e-3")
    decisions = {row["name"]: row["value"] for row in json.loads(planned.plan_file.read_text())["decisions"]}
    assert decisions["precision"] == "bf16"
    assert decisions["kernels"] == "liger"
    assert decisions["gradient_checkpointing"] is True
    plain = train(recipe, "train.learning_rate=2e-3", "train.precision=fp32", "model.kernels=none")
    assert losses(planned)[-1] < losses(planned)[0] / 4
    assert losses(planned)[:20] == pytest.approx(losses(plain)[:20], rel=0.05)


@pytest.mark.parametrize("deepspeed", ["zero2", "zero3"])
def test_zero_on_one_gpu_trains_as_no_zero_does(deepspeed: str, recipe: Path) -> None:
    alone = train(recipe, "train.precision=fp32")
    sharded = train(recipe, "train.precision=fp32", f"train.deepspeed={deepspeed}")
    assert losses(sharded)[:20] == pytest.approx(losses(alone)[:20], rel=1e-3)


def test_zero2_and_zero3_and_no_zero_are_one_training_in_bf16(recipe: Path) -> None:
    found = {
        engine: losses(train(recipe, "train.precision=bf16", f"train.deepspeed={engine}"))[:20]
        for engine in ("null", "zero2", "zero3")
    }
    # The two keep the same fp32 copy of bf16 weights; the plain engine rounds at other places.
    assert found["zero2"] == pytest.approx(found["zero3"], rel=2e-3)
    assert found["zero2"] == pytest.approx(found["null"], rel=2e-2)


def test_a_run_on_a_gpu_reads_back_fast_attention_and_liger(recipe: Path) -> None:
    running = train(recipe).record["running"]
    assert "varlen" in running["attention"] or "flash" in running["attention"]
    assert "liger" in running["kernels"].lower()
