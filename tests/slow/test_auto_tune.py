"""Auto-tuning of micro-batch and checkpointing with real processes, and the training that goes by its result."""

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import psutil
import pytest

from sft.run.directory import Run
from tests.slow.conftest import Start, decisions, until, write_recipe
from tests.slow.ranks import Ranks

pytestmark = pytest.mark.slow
Command = Callable[..., CompletedProcess[str]]
BATCH = 4
TUNE: list[str | Path] = [sys.executable, "-m", "sft.launch.auto_tune"]


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
    """The plan's values, and the reasons for the two that are searched."""
    run = Run((recipe.parent / "outputs" / "job" / "latest").resolve())
    assert run.record["status"] == "finished"
    rows = json.loads(run.plan_file.read_text())["decisions"]
    names = ("micro_batch_size", "gradient_checkpointing")
    return decisions(run), [row["reason"] for row in rows if row["name"] in names]


def test_the_training_runs_what_was_fastest_of_what_was_measured(recipe: Path, ranks: Ranks) -> None:
    printed = ranks.run(1, ["sft.launch.auto_tune", recipe])["stdout"]
    found = answer(recipe)
    measured = found["measured"]
    tried = {(str(one["gradient_checkpointing"]), one["micro_batch_size"]) for one in measured}
    assert tried >= {("True", 1), ("2", 1), ("False", 1), ("True", 2), ("2", 2), ("False", 2)}
    assert len(tried) == len(measured)
    assert all(0 < one["used"] <= found["limit"] for one in measured)
    fastest = min(one["seconds_per_token"] for one in measured)
    assert found["chosen"]["seconds_per_token"] <= fastest * 1.02
    assert "measured on this machine" in printed
    ranks.run(1, ["sft.train", recipe])
    plan, reasons = trained(recipe)
    chosen = found["chosen"]
    assert plan["gradient_checkpointing"] is chosen["gradient_checkpointing"] or plan["gradient_checkpointing"] == 2
    assert plan["micro_batch_size"] == chosen["micro_batch_size"]
    assert plan["micro_batch_size"] * plan["gradient_accumulation_steps"] == BATCH
    assert all(f"the fastest of {len(measured)} trials" in reason for reason in reasons)


@pytest.mark.extra  # what a trial without memory becomes is in tests/sft/launch
def test_trials_that_all_run_out_of_memory_refuse_the_training_in_one_message(
    recipe: Path, command: Command, ranks: Ranks
) -> None:
    ranks.run(1, ["sft.launch.prepare", recipe, "data.pack_length=512"])
    # A forward pass of 64 packs of 512 tokens needs far more than this under sdpa's mask.
    words = f"ulimit -v 4500000; exec {sys.executable} -m sft.launch.auto_tune {recipe} data.pack_length=512 train.micro_batch_size=64 "
    words += "model.attn_implementation=sdpa "
    done = command(["bash", "-c", words + "train.global_batch_size=64"], expect=2)
    assert done.stdout.count("does not fit") == 1
    assert done.stdout.count("-m sft.launch.auto_tune --rank") == 2
    found = answer(recipe)
    assert [one["seconds_per_token"] for one in found["measured"]] == [None]
    assert (found["chosen"], found["failed"]) == (None, "nothing that was tried fits")
    assert (
        done.stderr.count("train.micro_batch_size=64, train.gradient_checkpointing=auto: memory ran out in each trial")
        == 1
    )
    assert f"`sft plan {recipe} data.pack_length=512" in done.stderr and "--fit`" in done.stderr
    assert "Traceback" not in done.stderr


def test_auto_tuning_whose_processes_die_ends_and_says_why(recipe: Path, start: Start, ranks: Ranks) -> None:
    ranks.run(1, ["sft.launch.prepare", recipe])
    tuning = start([*TUNE, recipe])
    found: list[psutil.Process] = []

    def a_rank_runs() -> bool:
        for process in psutil.Process(tuning.pid).children(recursive=True):
            with suppress(psutil.Error):
                if "--rank" in (words := process.cmdline()) and "sft.launch.torchrun" not in words:
                    found.append(process)
        return bool(found)

    until(a_rank_runs, tuning)
    found[0].kill()
    printed, _ = tuning.communicate()
    assert tuning.returncode == 0, printed
    assert "Auto-tuning failed: its processes ended with status" in printed
    assert answer(recipe)["chosen"] is None
    ranks.run(1, ["sft.train", recipe])
    plan, reasons = trained(recipe)
    assert plan["micro_batch_size"] == BATCH
    assert all("found no setting (its processes ended with status" in reason for reason in reasons)
