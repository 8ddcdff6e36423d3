from pathlib import Path

import pytest

from sft.errors import RecipeError, RunError
from sft.launch.job import open_job
from sft.plan.hardware import Hardware
from sft.run.directory import Run, check_names, find_run, folder_fault, lost_folder_reported
from tests.conftest import DEMO_RECIPE

ONE_CPU = Hardware(None, 1, 1, 2, 8.0)


def test_the_newest_checkpoint_is_the_highest_complete_one(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.last_checkpoint() is None
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-11.tmp", ".incomplete", "checkpoint-x"):
        (run.checkpoints / name).mkdir(parents=True)
    assert [path.name for path in run.all_checkpoints()] == ["checkpoint-10", "checkpoint-9"]
    assert run.last_checkpoint() == run.checkpoints / "checkpoint-10"


def test_the_next_start_is_by_the_runs_folder_where_the_same_command_starts_another_run(tmp_path: Path) -> None:
    run, own = Run(tmp_path), f"`bash scripts/sft.sh {tmp_path}`"
    (run.checkpoints / "checkpoint-3").mkdir(parents=True)
    run.update(recipe_values={"train": {"resume": "auto"}})
    assert run.next_start == "The same command resumes from checkpoint-3"
    run.update(recipe_values={"train": {"resume": "never"}})
    assert run.next_start == f"{own} resumes from checkpoint-3"
    run.update(evaluation="interrupted")
    assert run.next_start == f"{own} resumes the evaluation"
    run.update(recipe_values={}, evaluation=None, repeats="/outputs/tiny/first")
    assert run.next_start == f"{own} resumes from checkpoint-3"


def test_a_warning_is_kept_once_and_goes_when_it_no_longer_holds(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.warn("plan", "warmup too long", "few steps")
    run.warn("first_loss", "far above guessing")
    run.warn("plan", "few steps")
    assert run.record["warnings"] == {"first_loss": ["far above guessing"], "plan": ["few steps"]}
    run.warn("first_loss", None)
    run.warn("never there")
    assert run.record["warnings"] == {"plan": ["few steps"]}


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"is not the folder of a run: it holds no run.json"):
        find_run(tmp_path)
    with pytest.raises(RunError, match=r"run.json is missing"):
        _ = Run(tmp_path).record
    (tmp_path / "run.json").write_text("{")
    assert find_run(tmp_path).path == tmp_path
    with pytest.raises(RunError, match=r"run.json cannot be read"):
        _ = Run(tmp_path).record


def test_names_do_not_lead_out_of_output_dir(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"run_name=latest is the name of the link"):
        check_names(Path("mine.yaml"), "latest")
    for name in ("..yaml", ".prepared.yaml"):
        (tmp_path / name).write_text(DEMO_RECIPE)
        with pytest.raises(RecipeError, match=r"Give the file a name that does not begin with a dot"):
            open_job(tmp_path / name, [], ONE_CPU)


def test_a_failed_write_is_one_message_if_the_folder_is_to_blame(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is gone"), lost_folder_reported(tmp_path / "checkpoints"):
        (tmp_path / "checkpoints" / "metrics.jsonl").write_text("")
    with pytest.raises(FileNotFoundError), lost_folder_reported(tmp_path):
        (tmp_path / "elsewhere" / "file").write_text("")
    assert "cannot be written" in str(folder_fault(Path("/proc")))  # like a read-only disk, also to root
    assert list(tmp_path.iterdir()) == []
