"""Two evaluations that were not made alike are refused, and what differs is named: each mismatch is planted by itself."""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from eval.compare.comparison import compare
from eval.compare.settings_match import check_settings_match
from eval.tasks.facts import task_facts
from eval.tasks.load import load_tasks
from eval.tasks.reference import Reference, load_reference
from eval.tasks.settings import Settings, resolve_settings
from eval.tasks.suites import check_tasks
from sft.errors import EvaluationError
from sft.recipe.schema import Evaluation
from tests.eval.compare.lm_eval_files import scored

WriteTask = Callable[..., Path]


def results(settings: Settings, **more: object) -> dict[str, Any]:
    """results.json as `evaluate_model` writes it, read again."""
    measured = {"settings": asdict(settings), "settings_hash": settings.hash}
    written = scored(0.5, "exact_match", config={"model_dtype": f"torch.{settings.dtype}"}, **measured)
    read: dict[str, Any] = json.loads(json.dumps(written | more))
    return read


def asked(task: Path, reference: Reference, **keys: object) -> Settings:
    """The settings of an evaluation, up to the weights: as eval/run.py decides them."""
    evaluation = Evaluation.model_validate({"tasks": (str(task),), **keys})
    selection = check_tasks(evaluation, task.parent)
    settings = resolve_settings(evaluation, selection, reference, on_gpu=False)
    tasks = load_tasks(selection, settings, False, task.parent / "log")
    return replace(settings, loaded=task_facts(settings, tasks))


@pytest.fixture
def task(write_task: WriteTask, tmp_path: Path) -> Path:
    path = write_task("mine", metadata={"version": 1.0})
    examples = path.with_name("examples.jsonl")
    examples.write_text("".join(json.dumps({"question": f"{n}", "answer": "0"}) + "\n" for n in range(8)))
    config = yaml.safe_load(path.read_text()) | {"training_split": "train", "fewshot_split": "train"}
    config["dataset_kwargs"]["data_files"]["train"] = str(examples)
    path.write_text(yaml.safe_dump(config))
    return path


def edit_task(path: Path, **keys: object) -> None:
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | keys))


def without_last_merge(text: str) -> str:
    tokenizer = json.loads(text)
    tokenizer["model"]["merges"].pop()
    return json.dumps(tokenizer)


def refused(base: dict[str, Any], tuned: dict[str, Any]) -> str:
    with pytest.raises(EvaluationError) as error:
        compare(base, tuned, {}, {})
    return str(error.value)


def test_what_was_measured_alike_is_compared(task: Path, reference: Reference) -> None:
    first, second = (results(asked(task, reference, num_fewshot=1)) for _ in range(2))
    assert first == second
    assert compare(first, second, {"arc": []}, {"arc": []}).record["prompting"] is None


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"limit": 2}, ["limit: base None, tuned 2", "loaded.mine.documents_sha256: base "]),
        ({"num_fewshot": 2}, ["num_fewshot: base None, tuned 2", "loaded.mine.num_fewshot: base 0, tuned 2"]),
        ({"dtype": "bfloat16"}, ["dtype: base float32, tuned bfloat16"]),
        ({"seed": 7}, ["seed: base 0, tuned 7"]),
        ({"batch_size": 1}, ["batch_size: base 32, tuned 1"]),
        ({"system_instruction": "Be brief."}, ["system_instruction: base None, tuned Be brief."]),
        ({"apply_chat_template": False}, ["apply_chat_template: base True, tuned False", "add_bos_token: base False"]),
    ],
)
def test_a_key_of_the_recipe_that_differs_is_named(
    keys: dict[str, Any], named: list[str], task: Path, reference: Reference
) -> None:
    message = refused(results(asked(task, reference)), results(asked(task, reference, **keys)))
    for line in named:
        assert f"\n  {line}" in message


@pytest.mark.parametrize(
    ("file", "change", "named"),
    [
        ("chat_template.jinja", lambda text: text + " ", "chat_template_sha256: base "),
        ("generation_config.json", lambda _: '{"eos_token_id": [2]}', "stop_token_ids: base [0, 2], tuned [2]"),
        (
            "config.json",
            lambda text: json.dumps(json.loads(text) | {"max_position_embeddings": 99}),
            "max_length: base ",
        ),
        ("tokenizer.json", without_last_merge, "tokenizer_sha256: base "),
    ],
)
def test_a_file_of_the_model_that_differs_is_named(
    file: str,
    change: Callable[[str], str],
    named: str,
    task: Path,
    reference: Reference,
    tuned_model: Path,
    tmp_path: Path,
) -> None:
    other = tmp_path / "other"
    shutil.copytree(tuned_model, other)
    text = (other / file).read_text()
    assert change(text) != text
    (other / file).write_text(change(text))
    told = refused(results(asked(task, reference)), results(asked(task, load_reference(str(other), None, False))))
    assert f"\n  {named}" in told


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"metadata": {"version": 2.0}}, "loaded.mine.version: base 1.0, tuned 2.0"),
        (
            {"generation_kwargs": {"until": ["."], "max_gen_toks": 4}},
            "loaded.mine.generation_kwargs.until: base ['\\n'], tuned ['.']",
        ),
        ({"doc_to_text": "Q: {{question}}"}, "loaded.mine.definition_sha256: base "),
    ],
)
def test_a_task_that_differs_is_named(keys: dict[str, Any], named: str, task: Path, reference: Reference) -> None:
    before = results(asked(task, reference))
    edit_task(task, **keys)
    assert f"\n  {named}" in refused(before, results(asked(task, reference)))


@pytest.mark.parametrize(("file", "named"), [("mine", "documents_sha256"), ("examples", "examples_sha256")])
def test_documents_and_examples_that_differ_are_named(file: str, named: str, task: Path, reference: Reference) -> None:
    before = results(asked(task, reference, num_fewshot=1))
    path = task.with_name(f"{file}.jsonl")
    path.write_text(path.read_text().replace("2", "two", 1))
    assert f"\n  loaded.mine.{named}: base " in refused(before, results(asked(task, reference, num_fewshot=1)))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"backend": "vllm"}, "backend: base hf, tuned vllm"),
        ({"device": "cuda"}, "device: base cpu, tuned cuda"),
        ({"versions": {"lm_eval": "0.4.9"}}, "versions.lm_eval: base "),
    ],
)
def test_what_else_measured_it_is_named(change: dict[str, Any], named: str, task: Path, reference: Reference) -> None:
    settings = asked(task, reference)
    assert f"\n  {named}" in refused(results(settings), results(replace(settings, **change)))


def test_a_setting_changed_by_hand_in_a_results_file_is_named(task: Path, reference: Reference) -> None:
    settings = asked(task, reference)
    forged = results(settings)
    forged["settings"]["limit"] = 1
    assert "\n  limit: base None, tuned 1" in refused(results(settings), forged)
    assert "settings_hash: base" in refused(results(settings), results(settings, settings_hash="0"))


def test_samples_of_other_documents_are_counted(task: Path, reference: Reference) -> None:
    settings = results(asked(task, reference))
    lines = [{"doc_id": n, "filter": "none", "doc_hash": str(n), "prompt_hash": "p"} for n in range(4)]
    for key, named in (("doc_hash", "documents"), ("prompt_hash", "prompts"), ("target_hash", "targets")):
        changed = [{**line, key: "other"} if n > 1 else line for n, line in enumerate(lines)]
        with pytest.raises(EvaluationError, match=f"The {named} of arc were not the same for base and tuned: 2 differ"):
            check_settings_match(settings, settings, {"arc": lines}, {"arc": changed})
    with pytest.raises(EvaluationError, match="The samples of arc are missing"):
        check_settings_match(settings, settings, {"arc": lines}, {})


def test_weights_in_another_dtype_are_refused(task: Path, reference: Reference) -> None:
    settings = asked(task, reference)
    other = results(settings, config={"model_dtype": "torch.bfloat16"})
    assert "dtype of the weights (set eval.dtype): base torch.float32" in refused(results(settings), other)


def test_batches_of_sizes_that_were_searched_for_and_differ_are_refused(task: Path, reference: Reference) -> None:
    settings = replace(asked(task, reference, dtype="bfloat16"), batch_size="auto")
    both = [results(settings, batch_sizes_found={"mine": [size]}) for size in (64, 16)]
    assert "batch sizes found for mine (set eval.batch_size): base [64], tuned [16]" in refused(*both)
