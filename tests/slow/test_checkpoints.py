"""Checkpoints are complete or absent: a run survives too little space, and a full disk or a kill leaves the checkpoint before."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sft.checkpoint.manifest import fault, size
from sft.launch.job import open_job
from sft.plan.disk import estimate_disk
from sft.plan.hardware import Hardware
from sft.recipe.schema import REPOSITORY
from sft.run.directory import Run
from tests.slow.conftest import losses, plain, write_recipe
from tests.slow.engine_runs import ENGINES, assert_same_weights
from tests.slow.ranks import Ranks

pytestmark = pytest.mark.slow
SAVE_FAULTS = REPOSITORY / "tests" / "slow" / "save_faults.py"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(
        tmp_path_factory.mktemp("checkpoints") / "job.yaml",
        train={
            "global_batch_size": 8,
            "micro_batch_size": 4,
            "learning_rate": 1e-3,
            "max_steps": 6,
            "save_steps": 1,
            "logging_steps": 1,
        },
    )


@pytest.fixture(scope="module")
def undisturbed(recipe: Path, ranks: Ranks) -> Run:
    ranks.run(1, ["sft.train", recipe, "tracking.run_name=undisturbed"])
    return Run(recipe.parent / "outputs" / "job" / "undisturbed")


@pytest.fixture
def disk(small_disk: Callable[[int], Path], undisturbed: Run) -> Path:
    """A small disk of its own, on which the data is prepared already."""
    folder = small_disk(40 * 1024)
    shutil.copytree(undisturbed.path.parents[1] / ".prepared", folder / ".prepared")
    return folder


def test_without_a_save_strategy_there_is_only_final(recipe: Path, undisturbed: Run, ranks: Ranks) -> None:
    ranks.run(1, ["sft.train", recipe, "tracking.run_name=unsaved", "train.save_strategy=no"])
    unsaved = Run(undisturbed.path.parent / "unsaved")
    assert not list(unsaved.checkpoints.glob("checkpoint-*"))
    assert losses(unsaved) == losses(undisturbed)
    assert_same_weights(unsaved, undisturbed, 0.0)


def spoil(ranks: Ranks, recipe: Path, count: int, how: dict[str, str], words: list[str], expect: int = 0) -> str:
    """Train with the saving of some steps spoiled; what was said on standard error."""
    return ranks.run(count, [SAVE_FAULTS, recipe, *words], expect, SPOIL=json.dumps(how))["stderr"]


def found(run: Run) -> dict[str, str | None]:
    """Every entry of checkpoints/, and its fault."""
    return {path.name: fault(path) for path in run.checkpoints.iterdir()}


def test_the_plan_knows_how_large_checkpoints_and_final_are(recipe: Path, undisturbed: Run) -> None:
    estimate = estimate_disk(open_job(recipe, [], Hardware(None, 1, 1, 2, 16.0)))
    assert estimate is not None
    for folder, expected in [(undisturbed.last_checkpoint(), estimate.checkpoint), (undisturbed.final, estimate.final)]:
        assert folder is not None
        assert expected <= size(folder) <= 1.05 * expected


def test_a_full_disk_keeps_the_run_alive_and_one_that_fills_ends_it_with_the_checkpoint_before(
    recipe: Path, ranks: Ranks, disk: Path, undisturbed: Run
) -> None:
    """Full before the save of step 2, and full in the middle of that of step 3."""
    run, words = Run(disk / "job" / "full"), [f"output_dir={disk}", "tracking.run_name=full"]
    said = spoil(ranks, recipe, 1, {"2": "full", "3": "fills"}, words, expect=2)
    (warned,) = [line for line in said.splitlines() if "was not written" in line]
    assert "checkpoint-1 stays" in warned
    assert re.search(r"of step 2 was not written: it takes 6\.8 MB and 0\.3 MB are free: 6\.. MB are missing", warned)
    assert said.count("The disk is full.") == 1 and "Traceback" not in said
    (run.path / "filler").unlink()
    ranks.run(1, ["sft.train", recipe, *words])
    assert found(run) == {"checkpoint-5": None, "checkpoint-6": None}
    assert losses(run) == losses(undisturbed)


def test_a_disk_that_stays_full_leaves_the_last_checkpoint_and_ends_with_one_message(
    recipe: Path, ranks: Ranks, disk: Path
) -> None:
    words = [f"output_dir={disk}", "tracking.run_name=full"]
    said = spoil(ranks, recipe, 1, {str(step): "full" for step in range(3, 7)}, words, expect=2)
    assert said.count("was not written") == 4
    assert "The disk is full." in said
    assert "Traceback" not in said
    assert found(Run(disk / "job" / "full")) == {"checkpoint-1": None, "checkpoint-2": None}


def test_a_stop_that_finds_the_disk_full_is_a_failure_that_no_queue_repeats(
    recipe: Path, ranks: Ranks, disk: Path
) -> None:
    """The signal comes while step 2 is not saved; after step 3 it is acted on."""
    run = Run(disk / "job" / "terminated")
    words = [f"output_dir={disk}", f"tracking.run_name={run.path.name}"]
    said = spoil(ranks, recipe, 1, {"2": "terminated", "3": "full"}, words, expect=2)
    assert said.count("was not written") == 2 and said.count("The run continues") == 1
    printed = said.rstrip().splitlines()[-1]
    assert printed.startswith(
        "Interrupted by SIGTERM after step 3. The checkpoint of step 3 was not written: it takes "
    )
    assert "are missing, in " in printed
    assert printed.endswith("Free some space. The same command resumes from checkpoint-1.")
    assert run.record["status"] == run.record["sessions"][-1]["status"] == "failed"
    assert printed in run.record["error"]
    assert found(run) == {"checkpoint-1": None}


@pytest.mark.parametrize("engine", ["2 ZeRO-2", "2 FSDP2"])
def test_no_room_on_one_rank_alone_ends_the_job_with_one_message(engine: str, recipe: Path, ranks: Ranks) -> None:
    run = Run(recipe.parent / "outputs" / "job" / f"rank-1-{plain(engine)}")
    words = [*ENGINES[engine].overrides, f"tracking.run_name={run.path.name}", "train.max_steps=3"]
    said = spoil(ranks, recipe, 2, {"2": "rank-1"}, words, expect=2)
    assert said.count("The disk is full.") == 1 and "Traceback" not in said
    assert fault(run.checkpoints / "checkpoint-1") is None and not (run.checkpoints / "checkpoint-2").exists()


def test_a_folder_that_is_gone_or_read_only_is_one_message(recipe: Path, ranks: Ranks, disk: Path) -> None:
    for how, words in {"gone": "is gone", "read-only": "cannot be written: Read-only file system"}.items():
        said = spoil(ranks, recipe, 1, {"2": how}, [f"output_dir={disk}", f"tracking.run_name={how}"], expect=2)
        assert words in said
        assert "Traceback" not in said
    assert not (disk / "job" / "gone").exists()
    assert found(Run(disk / "job" / "read-only")) == {"checkpoint-1": None}


def test_kills_inside_saves_leave_whole_checkpoints_and_the_result_of_an_undisturbed_run(
    recipe: Path, ranks: Ranks, undisturbed: Run
) -> None:
    words = ["tracking.run_name=killed", "train.save_total_limit=1"]
    run = Run(recipe.parent / "outputs" / "job" / "killed")
    kills = {"2": "kill-writing", "3": "kill-before", "4": "kill-after", "5": "kill-removing"}
    left = {"2": {1}, "3": {2}, "4": {3, 4}, "5": {5}}
    for step, how in kills.items():
        spoil(ranks, recipe, 1, {step: how}, words, expect=-9)
        whole = {name: reason for name, reason in found(run).items() if name.startswith("checkpoint-")}
        assert whole == {f"checkpoint-{number}": None for number in left[step]}, how
    ranks.run(1, ["sft.train", recipe, *words])
    assert found(run) == {"checkpoint-6": None}
    assert losses(run)[-1] == losses(undisturbed)[-1]
    assert_same_weights(run, undisturbed, 0)
