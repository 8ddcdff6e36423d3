"""The Python functions: what they return, and that none ends the process that calls it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import sft
from sft import api
from sft.run.directory import Run


def test_a_recipe_and_its_plan_are_values(recipe_file: Path, outputs: Path) -> None:
    recipe = sft.load_recipe(recipe_file, {"train.learning_rate": 1e-3, "output_dir": str(outputs)})
    assert recipe.train.learning_rate == 1e-3
    plan = sft.plan(recipe_file, [f"output_dir={outputs}"], on="4x24GB")
    assert plan.engine.value == "DDP"


@pytest.mark.parametrize("first", ["sft.api", "sft.train.speed, sft.plan.batch"])
def test_packages_are_called_as_the_functions_of_their_name_whatever_is_imported_first(first: str) -> None:
    code = f"import {first}, sft; assert sft.plan.batch and callable(sft.train); sft.plan('absent.yaml')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].startswith("sft.errors.RecipeError: There is no recipe absent.yaml"), (
        done.stderr
    )


def test_importing_sft_imports_none_of_it() -> None:
    code = "import sft, sys; assert not [name for name in sys.modules if name.startswith('sft.')]"
    subprocess.run([sys.executable, "-c", code], check=True)


CALLER = """
import sft
from sft.errors import UserError
try:
    sft.prepare({recipe!r}, {{"output_dir": {outputs!r}, "data.train": {bad!r}}})
except UserError as error:
    print("REFUSED", error)
prepared = sft.prepare({recipe!r}, {{"output_dir": {outputs!r}, "data.train": {rows!r}}})
print("PREPARED", prepared.ledger["total"]["rows"]["in"])
try:
    sft.train({recipe!r}, {{"output_dir": {outputs!r}, "train.learning_rat": 1}})
except UserError as error:
    print("MISTAKE", error)
print("LAST LINE")
"""


@pytest.mark.slow
def test_a_script_reaches_its_last_line(recipe_file: Path, outputs: Path, tmp_path: Path) -> None:
    rows, bad = tmp_path / "rows.jsonl", tmp_path / "bad.jsonl"
    rows.write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    bad.write_text('{"messages": []}\n{"x": 1}\n')
    script = CALLER.format(recipe=str(recipe_file), outputs=str(outputs), rows=str(rows), bad=str(bad))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = [line.split()[0] for line in done.stdout.splitlines() if line.split()[:1]]
    assert [word for word in told if word in ("REFUSED", "PREPARED", "MISTAKE", "LAST")] == [
        "REFUSED", "PREPARED", "MISTAKE", "LAST",
    ]  # fmt: skip
    assert "PREPARED 1" in done.stdout
    assert "did you mean `learning_rate`" in done.stdout


@pytest.mark.slow
def test_a_training_returns_its_run_and_an_evaluation_its_results(tmp_path: Path) -> None:
    overrides = {
        "output_dir": str(tmp_path), "train.max_steps": 2, "train.save_canary": False, "eval.tasks": [], "eval.chat": False,
    }  # fmt: skip
    run = api.train("recipes/tiny.yaml", overrides)
    assert isinstance(run, Run)
    assert run.record["status"] == "finished"
    assert (run.final / "config.json").is_file()
    found = api.evaluate(run.path, {"tasks": ["builtin:demo"], "limit": 3})
    assert found["complete"]
    other = Run(run.path.with_name("copy"))
    shutil.copytree(run.path, other.path)
    assert {finding.title for finding in sft.compare(run.path, other.path) if finding.differs} == set()
