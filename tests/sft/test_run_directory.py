import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sft.errors import RunError
from sft.hardware import Hardware
from sft.job import open_job
from sft.recipe import REPOSITORY
from sft.run_directory import (
    Run,
    check_start,
    find_run,
    installed_versions,
    open_run,
    read_json,
    record_start,
    write_json,
)

Elsewhere = Callable[..., Run]

# A whole life of a run in another process: what it claimed is free again when it has ended.
PROGRAM = """
import sys
from pathlib import Path
from sft.hardware import Hardware
from sft.job import open_job
from sft.run_directory import open_run, write_json
path, status, checkpoint, ranks, *overrides = sys.argv[1:]
run = open_run(open_job(Path(path), overrides, Hardware(None, int(ranks), int(ranks), 2, 16.0)))
write_json(run.plan_file, {"deepspeed": None})
run.update(status=status, overrides=overrides, ranks=int(ranks))
if checkpoint:
    (run.checkpoints / checkpoint).mkdir()
print(run.path)
"""


@pytest.fixture
def folder(recipe_file: Path, tmp_path: Path) -> Path:
    """Where the recipe's runs go."""
    recipe_file.write_text(recipe_file.read_text() + f"output_dir: {tmp_path / 'out'}\n")
    return tmp_path / "out" / "mine"


@pytest.fixture
def elsewhere(recipe_file: Path, folder: Path) -> Elsewhere:
    def run(status: str, *overrides: str, checkpoint: str = "", ranks: int = 1) -> Run:
        words = [str(recipe_file), status, checkpoint, str(ranks), *overrides]
        printed = subprocess.run(
            [sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, check=True, cwd=REPOSITORY
        )
        return Run(Path(printed.stdout.strip()))

    return run


def open_here(recipe_file: Path, *overrides: str, ranks: int = 1) -> Run:
    job = open_job(recipe_file, overrides, Hardware(None, ranks, ranks, 2, 16.0))
    check_start(job)
    return open_run(job)


def test_a_new_run_is_the_recipe_byte_for_byte_and_latest(recipe_file: Path, folder: Path) -> None:
    recipe_file.write_text("# a comment stays, ünï\r\n" + recipe_file.read_text(), newline="")
    run = open_here(recipe_file, "tracking.run_name=first")
    assert run.path == folder / "first"
    assert run.recipe_file.read_bytes() == recipe_file.read_bytes()
    assert run.checkpoints.is_dir()
    assert (folder / "latest").readlink() == Path("first")


def test_a_finished_run_is_never_written_over(recipe_file: Path, folder: Path, elsewhere: Elsewhere) -> None:
    finished = elsewhere("finished", "tracking.run_name=first")
    with pytest.raises(
        RunError, match=r"first exists already and is not written over. Choose another tracking.run_name"
    ):
        open_here(recipe_file, "tracking.run_name=first")
    assert finished.record["status"] == "finished"
    unnamed = elsewhere("finished")
    assert open_here(recipe_file).path not in (finished.path, unnamed.path)


@pytest.mark.parametrize("status", ["running", "failed", "interrupted"])
def test_an_unfinished_run_goes_on(status: str, recipe_file: Path, elsewhere: Elsewhere) -> None:
    unfinished = elsewhere(status, checkpoint="checkpoint-5")
    assert open_here(recipe_file).path == unfinished.path


def test_a_run_that_another_process_trains_is_left_alone(recipe_file: Path, elsewhere: Elsewhere) -> None:
    mine = open_here(recipe_file)
    mine.update(status="running", overrides=[], ranks=1)
    with pytest.raises(RunError, match=r"train.resume=must, and another process is training"):
        open_here(recipe_file, "train.resume=must")
    assert elsewhere("running").path != mine.path


def test_another_recipe_or_another_override_is_another_run(
    recipe_file: Path, folder: Path, elsewhere: Elsewhere
) -> None:
    unfinished = elsewhere("interrupted", "train.seed=1")
    assert open_here(recipe_file, "train.seed=2").path != unfinished.path
    again = elsewhere("interrupted", "train.seed=1")
    recipe_file.write_text(recipe_file.read_text() + "# changed\n")
    assert open_here(recipe_file, "train.seed=1").path != again.path


def test_resume_can_be_asked_for_and_forbidden(recipe_file: Path, elsewhere: Elsewhere) -> None:
    with pytest.raises(RunError, match=r"train.resume=must, and .* has no unfinished run"):
        open_here(recipe_file, "train.resume=must")
    unfinished = elsewhere("interrupted", checkpoint="checkpoint-5")
    assert elsewhere("interrupted", "train.resume=must").path == unfinished.path
    assert open_here(recipe_file, "train.resume=never").path != unfinished.path


def test_a_checkpoint_that_does_not_tell_what_wrote_it_goes_on_with_the_same_number_of_processes(
    recipe_file: Path, elsewhere: Elsewhere
) -> None:
    elsewhere("interrupted", checkpoint="checkpoint-5", ranks=2)
    with pytest.raises(RunError, match=r"was written by 2 ranks, and cannot go on with 4 ranks.*train.resume=never"):
        open_here(recipe_file, ranks=4)


def test_without_a_checkpoint_any_number_of_processes_starts_again(recipe_file: Path, elsewhere: Elsewhere) -> None:
    unfinished = elsewhere("failed", ranks=2)
    assert open_here(recipe_file, ranks=4).path == unfinished.path


def test_latest_points_at_the_newest(recipe_file: Path, folder: Path, elsewhere: Elsewhere) -> None:
    for name in ("b", "a", "c"):
        elsewhere("finished", f"tracking.run_name={name}")
        assert (folder / "latest").resolve() == folder / name
    one, two = elsewhere("finished"), elsewhere("finished")  # within one second
    assert one.path != two.path
    assert (folder / "latest").resolve() == two.path
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_a_place_that_cannot_be_written_is_told(recipe_file: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"is not a folder. Set output_dir to a place that can be written"):
        open_here(recipe_file, f"output_dir={tmp_path / 'file'}")


def test_the_newest_checkpoint_is_the_highest_and_a_half_one_is_none(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.last_checkpoint() is None
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-11.tmp", ".incomplete", "checkpoint-x"):
        (run.checkpoints / name).mkdir(parents=True)
    assert run.last_checkpoint() == run.checkpoints / "checkpoint-10"


def test_nothing_of_the_environment_is_in_the_runs_files(
    recipe_file: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = {"HF_TOKEN": "hf_abcdefgh12345", "WANDB_API_KEY": "0123456789abcdef", "MY_OWN": "planted-value-77"}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    overrides = ["tracking.run_name=first", "train.seed=3"]
    job = open_job(recipe_file, overrides, Hardware(None, 2, 2, 2, 16.0))
    run = open_run(job)
    record_start(run, job, {"prepare_seconds": 1.5}, "fingerprint-x")
    text = "".join(path.read_text() for path in run.path.rglob("*") if path.is_file())
    for name, value in secrets.items():
        assert value not in text
        assert name not in text
    assert os.environ["PATH"] not in text


def test_the_record_says_what_was_run_on_what(recipe_file: Path, folder: Path) -> None:
    overrides = ["tracking.run_name=first", "train.seed=3"]
    job = open_job(recipe_file, overrides, Hardware(None, 2, 2, 2, 16.0))
    run = open_run(job)
    record_start(run, job, {"prepare_seconds": 1.5}, "fingerprint-x")
    record: dict[str, Any] = json.loads((run.path / "run.json").read_text())
    assert record["status"] == "running"
    assert (record["recipe"], record["recipe_version"], record["ranks"]) == ("mine", 1, 2)
    assert record["overrides"] == overrides
    assert record["data_fingerprint"] == "fingerprint-x"
    assert record["timings"] == {"prepare_seconds": 1.5}
    assert record["hardware"]["cpu_cores"] == 2
    assert record["versions"] == installed_versions()
    assert record["versions"]["trl"][0].isdigit()
    assert set(record["git"]) == {"commit", "dirty"}
    assert run.recipe() == job.recipe
    run.update(status="finished")
    assert run.record == record | {"status": "finished"}


def test_every_file_of_a_run_is_in_its_folder(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for path in (run.recipe_file, run.plan_file, run.ledger_file, run.metrics_file, run.checkpoints, run.final):
        assert path.parent == tmp_path
    names = {"recipe.yaml", "plan.json", "ledger.json", "metrics.jsonl", "checkpoints", "final", "report.md"}
    assert {path.name for path in (run.recipe_file, run.plan_file, run.ledger_file, run.metrics_file)} < names
    assert run.base_evaluation == tmp_path / "eval" / "base"
    assert run.tuned_evaluation == tmp_path / "eval" / "tuned"
    assert run.comparison_file == tmp_path / "eval" / "comparison.json"


def test_a_json_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    write_json(file, {"a": "ünï", "path": tmp_path})
    assert read_json(file) == {"a": "ünï", "path": str(tmp_path)}
    with pytest.raises(TypeError):
        write_json(file, {("no", "key"): 1})
    assert read_json(file)["a"] == "ünï"
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_a_folder_that_is_no_run_is_told(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"is not the folder of a run: it holds no run.json"):
        find_run(tmp_path)
    with pytest.raises(RunError, match=r"run.json is missing"):
        _ = Run(tmp_path).record
    (tmp_path / "run.json").write_text("{")
    assert find_run(tmp_path).path == tmp_path
    with pytest.raises(RunError, match=r"run.json cannot be read"):
        _ = Run(tmp_path).record
