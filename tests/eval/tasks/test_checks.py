from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

from eval.tasks.checks import KEYS, OUTPUT_TYPES
from eval.tasks.metrics import lm_eval_aggregations, lm_eval_metrics
from eval.tasks.suites import check_tasks
from sft.errors import EvaluationError
from sft.recipe.schema import Evaluation

WriteTask = Callable[..., Path]


def problems(path: Path, folder: Path, **keys: str) -> str:
    with pytest.raises(EvaluationError) as error:
        check_tasks(Evaluation.model_validate({"tasks": (str(path),), **keys}), folder)
    return str(error.value)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (
            {"doc_to_txt": "{{question}}", "doc_to_text": None},
            "`doc_to_txt` is no key of a task; did you mean `doc_to_text`",
        ),
        ({"doc_to_text": None}, "it has no `doc_to_text:`"),
        ({"output_type": "generate"}, "`output_type: generate` is none of loglikelihood, multiple_choice"),
        ({"dataset_path": None}, "it has no `dataset_path:`"),
        ({"test_split": None}, "neither `test_split:` nor `validation_split:`"),
        ({"output_type": "multiple_choice"}, "needs `doc_to_choice:`"),
        (
            {"dataset_kwargs": {"data_files": {"test": "/no/such/rows.jsonl"}}},
            "there is no data file /no/such/rows.jsonl",
        ),
        ({"dataset_kwargs": {"data_files": ["/no/such/*.jsonl"]}}, "there is no data file /no/such/*.jsonl"),
        ({"dataset_path": "/no/such/folder", "dataset_kwargs": None}, "there is no `dataset_path: /no/such/folder`"),
        ({"rows": [], "test_split": "tset"}, "mine.jsonl is empty (0 bytes)."),
        (
            {"test_split": "tset"},
            "`test_split: tset` is no split of its data_files (there is test); did you mean `test`?",
        ),
        ({"fewshot_split": "dev"}, "`fewshot_split: dev` is no split of its data_files (there is test)."),
        ({"training_split": "train"}, "`training_split: train` is no split"),
        ({"test_split": None, "validation_split": "valid"}, "`validation_split: valid` is no split"),
        ({"fewshot_config": {"split": "dev"}}, "`fewshot_config: split: dev` is no split"),
        (
            {"dataset_kwargs": {"data_files": __file__}},
            "`test_split: test` is no split of its data_files (there is train).",
        ),
        (
            {"metric_list": [{"metric": "exact_mach"}]},
            "`metric: exact_mach` is no metric of lm_eval; did you mean `exact_match`?",
        ),
        (
            {"metric_list": [{"metric": "accuracy"}], "output_type": "multiple_choice", "doc_to_choice": ["a", "b"]},
            "`metric: accuracy` is none that lm_eval has for `output_type: multiple_choice`",
        ),
        ({"metric_list": [{"metric": "code_eval"}]}, "Write a function that calls it: docs/evaluation-code.md"),
        (
            {"metric_list": [{"metric": "exact_match", "aggregation": "maen"}]},
            "`aggregation: maen` is none of lm_eval; did you mean `mean`?",
        ),
        ({"metric_list": ["acc"]}, "`metric_list:` is a list of entries"),
    ],
)
def test_a_task_that_cannot_be_measured_is_refused_with_its_reason(
    keys: dict[str, object], told: str, write_task: WriteTask, tmp_path: Path
) -> None:
    assert told in problems(write_task("mine", **keys), tmp_path)


@pytest.mark.parametrize(
    "keys",
    [
        # As lm_eval's own mmlusr has them: files of the dataset, not of this machine.
        {"dataset_path": "someone/rows", "dataset_kwargs": {"data_files": {"test": "test/rows.csv"}}},
        {"dataset_path": ".", "dataset_kwargs": {"data_files": {"test": "rows-of-this-folder.csv"}}},
        {"doc_to_text": None, "use_prompt": "promptsource:*", "output_type": "multiple_choice", "metric_list": None},
        {"dataset_kwargs": {"data_files": [__file__]}, "test_split": "train"},
        {"dataset_kwargs": {"data_files": [{"split": "test", "path": __file__}]}},
        # What lm_eval includes may name splits that nobody reads.
        {"fewshot_split": "test", "training_split": "train"},
        {"fewshot_config": {"samples": [{"question": "1?", "answer": "1"}]}, "training_split": "train"},
        # `evaluate` has these, or may find them on the hub.
        {"metric_list": [{"metric": "rouge"}, {"metric": "bleurt"}, {"metric": "someone/score"}, {"metric": "zzz"}]},
        {"metric_list": [{"metric": "exact_mach", "hf_evaluate": True}]},
        {"metric_list": [{"metric": "exact_mach"}], "process_results": "a function gives what it likes"},
    ],
)
def test_a_task_that_can_be_measured_is_taken(keys: dict[str, object], write_task: WriteTask, tmp_path: Path) -> None:
    evaluation = Evaluation(tasks=(str(write_task("mine", **keys)),), confirm_run_task_code=True)
    assert check_tasks(evaluation, tmp_path).tasks


def test_all_that_is_wrong_is_told_at_once(write_task: WriteTask, tmp_path: Path) -> None:
    told = problems(write_task("mine", test_split=None, doc_to_text=None, colour="red"), tmp_path)
    assert len(told.splitlines()) == 3


@pytest.mark.parametrize(
    ("code", "function", "told"),
    [
        ("def answer(doc): return doc\n", "utils.anwser", "has no `anwser`; did you mean `answer`"),
        ("def answer(doc) return doc\n", "utils.answer", "cannot be read as Python"),
        (None, "utils.answer", "there is no "),
        ("", "answer", "names no module"),
    ],
)
def test_a_function_is_looked_for_and_not_run(
    code: str | None, function: str, told: str, write_task: WriteTask, tmp_path: Path
) -> None:
    path = write_task("mine", doc_to_text=None)
    path.write_text(path.read_text() + f"doc_to_text: !function {function}\n")
    if code is not None:
        path.with_name("utils.py").write_text(
            code + "raise SystemExit('imported')\n" * (code != "" and "(doc):" in code)
        )
    assert told in problems(path, tmp_path)


@pytest.mark.parametrize(
    "code",
    [
        "def answer(doc): ...",
        "answer = print",
        "from os import *",
        "from os import getcwd as answer",
        "if True:\n    from os import getcwd as answer",
        "try:\n    import os.path as answer\nexcept ImportError:\n    answer = None",
        "if True:\n    def answer(doc): ...",
        "try:\n    from os import *\nexcept ImportError:\n    pass",
    ],
)
def test_a_function_that_is_there_is_taken(code: str, write_task: WriteTask, tmp_path: Path) -> None:
    path = write_task("mine", doc_to_text=None)
    path.write_text(path.read_text() + "doc_to_text: !function utils.answer\n")
    path.with_name("utils.py").write_text(code)
    assert check_tasks(Evaluation(tasks=(str(path),), confirm_run_task_code=True), tmp_path).tasks


def test_what_a_group_of_ones_own_has_in_it_is_looked_at(write_task: WriteTask, tmp_path: Path) -> None:
    folder = write_task("one", test_split=None).parent
    (folder / "group.yaml").write_text("group: ours\ntask: [inner]\n")
    (folder / "inner.yaml").write_text("group: inner\ntask: [one]\n")
    assert "one.yaml: it has neither `test_split:`" in problems(
        folder / "group.yaml", tmp_path, include_path=str(folder)
    )


def test_the_keys_are_those_of_lm_evals_tasks() -> None:
    from lm_eval.api.task import ALL_OUTPUT_TYPES
    from lm_eval.config.task import TaskConfig

    assert {field.name for field in fields(TaskConfig)} <= KEYS
    assert KEYS - {field.name for field in fields(TaskConfig)} <= {"task", "metadata"}
    assert list(OUTPUT_TYPES) == ALL_OUTPUT_TYPES


def test_the_metrics_that_are_read_from_lm_evals_source_are_those_it_has() -> None:
    import lm_eval.api.metrics  # noqa: F401
    from lm_eval.api.registry import aggregation_registry, metric_registry

    assert lm_eval_metrics() == set(metric_registry)
    assert lm_eval_aggregations() == set(aggregation_registry)


def test_files_without_a_split_are_train() -> None:
    """What the check of splits leans on: `datasets` calls files without a split `train`."""
    from datasets.data_files import sanitize_patterns

    assert list(sanitize_patterns("rows.jsonl")) == list(sanitize_patterns(["rows.jsonl"])) == ["train"]
    assert list(sanitize_patterns([{"split": "test", "path": "rows.jsonl"}])) == ["test"]
