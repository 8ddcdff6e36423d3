"""The user's task files: which tasks they define, and that nothing of them runs without consent."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from jinja2.exceptions import SecurityError, UndefinedError

from eval.tasks.files import LocalTasks, Task
from eval.tasks.load import load_tasks, render_in_sandbox
from eval.tasks.settings import Settings
from eval.tasks.suites import TaskSelection, check_tasks
from sft.errors import EvaluationError
from sft.recipe.schema import Evaluation

WriteTask = Callable[..., Path]


def read(path: Path, text: str) -> Task:
    path.write_text(text)
    return LocalTasks(None, frozenset({"acc"})).read(path, path.parent)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("task: [1, 2\n", "line 2, column 1"),
        ("dataset_path: json\n", "it has no `task:`"),
        ("task: mine\ninclude: mine.yaml\n", "it includes itself"),
        ("task: mine\ninclude: nowhere\n", "nowhere cannot be read"),
        ("task: mine\nmetric_list: &a [*a]\n", "recursion depth"),
    ],
)
def test_a_file_that_is_no_task_is_refused_with_the_place(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(EvaluationError, match=r"mine\.yaml|nowhere") as error:
        read(tmp_path / "mine.yaml", text)
    assert told in str(error.value)


CODE = {
    "a function": "doc_to_text: !function utils.text\n",
    "an included function": "include: functions\n",
    "a metric from the hub": "metric_list: [{metric: someone/score}]\n",
    "a metric of a task inside": "group: mine\ntask: [{task: inner, metric_list: [{metric: someone/score}]}]\n",
    "a metric of another name": "metric_list: [{metric: exact_mach}]\n",
}


@pytest.mark.parametrize("name", CODE)
def test_code_in_a_task_file_needs_consent_and_does_not_run_before(
    name: str, write_task: WriteTask, tmp_path: Path
) -> None:
    path = write_task("mine", doc_to_text=None if "doc_to_text" in CODE[name] else "{{question}}", metric_list=None)
    path.write_text(path.read_text() + CODE[name])
    (path.parent / "functions").write_text("process_docs: !function utils.text\n")
    (path.parent / "utils.py").write_text("raise SystemExit('ran')\ndef text(doc): ...\n")
    (path.parent / "group.yaml").write_text("group: ours\ntask: [mine]\n")
    for tasks, folder in (((str(path),), None), (("ours",), str(path.parent))):  # by itself, and in a group
        evaluation = Evaluation(tasks=tasks, include_path=folder)
        with pytest.raises(EvaluationError, match=r"comes with its file.*set eval\.confirm_run_task_code=true") as told:
            check_tasks(evaluation, tmp_path)
        assert ("did you mean `exact_match`" in str(told.value)) == ("another name" in name)
        assert check_tasks(evaluation.model_copy(update={"confirm_run_task_code": True}), tmp_path).tasks


def test_metrics_of_lm_eval_and_of_evaluate_are_no_code_of_others(tmp_path: Path) -> None:
    assert read(tmp_path / "a.yaml", "task: a\nmetric_list: [{metric: acc}, {metric: rouge}]\n").code == ()
    given_back = "task: a\nprocess_results: x\nmetric_list: [{metric: mine}]\n"
    assert read(tmp_path / "a.yaml", given_back).code == ()


@pytest.mark.parametrize("keys", [{"unsafe_code": True}, {"metric_list": [{"metric": "code_eval"}]}])
def test_a_file_that_runs_generated_code_needs_consent(
    keys: dict[str, object], write_task: WriteTask, tmp_path: Path
) -> None:
    path = str(write_task("mine", **keys))
    with pytest.raises(EvaluationError, match=r"runs Python code that the model writes"):
        check_tasks(Evaluation(tasks=(path,)), tmp_path)
    assert check_tasks(Evaluation(tasks=(path,), confirm_run_unsafe_code=True), tmp_path).runs_code


@pytest.mark.parametrize("consent", [True, False])
def test_what_the_shell_has_set_is_no_consent(
    consent: bool,
    write_task: WriteTask,
    settings: Callable[..., Settings],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_ALLOW_CODE_EVAL", "1")
    task = LocalTasks(None, frozenset()).read(path := write_task("plain"), path.parent)
    load_tasks(TaskSelection((task,)), settings("plain"), consent, tmp_path / "log")
    assert os.environ["HF_ALLOW_CODE_EVAL"] == str(int(consent))


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ ''|attr('__class__') }}{{ ('' | attr('__class__')).__mro__ }}",
    ],
)
def test_a_tasks_template_cannot_reach_python(template: str) -> None:
    from lm_eval import utils

    render_in_sandbox()
    with pytest.raises((SecurityError, UndefinedError)):
        utils.apply_template(template, {})
