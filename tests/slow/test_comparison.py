"""A model that has learnt one thing and unlearnt another: the comparison says which, and the gate decides the exit status."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from eval.compare.gate import judge_gate
from eval.run import main as evaluate
from sft.files import read_json
from sft.hub.demo import CITIES, NAMES
from sft.recipe.eval import Gate
from sft.run.directory import Run
from tests.slow.conftest import write_recipe, write_task

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
Command = Callable[..., subprocess.CompletedProcess[str]]

ANSWERS = ("yes", "no")


def multiple_choice(folder: Path, name: str, words: tuple[str, ...] | list[str]) -> tuple[Path, list[tuple[str, int]]]:
    """A task of one word a question, whose answers are yes and no in turn; and the questions with their right answers."""
    questions = [(word, number % 2) for number, word in enumerate(words)]
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps({"question": word, "right": right}) + "\n" for word, right in questions))
    task = write_task(
        folder / f"{name}.yaml",
        data,
        output_type="multiple_choice",
        doc_to_text="{{question}}",
        doc_to_choice=list(ANSWERS),
        doc_to_target="{{right}}",
        target_delimiter="",
        metric_list=[{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    )
    return task, questions


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Trains the right answers about names, and the wrong ones about cities."""
    names, about_names = multiple_choice(tmp_path, "names", NAMES)
    cities, about_cities = multiple_choice(tmp_path, "cities", CITIES)
    taught = about_names + [(word, 1 - right) for word, right in about_cities]
    rows = [
        {"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": ANSWERS[answer]}]}
        for word, answer in taught * 40
    ]
    train = tmp_path / "train.jsonl"
    train.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return write_recipe(
        tmp_path / "job.yaml",
        model={"name_or_path": "builtin:demo"},
        data={"train": str(train), "max_length": 128, "allow": ["duplicate"]},
        train={
            "global_batch_size": 8,
            "learning_rate": 2e-3,
            "num_train_epochs": 3,
            "warmup_steps": 5,
            "adam_beta2": 0.99,
        },
        eval={
            "chat": False,
            "tasks": [str(names), str(cities)],
            "gate": {"max_regression": {"cities": 0.1, "default": 0.0}, "require": {"names": 0.9}},
        },
    )


def test_what_became_worse_is_flagged_and_the_gate_decides_the_exit_status(recipe: Path, command: Command) -> None:
    # Through torchrun, which would start it again.
    done = command([sys.executable, "-m", "sft.launch", recipe, "--max-restarts", "1"], expect=3, NPROC="1")
    run = Run((recipe.parent / "outputs" / "job" / "latest").resolve())
    compared = read_json(run.comparison_file)
    rows = {row["task"]: row for row in compared["metrics"]}
    assert (rows["names"]["verdict"], rows["cities"]["verdict"]) == ("IMPROVED", "REGRESSED")
    assert rows["cities"]["test"] == "paired t"
    assert compared["complete"]
    (failure,) = compared["gate"]["failures"]
    assert failure.startswith("cities (acc): 0.5000 -> 0.")
    assert f"The gate has failed:\n  {failure}" in done.stderr
    assert done.stdout.count("Report: ") == 1
    assert "Restarting all processes" not in done.stderr
    assert "Traceback" not in done.stderr
    record = run.record
    assert (record["status"], record["evaluation"], record["gate"]) == ("finished", "finished", "failed")
    assert run.report_file.is_file()

    flips = [json.loads(line) for line in (run.path / "eval" / "flips.jsonl").read_text().splitlines()]
    lost = next(flip for flip in flips if flip["direction"] == "lost")
    assert (lost["task"], lost["base"]) == ("cities", lost["target"])
    assert {lost["base"], lost["tuned"]} == set(ANSWERS)
    assert CITIES[lost["doc_id"]] in lost["question"]
    counted = {task: counts["gained"] - counts["lost"] for task, counts in compared["flips"].items()}
    assert counted == {task: round(row["difference"] * row["documents"]) for task, row in rows.items()}

    # One word is too little to be found in the training data, and is not said to have been looked for.
    assert compared["contamination"]["tasks"]["names"]["too_short"] == len(NAMES)

    # By what is shown it fails too; over what became better alone it passes.
    judged = judge_gate(Gate(max_regression={"default": 0.0}, judge_by="evidence"), compared)
    assert judged is not None
    assert [failure.split()[0] for failure in judged["failures"]] == ["cities"]
    evaluate([str(run.path), "gate={max_regression: {names: 0.0}, require: {names: 0.9}}"])
    assert run.record["gate"] == "passed"


def test_a_gate_over_what_is_not_measured_stops_a_training_before_it_begins(recipe: Path) -> None:
    words = [sys.executable, "-m", "sft.train", str(recipe), "eval.gate.require.citys=0.5"]
    done = subprocess.run(
        words, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False, timeout=100
    )
    assert done.returncode == 2
    assert "eval.gate: `citys` is not measured; did you mean `cities`?" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (recipe.parent / "outputs" / "job").exists()
