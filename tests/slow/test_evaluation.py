"""Evaluations of real models: on several processes, how they end, and what the comparison and the gate make of them."""

import json
import shutil
import signal
import sys
from pathlib import Path

import psutil
import pytest
import yaml

from eval.compare.gate import judge_gate
from eval.run import main as evaluate
from sft.files import read_json, write_json
from sft.hub.demo import CITIES, NAMES, make_demo
from sft.recipe.eval import Gate
from sft.run.directory import Run
from tests.slow.conftest import Start, until, write_recipe, write_task
from tests.slow.engine_runs import EngineRuns
from tests.slow.ranks import Ranks

pytestmark = pytest.mark.slow

CODE = """
import time
from pathlib import Path

def fails_on_the_second(doc, results):
    if doc["number"] == 1:
        raise ValueError("no score for document 1")
    return {"acc": 1.0}

def takes_long(doc, results):
    Path(__file__).with_name("started").touch()
    time.sleep(600)
    return {"acc": 1.0}
"""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run of the demo, and tasks beside it."""
    outputs = tmp_path / "outputs"
    run = Run(outputs / "tiny" / "first")
    run.checkpoints.mkdir(parents=True)
    demo = make_demo(outputs)
    shutil.copytree(demo.model, run.final)
    recipe = {
        "model": {"name_or_path": "builtin:demo"},
        "data": {"train": "builtin:demo"},
        "train": {"global_batch_size": 8},
    }
    run.recipe_file.write_text(write_recipe(tmp_path / "recipe.yaml", **recipe).read_text())
    write_json(
        run.path / "run.json",
        {
            "status": "finished",
            "overrides": [],
            "base_model": {"name_or_path": "builtin:demo", "revision": None, "path": str(demo.model)},
        },
    )
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "scores.py").write_text(CODE)
    return run


def write_own_task(run: Run, name: str, numbers: range, score: str | None = None, **keys: object) -> Path:
    folder = run.path.parents[2] / "tasks"
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps({"number": n, "question": f"Number {n}?"}) + "\n" for n in numbers))
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data), "train": str(data)}},
        "test_split": "test",
        "training_split": "train",
        "fewshot_split": "train",
        "num_fewshot": 2,
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{number}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 4},
        "metric_list": [{"metric": "acc" if score else "exact_match", "aggregation": "mean", "higher_is_better": True}],
    } | keys
    text = yaml.safe_dump(task) + (f"process_results: !function scores.{score}\n" if score else "")
    (folder / f"{name}.yaml").write_text(text)
    return folder / f"{name}.yaml"


def test_an_error_costs_the_task_and_is_reported_once(run: Run, ranks: Ranks) -> None:
    broken = write_own_task(run, "broken", range(4), score="fails_on_the_second")
    whole = write_own_task(run, "whole", range(3))
    words = ["eval.run", run.path, "processes=2", "confirm_run_task_code=true", f"tasks={broken},{whole}"]
    printed = ranks.run(1, words, expect=1)
    assert printed["stdout"].count("tuned: broken failed: ValueError: no score for document 1") == 1
    assert "tuned: 3 documents of whole" in printed["stdout"]
    assert printed["stderr"].count("The evaluation is incomplete. Not measured:\n  broken: ValueError: no score") == 1
    assert "Traceback" not in printed["stderr"]
    (compared,) = run.path.glob("eval/**/comparison.json")
    assert [row["task"] for row in json.loads(compared.read_text())["metrics"]] == ["whole"]


@pytest.mark.extra  # test_interruption.py stops an evaluation, and resumes it
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_signal_ends_all_processes(number: signal.Signals, status: int, run: Run, start: Start) -> None:
    task = write_own_task(run, "slow", range(4), score="takes_long")
    words = [sys.executable, "-m", "eval.run", run.path, f"tasks={task}", "processes=2", "confirm_run_task_code=true"]
    process = start(words)
    until((task.parent / "started").exists, process)
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    process.send_signal(number)
    printed = process.communicate()[0]
    assert process.returncode == status, printed
    assert ("Interrupted by SIGTERM" in printed) == (number == signal.SIGTERM)
    assert "Traceback" not in printed
    until(lambda: not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children))


def test_base_and_tuned_are_both_asked_with_new_tokens(runs: EngineRuns, ranks: Ranks) -> None:
    run = runs("2 ZeRO-3", "packed, new tokens")
    ranks.run(1, ["eval.run", run.path, "tasks=builtin:demo", "limit=4"])
    (compared,) = run.path.glob("eval/**/comparison.json")
    assert json.loads(compared.read_text())["not_measured"] == {}
    for model in ("base", "tuned"):
        (file,) = (compared.parent / model).glob("samples_*.jsonl")
        prompts = [json.loads(line)["arguments"] for line in file.read_text().splitlines()]
        assert all("<|a|>assistant" in json.dumps(prompt) for prompt in prompts)


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
        data={"train": str(train), "max_length": 128, "allow": ["duplicate"]},
        train={
            "global_batch_size": 8,
            "learning_rate": 2e-3,
            "num_train_epochs": 2,
            "warmup_steps": 5,
            "adam_beta2": 0.99,
        },
        tracking={"report_to": ["tensorboard"]},
        eval={
            "chat": {"max_new_tokens": 8},
            "tasks": [str(names), str(cities)],
            "every_tasks": [str(names), str(cities)],
            "every_steps": 39,  # and at the last step, the 78th
            "batch_size": 8,
            "gate": {"max_regression": {"cities": 0.1, "default": 0.0}, "require": {"names": 0.9}},
        },
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # tensorboard's own, where it reads
def test_what_became_worse_is_flagged_and_the_gate_decides_the_exit_status(recipe: Path, ranks: Ranks) -> None:
    """The last figures measured during the training are those of the evaluation after it."""
    done = ranks.run(1, ["sft.train", recipe], expect=3, finish=True)
    run = Run((recipe.parent / "outputs" / "job" / "latest").resolve())
    compared = read_json(run.comparison_file)
    rows = {row["task"]: row for row in compared["metrics"]}
    assert (rows["names"]["verdict"], rows["cities"]["verdict"]) == ("IMPROVED", "REGRESSED")
    assert rows["cities"]["test"] == "paired t"
    assert compared["complete"]
    (failure,) = compared["gate"]["failures"]
    assert failure.startswith("cities (acc): 0.5000 -> 0.")
    assert f"The gate has failed:\n  {failure}" in done["stderr"]
    assert done["stdout"].count("Report: ") == 1
    assert done["stdout"].index("Chat: base and tuned") < done["stdout"].index("Evaluation: base and tuned")
    assert "Traceback" not in done["stderr"]
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

    tuned = read_json(run.tuned_evaluation / "results.json")["results"]
    during = [json.loads(line) for line in (run.path / "eval" / "during.jsonl").read_text().splitlines()]
    assert [line["step"] for line in during] == [0, 39, 78]
    last = during[-1]["results"]
    assert {name: {key: tuned[name][key] for key in figures} for name, figures in last.items()} == last
    chat = read_json(run.path / "eval" / "chat.json")["checks"]  # its prompts were answered before
    assert chat["base"]["answers"] == chat["tuned"]["answers"] > 0
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    curve = [(event.step, event.value) for event in events.Scalars("eval/names/acc")]
    assert [step for step, _ in curve] == [line["step"] for line in during]
    assert curve[-1][1] == pytest.approx(last["names"]["acc,none"], rel=1e-6)


def test_a_gate_over_what_is_not_measured_stops_a_training_before_it_begins(recipe: Path, ranks: Ranks) -> None:
    done = ranks.run(1, ["sft.train", recipe, "eval.gate.require.citys=0.5"], expect=2)
    assert "eval.gate: `citys` is not measured; did you mean `cities`?" in done["stderr"]
    assert "Traceback" not in done["stderr"]
    assert not (recipe.parent / "outputs" / "job").exists()
