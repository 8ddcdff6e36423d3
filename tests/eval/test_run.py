import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eval.models.target import check_folder
from eval.run import main, parse_evaluation
from sft.errors import EvaluationError, UserError
from sft.files import read_json, write_json
from sft.run.directory import Run
from sft.signals import held_back

WriteTask = Callable[..., Path]


def comparison(run: Run) -> dict[str, Any]:
    """The only one there is: in eval/, or in a folder of its own there where it was not the recipe's."""
    (path,) = (run.path / "eval").glob("**/comparison.json")
    found: dict[str, Any] = read_json(path)
    return found


def test_a_run_is_measured_compared_and_reported(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(run.path)])
    shown = capsys.readouterr().out
    assert "base: 4 documents of demo_extraction ... exact_match 0.000" in shown
    assert "tuned: 4 documents of demo_extraction ... exact_match 0.000" in shown
    for folder in (run.base_evaluation, run.tuned_evaluation):
        assert {path.name for path in folder.iterdir()} == {"results.json", "samples_demo_extraction.jsonl"}
    compared = comparison(run)
    assert compared["complete"]
    (row,) = compared["metrics"]
    assert (row["task"], row["metric"], row["documents"]) == ("demo_extraction", "exact_match", 4)
    assert row["test"] == "paired t"
    assert "exact_match" in run.report_file.read_text()
    settings = [json.loads((path / "results.json").read_text()) for path in (run.base_evaluation, run.tuned_evaluation)]
    assert settings[0]["settings_hash"] == settings[1]["settings_hash"] == compared["settings_hash"]


def test_the_tuned_model_is_measured_in_the_batches_that_were_found_for_the_base(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eval.tasks.settings.CPU_BATCH_SIZE", "auto")  # as on a GPU
    memory = iter([3, 64])
    monkeypatch.setattr("lm_eval.models.huggingface.HFLM._detect_batch_size", lambda *_: next(memory))
    main([str(run.path), "base_cache=false"])
    found = [
        read_json(path / "results.json")["batch_sizes_found"] for path in (run.base_evaluation, run.tuned_evaluation)
    ]
    assert found == [{"demo_extraction": [3]}] * 2


@pytest.mark.slow
def test_two_runs_from_one_base_measure_it_once(
    run: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Run(run.path.with_name("second"))
    shutil.copytree(run.path, other.path)
    main([str(run.path)])
    assert "base: 4 documents" in capsys.readouterr().out
    main([str(other.path)])
    told = capsys.readouterr().out
    assert "base: measured before under the same settings" in told
    assert "eval-base" in told
    assert "base: 4 documents" not in told
    results = [(one.base_evaluation / "results.json").read_bytes() for one in (run, other)]
    assert results[0] == results[1]
    assert comparison(other)["metrics"] == comparison(run)["metrics"]
    # Where the run lies, whatever folder one stands in.
    monkeypatch.chdir(tmp_path.parent)
    assert run.output_dir == run.path.parents[1]
    kept = next((run.output_dir / "eval-base").iterdir())
    shutil.rmtree(kept)
    main([str(other.path)])  # what it has copied is its own
    assert "base: measured before" in capsys.readouterr().out
    main([str(other.path), "base_cache=false"])
    assert "base: 4 documents" in capsys.readouterr().out


def test_what_is_out_of_reach_makes_a_run_incomplete(
    run: Run, write_task: WriteTask, capsys: pytest.CaptureFixture[str]
) -> None:
    far = write_task("far", dataset_path="nobody/nothing", dataset_kwargs=None)
    with pytest.raises(SystemExit) as stop:
        main([str(run.path), f"tasks={write_task('near')},{far}"])
    assert stop.value.code == 1
    assert "The evaluation is incomplete. Not measured:\n  far: " in capsys.readouterr().err
    compared = comparison(run)
    assert not compared["complete"]
    assert list(compared["not_measured"]) == ["far"]
    assert [row["task"] for row in compared["metrics"]] == ["near"]


@pytest.mark.slow
def test_the_base_is_measured_again_on_data_that_changed_in_between(
    run: Run, write_task: WriteTask, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"question": f"Number {n}?", "answer": "1"} for n in range(4)]
    main([str(run.path), f"tasks={write_task('mine', rows)}"])
    rows[2]["question"] = "Which number?"
    capsys.readouterr()
    main([str(run.path), f"tasks={write_task('mine', rows)}"])
    assert "base: 4 documents of mine" in capsys.readouterr().out


def test_one_model_is_measured_into_the_working_directory(
    tuned_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    write_task: WriteTask,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_task("mine")
    main([str(tuned_model), "tasks=tasks/mine.yaml", "eval.limit=2"])
    (results,) = (tmp_path / "outputs" / "eval" / "final").glob("*/results.json")
    assert json.loads(results.read_text())["n-samples"]["mine"]["effective"] == 2
    shown = capsys.readouterr().out
    assert "final: 2 documents of mine" in shown
    assert str(results.parent) in shown


@pytest.mark.parametrize(("number", "message"), [(1, "There is no folder /no/such/model"), (2, "Start it once")])
def test_several_processes_of_a_launcher_are_refused(
    number: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", number), ("LOCAL_WORLD_SIZE", number)):
        monkeypatch.setenv(name, str(value))
    with pytest.raises(EvaluationError, match=message):
        main(["/no/such/model", "tasks=gsm8k"])


def test_settings_of_the_command_line_change_the_recipes(run: Run) -> None:
    write_json(run.path / "run.json", run.record | {"overrides": ["eval.seed=7"]})
    evaluation = parse_evaluation(["tasks=[a, b]", "num_fewshot=2"], run)
    assert (evaluation.tasks, evaluation.limit, evaluation.num_fewshot, evaluation.seed) == (("a", "b"), 4, 2, 7)
    assert parse_evaluation(["tasks=a, b"]).tasks == parse_evaluation(["eval.tasks=[a,b]"]).tasks == ("a", "b")
    assert parse_evaluation(["tasks="]).tasks == parse_evaluation(["tasks=[]"]).tasks == ()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "Name a run's folder or a model first"),
        (["MODEL"], "There is nothing to measure"),
        (["MODEL", "gsm8k"], "'gsm8k' is no setting"),
        (["MODEL", "tasks=gsm8k", "limit=-1", "sed=1"], r"eval\.sed: unknown key; did you mean `seed`"),
        (["MODEL", "tasks=gsm8k", "limit=["], "is not valid YAML"),
        (["/no/such/folder", "tasks=builtin:demo"], "There is no folder /no/such/folder"),
        (["nobody/nothing", "tasks=builtin:demo"], "cannot be loaded"),
        (["EMPTY", "tasks=builtin:demo"], "is not the folder of a run"),
    ],
)
def test_a_mistake_is_one_message_before_anything_is_measured(
    arguments: list[str], told: str, tuned_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    places = {"MODEL": str(tuned_model), "EMPTY": str(tmp_path / "empty")}
    with pytest.raises(UserError, match=told):
        main([places.get(argument, argument) for argument in arguments])
    assert not list(tmp_path.rglob("results.json"))


def test_a_run_without_its_final_model_is_told_its_status(run: Run) -> None:
    shutil.rmtree(run.final)
    run.update(status="interrupted")
    with pytest.raises(EvaluationError, match=r"no final model \(status: interrupted\)"):
        main([str(run.path)])


@pytest.mark.slow
def test_another_evaluation_does_not_replace_the_recipes_own(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(run.path)])
    own = run.comparison_file.read_bytes()
    main([str(run.path), "limit=2"])
    told = capsys.readouterr()
    assert "kept" not in told.err
    assert "This evaluation differs from the recipe in limit: 4 -> 2. Its results go to " in told.out
    assert run.comparison_file.read_bytes() == own
    (other,) = (run.path / "eval").glob("*/comparison.json")
    assert read_json(other)["metrics"][0]["documents"] == 2
    assert "demo_extraction" in run.report_file.read_text()


@pytest.mark.slow
def test_an_evaluation_whose_parent_is_gone_before_it_could_look_ends(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()

    def evaluate() -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "eval.run", str(tmp_path / "no-such-run"), "tasks=x"]
        return subprocess.run(
            command, env=os.environ | {"SFT_PARENT": str(gone.pid)}, capture_output=True, text=True, check=False
        )

    assert evaluate().returncode == -signal.SIGTERM  # before its imports
    with held_back():  # as sft.launch.evaluation starts it: it listens after the imports
        done = evaluate()
    assert done.returncode != 2, done.stderr  # it did not come to look for the folder
    assert "Interrupted by SIGTERM" in done.stderr


@pytest.mark.parametrize(
    ("named", "told"),
    [
        ("outputs/latst", r"There is no folder outputs/latst\."),
        ("a/b/c", r"There is no folder a/b/c\."),
        ("recipes/tiny.yaml", r"a recipe is trained by .* Name its run"),
    ],
)
def test_a_mistyped_run_is_told_of_as_a_folder(
    named: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EvaluationError, match=told):
        main([named, "tasks=gsm8k"])


@pytest.mark.parametrize("named", ["Qwen/Qwen2.5-0.5B", "gpt2", "builtin:demo"])
def test_a_models_id_is_no_folder(named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "Qwen" / "Qwen2.5-1.5B").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    check_folder(named)
