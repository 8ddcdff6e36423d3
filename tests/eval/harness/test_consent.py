"""Code that a model wrote runs on explicit consent alone, and a task's templates in a sandbox."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from jinja2 import Environment
from jinja2.exceptions import SecurityError, UndefinedError
from jinja2.sandbox import SandboxedEnvironment

from eval.tasks.files import LocalTasks
from eval.tasks.load import load_tasks, render_in_sandbox
from eval.tasks.settings import Settings
from eval.tasks.suites import TaskSelection, check_tasks
from sft.errors import EvaluationError
from sft.recipe.schema import Evaluation

MakeSettings = Callable[..., Settings]
WriteTask = Callable[..., Path]
CODE = {"metric_list": [{"metric": "code_eval"}]}


def load(path: Path, settings: Settings, run_code: bool, log: Path) -> None:
    selection = TaskSelection((LocalTasks(None).read(path, path.parent),), ())
    load_tasks(selection, settings, run_code, log / "log")


@pytest.mark.parametrize("name", ["humaneval", "mbpp"])
def test_a_task_that_runs_code_is_refused_without_consent(name: str, tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match=rf"`{name}` runs Python code.*eval.confirm_run_unsafe_code=true"):
        check_tasks(Evaluation(tasks=(name,)), tmp_path)
    assert check_tasks(Evaluation(tasks=(name,), confirm_run_unsafe_code=True), tmp_path).tasks


def test_a_task_that_hides_it_is_known_by_its_metric(write_task: WriteTask, tmp_path: Path) -> None:
    path = write_task("harmless", **CODE, unsafe_code=False)
    with pytest.raises(EvaluationError, match=r"runs Python code that the model writes"):
        check_tasks(Evaluation(tasks=(str(path),)), tmp_path)


@pytest.mark.parametrize("exported", ["1", None])
def test_what_the_shell_has_set_is_no_consent(
    exported: str | None,
    write_task: WriteTask,
    settings: MakeSettings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_ALLOW_CODE_EVAL", exported or "")
    load(write_task("plain"), settings("plain"), False, tmp_path)
    assert os.environ["HF_ALLOW_CODE_EVAL"] == "0"


def test_consent_is_passed_on(
    write_task: WriteTask, settings: MakeSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_ALLOW_CODE_EVAL", raising=False)
    load(write_task("plain"), settings("plain"), True, tmp_path)
    assert os.environ["HF_ALLOW_CODE_EVAL"] == "1"


ESCAPES = {
    "to the classes of Python": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "to a function's globals": "{{ cycler.__init__.__globals__.os.system('true') }}",
    "by a filter": "{{ ''|attr('__class__') }}{{ ('' | attr('__class__')).__mro__ }}",
}


@pytest.mark.parametrize("template", ESCAPES.values(), ids=list(ESCAPES))
def test_a_tasks_template_cannot_reach_python(template: str) -> None:
    from lm_eval import utils

    render_in_sandbox()
    with pytest.raises((SecurityError, UndefinedError)):
        utils.apply_template(template, {})


def test_lm_eval_renders_as_before() -> None:
    """Every option of its environment, so that one which an upgrade adds is noticed."""
    from lm_eval import utils

    render_in_sandbox()
    sandbox = utils.env
    plain = Environment(loader=sandbox.loader, undefined=sandbox.undefined, keep_trailing_newline=True)
    assert isinstance(sandbox, SandboxedEnvironment)
    options = "block_start_string variable_start_string trim_blocks lstrip_blocks newline_sequence keep_trailing_newline autoescape"
    for name in [*options.split(), "finalize", "extensions"]:
        assert getattr(sandbox, name) == getattr(plain, name), name
    assert set(sandbox.filters) - set(plain.filters) == {"regex_replace"}
    row = {"question": "a\n", "choices": ["b", "c"]}
    template = "{{question.strip()}}: {% for choice in choices %}{{loop.index}} {{choice}} {% endfor %}\n"
    assert utils.apply_template(template, row) == "a: 1 b 2 c \n"
    assert utils.apply_template("{{question|regex_replace('a', 'z')}}", row) == "z\n"


def test_lm_evals_own_environment_is_as_the_sandbox_takes_it_over() -> None:
    """What lm_eval gives its environment, read in its source: nothing but these three and the filter."""
    import inspect

    from lm_eval import utils

    source = "".join(inspect.getsource(utils).split())
    assert "env=Environment(loader=BaseLoader,undefined=StrictUndefined,keep_trailing_newline=True)" in source
    assert source.count("env.filters[") == 1


@pytest.mark.parametrize("name", ["../../outside", "/tmp/outside", ".hidden", "a/b"])
def test_a_task_is_not_named_like_a_path(
    name: str, write_task: WriteTask, settings: MakeSettings, tmp_path: Path
) -> None:
    path = write_task("plain")
    path.write_text(path.read_text().replace("task: plain", f"task: '{name}'"))
    with pytest.raises(EvaluationError, match=r"cannot be measured: its samples go to a file of that name"):
        load(path, settings(name), False, tmp_path)
