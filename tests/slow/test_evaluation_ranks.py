"""Evaluations on several processes: what they measure, and how they end."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from sft.files import write_json
from sft.hub.demo import make_demo
from sft.run.directory import Run
from tests.slow.conftest import write_recipe
from tests.slow.ranks import Ranks

pytestmark = pytest.mark.slow

CODE = """
import time
from pathlib import Path

def fails_on_the_second(doc, results):
    if doc["number"] == 1:
        raise ValueError("no score for document 1")
    return {"acc": 1.0}

def takes_a_minute(doc, results):
    Path(__file__).with_name("started").touch()
    time.sleep(60)
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


def write_task(run: Run, name: str, numbers: range, score: str | None = None, **keys: object) -> Path:
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


def samples(run: Run, task: str) -> list[dict[str, Any]]:
    (path,) = run.path.glob(f"eval/**/tuned/samples_{task}.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_document_is_asked_once_with_the_same_prompt_and_written_in_order(run: Run, ranks: Ranks) -> None:
    task = write_task(run, "mine", range(7))
    written = []
    for number in (1, 3):
        ranks.run(number, ["eval.run", run.path, f"tasks={task}", "base_cache=false"])
        written.append(samples(run, "mine"))
        shutil.rmtree(run.path / "eval")
    assert [one["doc_id"] for one in written[1]] == list(range(7))
    assert all(len(answers) == 1 for one in written[1] for answers in one["resps"])
    assert written[0] == written[1]
    assert len({one["prompt_hash"] for one in written[0]}) == 7


def test_an_error_costs_the_task_and_is_reported_once(run: Run, ranks: Ranks) -> None:
    broken = write_task(run, "broken", range(4), score="fails_on_the_second")
    whole = write_task(run, "whole", range(3))
    words = ["eval.run", run.path, "processes=2", "confirm_run_task_code=true", f"tasks={broken},{whole}"]
    shown = ranks.run(1, words, expect=1)
    assert shown["stdout"].count("tuned: broken failed: ValueError: no score for document 1") == 1
    assert "tuned: 3 documents of whole" in shown["stdout"]
    assert shown["stderr"].count("The evaluation is incomplete. Not measured:\n  broken: ValueError: no score") == 1
    assert "Traceback" not in shown["stderr"]
    (compared,) = run.path.glob("eval/**/comparison.json")
    assert [row["task"] for row in json.loads(compared.read_text())["metrics"]] == ["whole"]


def test_a_mistake_is_told_once_by_all_processes(run: Run, ranks: Ranks) -> None:
    shutil.rmtree(run.final)
    told = ranks.run(2, ["eval.run", run.path, f"tasks={write_task(run, 'mine', range(4))}"], expect=2)
    assert (told["stdout"] + told["stderr"]).count("has no final model") == 1


def start(run: Run, task: Path) -> subprocess.Popen[str]:
    """As a user does, and wait until a task is being scored."""
    words = [
        sys.executable,
        "-m",
        "eval.run",
        str(run.path),
        f"tasks={task}",
        "processes=2",
        "confirm_run_task_code=true",
    ]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 240
    while not (task.parent / "started").exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return process


def helper_of(parent: int) -> int:
    """The helper of an evaluation, which has children of no other kind but multiprocessing's resource tracker."""
    children = map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split())
    (helper,) = (one for one in children if b"resource_tracker" not in Path(f"/proc/{one}/cmdline").read_bytes())
    return helper


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_signal_ends_all_processes(number: signal.Signals, status: int, run: Run) -> None:
    process = start(run, write_task(run, "slow", range(4), score="takes_a_minute"))
    helper = helper_of(process.pid)
    process.send_signal(number)
    shown = process.communicate(timeout=60)[0]
    assert process.returncode == status, shown
    assert ("Interrupted by SIGTERM" in shown) == (number == signal.SIGTERM)
    assert "Traceback" not in shown
    time.sleep(1)
    state = Path(f"/proc/{helper}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"  # nobody may have reaped it
