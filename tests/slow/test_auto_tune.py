"""Auto-tuning of micro-batch and checkpointing with real processes, and the training that goes by its result."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from sft.run.directory import Run
from tests.slow.conftest import decisions, write_recipe
from tests.slow.ranks import Ranks

pytestmark = pytest.mark.slow
Command = Callable[..., CompletedProcess[str]]
BATCH = 4


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_recipe(
        tmp_path / "job.yaml",
        data={"train": [{"path": "builtin:demo", "rows": 400}], "max_length": 128},
        train={"global_batch_size": BATCH, "max_steps": 2},
        eval={"tasks": []},
    )


def answer(recipe: Path) -> dict[str, Any]:
    (file,) = (recipe.parent / "outputs" / ".prepared" / "search").glob("*.json")
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def trained(recipe: Path) -> tuple[dict[str, Any], list[str]]:
    """The plan's values, and the reasons for the two that are tuned."""
    run = Run((recipe.parent / "outputs" / "job" / "latest").resolve())
    assert run.record["status"] == "finished"
    rows = json.loads(run.plan_file.read_text())["decisions"]
    names = ("micro_batch_size", "gradient_checkpointing")
    return decisions(run), [row["reason"] for row in rows if row["name"] in names]


def test_the_training_runs_what_was_fastest_of_what_was_measured(recipe: Path, ranks: Ranks) -> None:
    printed = ranks.run(1, ["sft.launch.auto_tune", recipe])["stdout"]
    for mode in (True, 2, False):
        line = rf"^  gradient_checkpointing={mode} micro_batch_size={BATCH}: \d+ tokens/s a rank"
        assert re.search(line, printed, re.MULTILINE)
    assert "the fastest of 3 trials" in printed
    chosen = answer(recipe)
    ranks.run(1, ["sft.train", recipe])
    plan, reasons = trained(recipe)
    assert plan["gradient_checkpointing"] == chosen["gradient_checkpointing"]
    assert plan["micro_batch_size"] == chosen["micro_batch_size"]
    assert plan["micro_batch_size"] * plan["gradient_accumulation_steps"] == BATCH
    assert all("the fastest of 3 trials" in reason for reason in reasons)


@pytest.mark.extra
def test_trials_that_all_run_out_of_memory_refuse_the_training_in_one_message(
    recipe: Path, command: Command, ranks: Ranks
) -> None:
    ranks.run(1, ["sft.launch.prepare", recipe, "data.pack_length=512"])
    # A forward pass of 64 packs of 512 tokens needs far more than this under sdpa's mask.
    words = f"ulimit -v 4500000; exec {sys.executable} -m sft.launch.auto_tune {recipe} data.pack_length=512 train.micro_batch_size=64 "
    words += "model.attn_implementation=sdpa train.global_batch_size=64"
    done = command(["bash", "-c", words], expect=2)
    assert done.stdout.count("does not fit") == 1
    assert done.stderr.count("train.gradient_checkpointing=auto: memory ran out in each trial") == 1
    assert f"`sft plan {recipe} data.pack_length=512" in done.stderr and "--fit`" in done.stderr
    assert "Traceback" not in done.stderr
