from pathlib import Path

import pytest

from sft.errors import RunError
from sft.run_directory import Run, find_run, read_json, write_json


def test_the_newest_checkpoint_is_the_highest_and_a_half_one_is_none(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.last_checkpoint() is None
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-11.tmp", ".incomplete", "checkpoint-x"):
        (run.checkpoints / name).mkdir(parents=True)
    assert run.last_checkpoint() == run.checkpoints / "checkpoint-10"


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
