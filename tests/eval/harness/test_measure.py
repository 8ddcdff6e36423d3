import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eval.harness.measure import evaluate_model
from eval.models.placement import Placement
from eval.models.target import Target
from eval.tasks.load import load_tasks
from eval.tasks.reference import Reference
from eval.tasks.settings import Settings, resolve_settings
from eval.tasks.suites import check_tasks
from sft.errors import EvaluationError, UserError
from sft.recipe.schema import Evaluation

WriteTask = Callable[..., Path]
Resolve = Callable[..., Settings]
ON_CPU = Placement(0)


def measure(
    model: Path, reference: Reference, output: Path, *tasks: Path, change: dict[str, Any] | None = None, **keys: object
) -> dict[str, Any]:
    """results.json of a model, asked through the reference's tokenizer."""
    evaluation = Evaluation.model_validate({"tasks": tuple(map(str, tasks)), "confirm_run_task_code": True, **keys})
    selection = check_tasks(evaluation, output.parent)
    settings = replace(resolve_settings(evaluation, selection, reference, on_gpu=False), **(change or {}))
    log = output.with_name("lm_eval.log")
    loaded = load_tasks(selection, settings, evaluation.confirm_run_unsafe_code, log)
    evaluate_model(Target("tuned", str(model)), reference.tokenizer, loaded, settings, output, log, ON_CPU)
    return dict(json.loads((output / "results.json").read_text()))


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def samples(output: Path, task: str) -> list[dict[str, Any]]:
    return read_lines(output / f"samples_{task}.jsonl")


def answers(output: Path, task: str) -> list[str]:
    return [one["resps"][0][0] for one in samples(output, task)]


def test_the_output_is_lm_evals_with_the_settings_beside_it(
    tuned_model: Path, reference: Reference, tmp_path: Path, write_task: WriteTask, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    (output / "old").mkdir(parents=True)
    results = measure(tuned_model, reference, output, write_task("mine"), limit=3)
    assert sorted(path.name for path in output.iterdir()) == ["results.json", "samples_mine.jsonl"]
    assert {
        "results",
        "configs",
        "versions",
        "n-shot",
        "task_hashes",
        "config",
        "transformers_version",
    } <= results.keys()
    assert (results["n-samples"]["mine"], results["failed"], results["prompts_cut"]) == (
        {"original": 4, "effective": 3},
        {},
        [],
    )
    assert results["settings"]["tasks"] == ["mine"]
    assert len(results["settings_hash"]) == 64
    shown = capsys.readouterr()
    assert shown.err == ""
    assert shown.out.startswith("tuned: 3 documents of mine ... exact_match 0.000 (")
    assert len(shown.out.splitlines()) == 1
    assert "Running generate_until requests" in (tmp_path / "lm_eval.log").read_text()


def test_both_models_stop_at_the_same_tokens(
    demo_model: Path, reference: Reference, tmp_path: Path, write_task: WriteTask
) -> None:
    """Whatever the base model's own generation config says: here it would never stop, or at once."""
    task = write_task("mine", generation_kwargs={"until": ["no such word"], "max_gen_toks": 16})
    measure(demo_model, reference, tmp_path / "free", task)
    base = tmp_path / "base"
    shutil.copytree(demo_model, base)
    own = {"eos_token_id": 5, "max_new_tokens": 2, "repetition_penalty": 9.0, "do_sample": True, "temperature": 2.0}
    (base / "generation_config.json").write_text(json.dumps(own))
    measure(base, reference, tmp_path / "again", task)
    assert answers(tmp_path / "again", "mine") == answers(tmp_path / "free", "mine")
    any_token = tuple(range(len(reference.tokenizer)))
    measure(base, reference, tmp_path / "stopped", task, change={"stop_token_ids": any_token})
    for stopped, free in zip(answers(tmp_path / "stopped", "mine"), answers(tmp_path / "free", "mine"), strict=True):
        assert free.startswith(stopped)
        assert len(stopped) < len(free) / 2


@pytest.mark.slow
def test_answers_that_are_cut_off_are_a_warning(
    tuned_model: Path, reference: Reference, tmp_path: Path, write_task: WriteTask, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"question": f"Number {n}?", "answer": str(n)} for n in range(8)]
    letters = write_task("letters", rows, generation_kwargs={"until": ["\n"], "max_gen_toks": 1})
    cut = write_task("cut", rows, generation_kwargs={"until": ["\n"], "max_gen_toks": 8})
    (doubt,) = measure(tuned_model, reference, tmp_path / "out", letters, cut)["doubts"]
    assert "answers to cut are cut off at max_gen_toks" in doubt
    assert f"Warning: {doubt}" in capsys.readouterr().out


def test_a_task_that_fails_costs_only_itself(
    tuned_model: Path, reference: Reference, tmp_path: Path, write_task: WriteTask, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = write_task("broken")
    (broken.parent / "scores.py").write_text("def score(doc, results):\n    raise LookupError('no such table')\n")
    broken.write_text(broken.read_text() + "process_results: !function scores.score\n")
    results = measure(tuned_model, reference, tmp_path / "out", broken, write_task("mine"))
    assert results["failed"] == {"broken": "LookupError: no such table"}
    assert list(results["results"]) == ["mine"]
    assert "broken failed: LookupError: no such table" in capsys.readouterr().out
    with pytest.raises(EvaluationError, match="could not be measured on any task"):
        measure(tuned_model, reference, tmp_path / "none", broken)
    assert not (tmp_path / "none").exists()


def test_a_prompt_that_is_cut_is_told(
    tuned_model: Path, reference: Reference, tmp_path: Path, write_task: WriteTask, capsys: pytest.CaptureFixture[str]
) -> None:
    long = [{"question": "one two three " * 500, "answer": "a", "choices": ["a", "b"]}]
    generate = write_task("generate", long)
    choices = {"output_type": "multiple_choice", "doc_to_choice": "choices", "generation_kwargs": None}
    choose = write_task("choose", long, **choices, doc_to_target="0", metric_list=None)
    results = measure(tuned_model, reference, tmp_path / "out", generate, choose, write_task("short"))
    assert results["prompts_cut"] == ["generate", "choose"]
    assert "prompts of choose longer than 1024 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("weights", [None, b"", b"not weights at all"])
def test_weights_that_cannot_be_loaded_are_one_message(
    weights: bytes | None, tuned_model: Path, reference: Reference, tmp_path: Path, write_task: WriteTask
) -> None:
    folder = tmp_path / "m"
    shutil.copytree(tuned_model, folder)
    (folder / "model.safetensors").unlink()
    if weights is not None:
        (folder / "model.safetensors").write_bytes(weights)
    with pytest.raises(UserError, match=r"^The tuned model .* cannot be loaded: .*$|^.*model\.safetensors .*again\.$"):
        measure(folder, reference, tmp_path / "out", write_task("mine"))


def test_nothing_holds_a_model_that_was_measured(
    tuned_model: Path, reference: Reference, tmp_path: Path, write_task: WriteTask
) -> None:
    """Else its memory is not there for the next one."""
    import gc

    from lm_eval.models.huggingface import HFLM

    measure(tuned_model, reference, tmp_path / "out", write_task("mine"))
    # By the type: to ask torch's deprecated names for their class is a warning.
    assert not [one for one in gc.get_objects() if issubclass(type(one), HFLM)]
