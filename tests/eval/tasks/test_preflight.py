"""A training does not start whose evaluation could not be loaded."""

from collections.abc import Callable
from pathlib import Path

import pytest

from eval.tasks.preflight import check_before_training
from sft.errors import EvaluationError
from sft.recipe.schema import Recipe

WriteTask = Callable[..., Path]


@pytest.mark.slow
def test_a_task_that_cannot_be_loaded_is_refused_and_one_out_of_reach_is_not(
    write_task: WriteTask, make_recipe: Callable[..., Recipe], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken, far = (
        write_task("broken", test_split="tset"),
        write_task("far", dataset_path="nobody/x", dataset_kwargs=None),
    )
    checks = [
        check_before_training(make_recipe(f"eval.tasks=[{task}]", f"output_dir={tmp_path}")) for task in (broken, far)
    ]
    assert checks[0] is not None
    with pytest.raises(EvaluationError, match=r"Nothing is trained yet\. .*KeyError"):
        checks[0].wait()
    assert checks[1] is not None
    checks[1].wait()
    told = capsys.readouterr().err
    assert "The documents of far are out of reach: " in told
    assert "Training continues" in told


def test_a_recipe_without_tasks_starts_nothing(
    make_recipe: Callable[..., Recipe], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_before_training(make_recipe(f"output_dir={tmp_path}")) is None
    assert check_before_training(make_recipe(f"output_dir={tmp_path}", "eval.tasks=[builtin:demo]")) is None
    assert capsys.readouterr().out == ""
