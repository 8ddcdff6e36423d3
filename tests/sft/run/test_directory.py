import errno
import os
from pathlib import Path

import pytest

from sft.checkpoint.write import CheckpointWriter
from sft.errors import RunError
from sft.files import read_json, write_json
from sft.run.directory import Run, find_run


def test_the_newest_checkpoint_is_the_highest_and_a_half_one_is_none(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.last_checkpoint() is None
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-11.tmp", ".incomplete", "checkpoint-x"):
        (run.checkpoints / name).mkdir(parents=True)
    assert run.last_checkpoint() == run.checkpoints / "checkpoint-10"


def test_a_checkpoint_that_was_passed_over_counts_again_once_it_is_written_anew(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for name in ("checkpoint-26", "checkpoint-39", "checkpoint-52"):
        (run.checkpoints / name).mkdir(parents=True)
    (run.checkpoints / "checkpoint-39" / "manifest.json").touch()
    os.utime(run.checkpoints / "checkpoint-39" / "manifest.json", (0, 0))
    over = {"checkpoint-39": "cut", "checkpoint-52": "it has no manifest.json"}
    first, second = ({"started": "2026-11-21T09:00:00+0000", "passed_over": found} for found in ({}, over))
    run.update(sessions=[first])
    assert run.after_an_end == "The same command goes on from checkpoint-52"
    run.update(sessions=[first, second])
    assert run.after_an_end == "The same command goes on from checkpoint-26"
    (run.checkpoints / "checkpoint-39" / "manifest.json").touch()
    assert run.last_checkpoint() == run.checkpoints / "checkpoint-39"


def test_a_command_that_starts_anew_each_time_is_not_what_goes_on(tmp_path: Path) -> None:
    run = Run(tmp_path)
    (run.checkpoints / "checkpoint-3").mkdir(parents=True)
    session = {"started": "2026-11-21T09:00:00+0000"}
    run.update(recipe_values={"train": {"resume": "auto"}}, sessions=[session])
    assert run.after_an_end == "The same command goes on from checkpoint-3"
    other = "The same command starts another run (train.resume=never)"
    run.update(recipe_values={"train": {"resume": "never"}})
    assert run.after_an_end == f"{other}; `bash scripts/sft.sh {tmp_path}` goes on from checkpoint-3"
    # It went back to a checkpoint, which it does with train.resume=auto.
    replaced = session | {"changes": {"train.resume": ["never", "auto"]}}
    run.update(recipe_values={"train": {"resume": "auto"}}, sessions=[session, replaced], evaluation="interrupted")
    assert run.after_an_end == f"{other}; `bash scripts/sft.sh {tmp_path}` goes on with the evaluation"


def test_what_repeats_a_run_goes_on_by_its_own_folder(tmp_path: Path) -> None:
    run = Run(tmp_path)
    (run.checkpoints / "checkpoint-3").mkdir(parents=True)
    run.update(repeats="/outputs/tiny/first", sessions=[])
    assert run.after_an_end == f"`bash scripts/sft.sh {tmp_path}` goes on from checkpoint-3"


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


def test_half_a_surrogate_pair_in_an_answer_is_written_and_read_again(tmp_path: Path) -> None:
    write_json(tmp_path / "chat.json", {"text": "half \ud83d, whole \U0001f600"})
    assert read_json(tmp_path / "chat.json") == {"text": "half \ud83d, whole \U0001f600"}


def test_a_folder_that_is_no_run_is_told(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"is not the folder of a run: it holds no run.json"):
        find_run(tmp_path)
    with pytest.raises(RunError, match=r"run.json is missing"):
        _ = Run(tmp_path).record
    (tmp_path / "run.json").write_text("{")
    assert find_run(tmp_path).path == tmp_path
    with pytest.raises(RunError, match=r"run.json cannot be read"):
        _ = Run(tmp_path).record


def test_where_a_checkpoint_has_no_room_the_one_that_stays_is_a_good_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path)
    for name in ("checkpoint-2", "checkpoint-4"):
        (run.checkpoints / name).mkdir(parents=True)
    run.update(sessions=[{"started": "2026-11-21T09:00:00+0000", "passed_over": {"checkpoint-4": "cut"}}])

    def write() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    assert not CheckpointWriter(run.checkpoints, 2, {"ranks": 1}, 0).save(5, write)
    assert "The run goes on, checkpoint-2 stays, and the next interval" in capsys.readouterr().err


def test_a_damaged_checkpoint_of_an_earlier_step_is_none_of_those_that_are_kept(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for name in ("checkpoint-1", "checkpoint-2", "checkpoint-3"):
        (run.checkpoints / name).mkdir(parents=True)
    run.update(sessions=[{"started": "2026-11-21T09:00:00+0000", "passed_over": {"checkpoint-3": "cut"}}])
    writer = CheckpointWriter(run.checkpoints, 2, {"ranks": 1}, 0)
    for step, left in ((4, {"2", "3", "4"}), (5, {"4", "5"})):
        assert writer.save(step, lambda: (run.checkpoints / ".incomplete" / f"checkpoint-{step}").mkdir(parents=True))  # noqa: B023
        assert {path.name.removeprefix("checkpoint-") for path in run.checkpoints.glob("checkpoint-*")} == left


def test_the_new_checkpoint_is_kept_whatever_the_clocks_say(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.checkpoints.mkdir()
    run.update(sessions=[{"started": "2999-01-01T00:00:00+0000", "passed_over": {"checkpoint-4": "cut"}}])
    writer = CheckpointWriter(run.checkpoints, 2, {"ranks": 1}, 0)
    assert writer.save(4, lambda: (run.checkpoints / ".incomplete" / "checkpoint-4").mkdir(parents=True))
    assert (run.checkpoints / "checkpoint-4").is_dir()
