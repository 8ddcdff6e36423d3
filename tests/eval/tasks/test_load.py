"""What cannot be measured is refused as the tasks load, in one message, before any weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from eval.tasks.load import LoadedTasks, load_tasks
from eval.tasks.settings import Settings
from eval.tasks.suites import check_tasks
from sft.errors import EvaluationError
from sft.recipe.schema import Evaluation

Resolve = Callable[..., Settings]
WriteTask = Callable[..., Path]
CHOICE = {"output_type": "multiple_choice", "doc_to_choice": ["a", "b"], "generation_kwargs": None, "metric_list": None}


def load(settings: Settings, tmp_path: Path, *tasks: Path | str, **keys: object) -> LoadedTasks:
    evaluation = Evaluation.model_validate({"tasks": tuple(map(str, tasks)), "confirm_run_task_code": True, **keys})
    selection = check_tasks(evaluation, tmp_path)
    return load_tasks(selection, settings, evaluation.confirm_run_unsafe_code, tmp_path / "log")


def test_the_answer_length_is_the_recipes_else_the_tasks_else_ours(
    settings: Resolve, tmp_path: Path, write_task: WriteTask
) -> None:
    tasks = [
        write_task("own", generation_kwargs={"until": ["\n"], "max_gen_toks": 31}),
        write_task("alias", generation_kwargs={"until": ["\n"], "max_new_tokens": 33}),
        write_task("unsaid", generation_kwargs={"until": ["\n"]}),
        write_task("nothing", generation_kwargs=None),
    ]

    def lengths(**keys: object) -> list[int]:
        loaded = load(settings(**keys), tmp_path, *tasks)
        return [int(task.config.generation_kwargs["max_gen_toks"]) for (task,) in loaded.by_name.values()]

    assert lengths() == [31, 33, 512, 512]  # half of the demo's context, not lm_eval's 256
    assert lengths(max_gen_toks=50) == [50] * 4
    with pytest.raises(EvaluationError, match="answers of 1024 tokens, and a context of 1024"):
        lengths(max_gen_toks=1024)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"doc_to_txt": "{{question}}"}, "unexpected keyword argument 'doc_to_txt'"),
        ({"doc_to_text": "{{no_such_column.deeper}}"}, "'no_such_column' is undefined"),
        ({"test_split": "tset"}, "KeyError: 'tset'. Check its splits"),
        ({"dataset_kwargs": {"data_files": {"test": "/no/such/rows.jsonl"}}}, "/no/such/rows.jsonl"),
        (
            {"metric_list": [{"metric": "exact_match", "aggregation": "maen"}]},
            "aggregation:` of its metric exact_match",
        ),
        (CHOICE | {"doc_to_choice": None, "doc_to_target": "0"}, "document 1: TypeError"),
        (
            CHOICE | {"doc_to_target": "{{answer}}"},
            "2 right answers of 4 documents are none of their choices: document 3 has 2",
        ),
        (
            CHOICE
            | {
                "doc_to_target": "0",
                "metric_list": [{"metric": "f11", "aggregation": "mean", "higher_is_better": True}],
            },
            "`metric: f11` is none that lm_eval has for multiple_choice; did you mean `f1`",
        ),
        ({"num_fewshot": 9, "fewshot_split": "test"}, "mine has 4 documents for examples, and num_fewshot is 9"),
    ],
)
def test_a_task_that_cannot_be_measured_is_refused_with_its_reason(
    keys: dict[str, Any], told: str, settings: Resolve, write_task: WriteTask, tmp_path: Path
) -> None:
    with pytest.raises(EvaluationError) as error:
        load(settings(), tmp_path, write_task("mine", **keys))
    assert "mine" in str(error.value)
    assert told in str(error.value)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("name", ["../../outside", ".hidden"])
def test_a_task_is_not_named_like_a_path(name: str, write_task: WriteTask, settings: Resolve, tmp_path: Path) -> None:
    path = write_task("plain")
    path.write_text(path.read_text().replace("task: plain", f"task: '{name}'"))
    with pytest.raises(EvaluationError, match=r"cannot be measured: its samples go to a file of that name"):
        load(settings(name), tmp_path, path)


def test_examples_that_a_task_refuses_are_refused(settings: Resolve, tmp_path: Path, write_task: WriteTask) -> None:
    path = write_task("bare", num_fewshot=0)
    with pytest.raises(EvaluationError, match=r"eval\.num_fewshot=3, and bare is defined without examples"):
        load(settings(num_fewshot=3), tmp_path, path)
    assert load(settings(num_fewshot=0), tmp_path, path).by_name


@pytest.mark.parametrize(
    ("shots", "keys", "refused"),
    [
        (2, {}, True),
        (None, {"num_fewshot": 2}, True),
        (None, {}, False),
        (2, {"fewshot_split": "test"}, False),  # named so, lm_eval leaves the document that is asked out
        (2, {"test_split": None, "validation_split": "test", "fewshot_split": "test"}, True),
        (2, {"fewshot_config": {"samples": [{"question": "?", "answer": "!"}] * 2}}, False),
    ],
)
def test_a_question_does_not_come_with_its_own_answer(
    shots: int | None, keys: dict[str, Any], refused: bool, settings: Resolve, tmp_path: Path, write_task: WriteTask
) -> None:
    path = write_task("mine", **keys)
    config = yaml.safe_load(path.read_text())
    data = config["dataset_kwargs"]["data_files"]
    path.write_text(yaml.safe_dump(config | {"dataset_kwargs": {"data_files": data | {"other": data["test"]}}}))
    if refused:
        with pytest.raises(EvaluationError, match="mine has no documents for examples but those it measures"):
            load(settings(num_fewshot=shots), tmp_path, path)
    else:
        assert load(settings(num_fewshot=shots), tmp_path, path).by_name


def test_a_dataset_or_a_metric_out_of_reach_costs_only_its_task(
    settings: Resolve, tmp_path: Path, write_task: WriteTask, capsys: pytest.CaptureFixture[str]
) -> None:
    near = write_task("near")
    far = write_task("far", dataset_path="nobody/nothing", dataset_kwargs=None)
    unscored = write_task("unscored", metric_list=[{"metric": "nobody/zzz", "aggregation": "mean"}])
    unscored.write_text(
        unscored.read_text().replace("aggregation: mean", "aggregation: mean\n  higher_is_better: true")
    )
    loaded = load(settings(), tmp_path, near, far, unscored)
    assert list(loaded.by_name) == ["near"]
    assert "Couldn't reach 'nobody/nothing'" in loaded.missing["far"]
    assert "`metric: nobody/zzz` is none of lm_eval" in loaded.missing["unscored"]
    assert "Out of reach, and left out: far, unscored. Load them once" in capsys.readouterr().err
    with pytest.raises(EvaluationError, match=r"No task can be measured:\n  far: .*\nLoad them once"):
        load(settings(), tmp_path, far)


@pytest.mark.slow  # lm_eval reads all its task files for a group
def test_what_is_in_a_group_is_checked_as_well(settings: Resolve, tmp_path: Path, write_task: WriteTask) -> None:
    folder = write_task("coded", unsafe_code=True).parent
    write_task("one")
    (folder / "ours.yaml").write_text("group: ours\ntask: [coded, one]\n")
    with pytest.raises(EvaluationError, match="runs Python code that the model writes"):
        load(settings(), tmp_path, "ours", include_path=str(folder))
    with pytest.raises(EvaluationError, match="one is part of ours and of one"):
        load(settings(), tmp_path, "ours", "one", include_path=str(folder))
    two = write_task("two", tag="both")
    (folder / "tagged.yaml").write_text("group: tagged\ntask: [both]\n")
    with pytest.raises(EvaluationError, match="two is part of tagged and of two"):
        load(settings(), tmp_path, "tagged", two.stem, include_path=str(folder))
