import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from sft.files import write_json
from sft.run.diff import compare, final, main, steps
from sft.run.directory import Run
from tests.conftest import DEMO_RECIPE


def write_lines(run: Run, lines: list[dict[str, Any]]) -> None:
    run.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def lines_of(steps: list[int], **changed: Any) -> list[dict[str, Any]]:
    return [{"step": step, "loss": 10.0 / step, "batch": f"b{step}"} | changed for step in steps]


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Run, Run]:
    """A run and a copy of it."""
    a = Run(tmp_path / "mine" / "a")
    a.final.mkdir(parents=True)
    a.recipe_file.write_text(DEMO_RECIPE)
    same = {"versions": {"torch": "2.13"}, "git": {"commit": "abc", "dirty": False}, "hardware": {"ranks": 1}}
    a.update(status="finished", overrides=[], data_fingerprint="0123456789abcdef", **same)
    write_json(a.plan_file, {"decisions": [{"name": "engine", "value": "DDP", "reason": "x"}], "deepspeed": None})
    write_lines(a, lines_of([1, 2, 3, 4]))
    (a.final / "model.safetensors").write_bytes(b"weights")
    (a.final / "config.json").write_text("{}")
    b = Run(a.path.with_name("b"))
    shutil.copytree(a.path, b.path)
    return a, b


def status(a: Run, b: Run) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(a.path), str(b.path)])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_two_runs_alike_are_the_same(runs: tuple[Run, Run], capsys: pytest.CaptureFixture[str]) -> None:
    a, b = runs
    b.update(overrides=["tracking.run_name=b", "train.save_steps=3"], started="later")
    assert status(a, b) == 0
    told = capsys.readouterr().out
    assert "tracking.run_name: null -> b (does not count)" in told
    assert told.endswith("The runs are the same.\n")


@pytest.mark.parametrize(
    ("record", "line"),
    [
        ({"overrides": ["train.seed=1"]}, "  train.seed: 0 -> 1"),
        ({"hardware": {"ranks": 2}}, "  ranks: 1 -> 2"),
        ({"data_fingerprint": "fedcba9876543210"}, "  fingerprint: 0123456789ab -> fedcba987654"),
    ],
)
def test_each_difference_is_told_and_counts(
    record: dict[str, Any], line: str, runs: tuple[Run, Run], capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = runs
    b.update(**record)
    assert status(a, b) == 1
    told = capsys.readouterr().out.splitlines()
    assert line in told
    assert [one for one in told if one.startswith("  ")] == [line]


def test_the_first_step_is_named_whose_batch_or_loss_differs(runs: tuple[Run, Run]) -> None:
    a, b = runs
    assert steps(a, b).summary == "same, in 4 lines that cover the same steps"
    write_lines(b, [*lines_of([1, 2]), *lines_of([3], batch="x"), *lines_of([4], loss=2.0)])
    assert steps(a, b).differs
    assert steps(a, b).lines == (
        "batches differ from step 3",
        "losses differ from step 4, most at step 4: by 5.00e-01",
    )


def test_only_lines_about_the_same_steps_are_compared(runs: tuple[Run, Run]) -> None:
    """A line is the mean since the one before."""
    a, b = runs
    write_lines(b, lines_of([4], loss=0.0))
    assert "not compared" in steps(a, b).summary
    write_lines(b, [*lines_of([1, 2]), *lines_of([4], loss=0.0)])
    assert not steps(a, b).differs
    write_lines(b, lines_of([1, 2, 3]))
    assert steps(a, b).lines == ("A ends at step 4, B at step 3",)


def test_the_files_of_final_are_compared(runs: tuple[Run, Run]) -> None:
    a, b = runs
    assert not final(a, b).differs
    (b.final / "config.json").write_text('{"a": 1}')
    (b.final / "new.txt").touch()
    assert final(a, b).lines == ("config.json", "new.txt")
    shutil.rmtree(b.final)
    assert (final(a, b).summary, final(a, b).differs) == ("not compared: only A has one", True)


def test_a_recipe_is_what_it_meant_when_it_ran(runs: tuple[Run, Run]) -> None:
    a, b = runs
    values = a.recipe().model_dump(mode="json")
    values["train"]["adam_beta2"] = 0.999
    b.update(recipe_values=values)
    assert compare(a, b)[0].lines == ("train.adam_beta2: 0.95 -> 0.999",)
