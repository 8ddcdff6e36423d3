"""bf16 weights with fp32 copies learn as fp32 weights do, by our AdamW and by DeepSpeed's."""

import json
from pathlib import Path

import pytest

from sft.run.directory import Run
from tests.slow.conftest import decisions, losses, write_recipe
from tests.slow.ranks import Ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

WAYS = {
    "fp32": ["train.precision=fp32"],
    "bf16": ["train.precision=bf16"],
    "bf16-unclipped": ["train.precision=bf16", "train.max_grad_norm=0", "train.max_steps=1"],
    "bf16-zero2": ["train.precision=bf16", "train.deepspeed=zero2"],
}


def norms(run: Run) -> list[float]:
    return [json.loads(line)["grad_norm"] for line in run.metrics_file.read_text().splitlines()]


def test_bf16_with_fp32_copies_trains_as_fp32_does(tmp_path: Path, ranks: Ranks) -> None:
    recipe = write_recipe(
        tmp_path / "job.yaml",
        model={"name_or_path": "builtin:demo"},
        data={"train": "builtin:demo", "max_length": 128},
        # Clipped at every step, in four micro-batches.
        train={"global_batch_size": 8, "micro_batch_size": 2, "learning_rate": 1e-3, "max_grad_norm": 0.1, "max_steps": 20,
               "logging_steps": 1},
    )  # fmt: skip
    runs = {}
    for name, overrides in WAYS.items():
        ranks.run(1, ["sft.train", recipe, f"tracking.run_name={name}", *overrides])
        runs[name] = Run(tmp_path / "outputs" / "job" / name)
    assert [decisions(run)["engine"] for run in runs.values()] == ["one process"] * 3 + ["ZeRO-2"]
    assert decisions(runs["bf16"])["weights"] == decisions(runs["bf16-zero2"])["weights"] == "bf16 with an fp32 copy"
    assert losses(runs["bf16"])[-1] < losses(runs["bf16"])[0] - 1
    for name in ("bf16", "bf16-zero2"):
        assert losses(runs[name]) == pytest.approx(losses(runs["fp32"]), rel=0.01)
        assert norms(runs[name]) == pytest.approx(norms(runs["fp32"]), rel=0.05)
    # What is logged is the norm before clipping, whether it clips or not.
    assert norms(runs["bf16-unclipped"]) == norms(runs["bf16"])[:1]
