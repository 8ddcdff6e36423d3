import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sft.errors import RunError
from sft.launch.job import open_job
from sft.launch.open_run import check_start, claim_directory, unfinished_run
from sft.launch.rerun import check_same_data, differences_to_report, rerun_arguments
from sft.plan.hardware import Hardware
from sft.plan.job import Job
from sft.run.directory import Run
from sft.run.record import record_start

MakeRun = Callable[..., Run]
MACHINE = Hardware(None, 1, 1, 2, 16.0)


@pytest.fixture
def make_run(recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeRun:
    """A run that was started in a folder of its own."""
    recipe_file.write_text(recipe_file.read_text() + "output_dir: out\n# mine\n")
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.chdir(place)

    def make(status: str, *overrides: str, **record: Any) -> Run:
        job = open_job(recipe_file, overrides, MACHINE)
        run = claim_directory(job)
        record_start(run, job, {}, "fingerprint-of-then")
        run.update(status=status, **record)
        # This process holds the folder that it has made; what a process that has ended leaves is held by nobody.
        left = run.path.rename(tmp_path / "left")
        shutil.copytree(left, run.path)
        return run

    return make


def again(run: Run, *overrides: str) -> Job:
    path, words = rerun_arguments(run.path, overrides)
    job = open_job(path, words, MACHINE)
    check_start(job)
    return job


def test_a_finished_run_is_repeated_beside_it(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run("finished", "train.seed=3", "tracking.run_name=first", "train.resume=never")
    monkeypatch.chdir(tmp_path)
    job = again(run)
    assert (job.name, job.recipe.train.seed, job.recipe.train.resume) == ("mine", 3, "auto")
    repeated = claim_directory(job)
    assert repeated.path == run.path.parent / "first-again"
    assert repeated.recipe_file.read_bytes() == run.recipe_file.read_bytes()
    record_start(repeated, job, {}, "fingerprint-of-then")
    assert repeated.record["repeats"] == str(run.path)
    assert repeated.record["recipe_path"] == run.record["recipe_path"]
    assert again(run).recipe.tracking.run_name == "first-again-2"
    assert again(run, "tracking.run_name=other", "train.seed=4").recipe.tracking.run_name == "other"


def test_an_unfinished_run_goes_on_where_it_is(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("interrupted", "train.seed=3")
    moved = Run(tmp_path / "elsewhere" / "mine" / run.path.name)
    moved.path.parent.mkdir(parents=True)
    run.path.rename(moved.path)
    job = again(moved)
    assert job.recipe.train.seed == 3
    assert unfinished_run(job) == moved
    record_start(moved, job, {}, "fingerprint-of-then")
    assert "repeats" not in moved.record
    assert moved.record["recipe_path"] == str(tmp_path / "mine.yaml")


def test_what_is_not_as_it_was_is_told(make_run: MakeRun) -> None:
    run = make_run("finished")
    (line,) = differences_to_report(again(run))
    assert line == f"Repeats {run.path}: recipe, versions, commit and hardware are as they were."
    versions = run.record["versions"] | {"torch": "1.0"}
    run.update(versions=versions, git={"commit": "abc", "dirty": False}, hardware=run.record["hardware"] | {"ranks": 2})
    lines = differences_to_report(again(run, "train.max_steps=3"))
    assert lines[:2] == [f"Repeats {run.path}. Differs from then:", "  train.max_steps: null -> 3"]
    assert "  hardware.ranks: 2 -> 1" in lines
    assert any(line.startswith("  versions.torch: 1.0 -> ") for line in lines)
    assert any(line.startswith("  git.commit: abc -> ") for line in lines)


def test_other_data_is_no_repetition_unless_it_is_asked_for(make_run: MakeRun) -> None:
    run = make_run("finished")
    job = again(run)
    check_same_data(job, "fingerprint-of-then")
    with pytest.raises(
        RunError, match=r"trained on other data than there is now.*To train on what there is now: \S.*mine\.yaml"
    ):
        check_same_data(job, "fingerprint-of-now")
    check_same_data(again(run, "data.max_length=64"), "fingerprint-of-now")
    run.update(status="interrupted")
    check_same_data(job, "fingerprint-of-now")  # told, and otherwise, where it goes on


def test_a_working_directory_that_is_gone_is_told(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("finished", working_directory=str(tmp_path / "gone"))
    with pytest.raises(RunError, match=r"was started in .*gone, where its relative paths begin, and there is no such"):
        rerun_arguments(run.path, [])
    assert json.loads((run.path / "run.json").read_text())["status"] == "finished"
