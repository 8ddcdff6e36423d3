"""The demo on one GPU, in the precision and with the kernels that the plan chooses there: `bash scripts/test.sh --gpu`."""

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sft.run.directory import Run
from tests.conftest import DEMO_RECIPE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture(scope="session")
def train(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """Train the demo with overrides, each setting once."""
    folder = tmp_path_factory.mktemp("gpu")
    runs: dict[tuple[str, ...], Run] = {}

    def run(*overrides: str) -> Run:
        if overrides not in runs:
            recipe = folder / f"run{len(runs)}.yaml"
            recipe.write_text(DEMO_RECIPE + f"output_dir: {folder / 'outputs'}\n")
            steps = ["train.max_steps=60", "train.logging_steps=1"]
            words = [sys.executable, "-m", "sft.train", str(recipe), *steps, *overrides]
            done = subprocess.run(words, capture_output=True, text=True, timeout=500, check=False)
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
            runs[overrides] = Run((folder / "outputs" / recipe.stem / "latest").resolve())
        return runs[overrides]

    return run


FAST = "train.learning_rate=2e-3"
PLAIN = (FAST, "train.precision=fp32", "model.kernels=none")


def losses(run: Run) -> list[float]:
    return [json.loads(line)["loss"] for line in run.metrics_file.read_text().splitlines()]


def decisions(run: Run) -> dict[str, Any]:
    return {row["name"]: row["value"] for row in json.loads(run.plan_file.read_text())["decisions"]}


def test_the_plan_takes_bf16_fast_attention_and_liger_and_each_is_read_back(train: Callable[..., Run]) -> None:
    found = train()
    assert decisions(found)["precision"] == "bf16"
    assert decisions(found)["kernels"] == "liger"
    assert decisions(found)["gradient_checkpointing"] is True
    running = found.record["running"]
    assert "varlen" in running["attention"] or "flash" in running["attention"]
    assert "liger" in running["kernels"].lower()


def test_bf16_and_liger_learn_as_fp32_and_plain_layers_do(train: Callable[..., Run]) -> None:
    planned, plain = train(FAST), train(*PLAIN)
    assert losses(planned)[-1] < losses(planned)[0] / 4
    assert losses(planned)[:20] == pytest.approx(losses(plain)[:20], rel=0.05)


def test_zero2_and_zero3_and_no_zero_are_one_training_in_bf16(train: Callable[..., Run]) -> None:
    found = {engine: losses(train(f"train.deepspeed={engine}"))[:20] for engine in ("zero2", "zero3")}
    # The two keep the same fp32 copy of bf16 weights; the plain engine rounds at other places.
    assert found["zero2"] == pytest.approx(found["zero3"], rel=2e-3)
    assert found["zero2"] == pytest.approx(losses(train())[:20], rel=2e-2)


def test_compiled_layers_with_attention_inside_learn_as_plain_ones_do(train: Callable[..., Run]) -> None:
    compiled, plain = train(FAST, "model.compile=true"), train(*PLAIN)
    running = compiled.record["running"]
    assert (running["compile"], running["kernels"]) == ("on", "none")
    assert losses(compiled)[:20] == pytest.approx(losses(plain)[:20], rel=0.05)


@pytest.mark.parametrize("deepspeed", ["zero2", "zero3"])
def test_zero_on_one_gpu_trains_as_no_zero_does(deepspeed: str, train: Callable[..., Run]) -> None:
    alone, sharded = train(*PLAIN), train(*PLAIN, f"train.deepspeed={deepspeed}")
    assert losses(sharded)[:20] == pytest.approx(losses(alone)[:20], rel=1e-3)
