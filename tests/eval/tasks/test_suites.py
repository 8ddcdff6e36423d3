import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import get_args

import pytest

from eval.sandbox.runner import LIMITS
from eval.tasks.index import known_tasks
from eval.tasks.reference import Reference
from eval.tasks.settings import Settings, resolve_settings
from eval.tasks.suites import SUITES, check_tasks
from sft.errors import EvaluationError
from sft.recipe.schema import Evaluation


def check(tmp_path: Path, **keys: object) -> list[str]:
    return [task.name for task in check_tasks(Evaluation.model_validate(keys, strict=False), tmp_path).tasks]


@pytest.fixture
def settings_of(reference: Reference, tmp_path: Path) -> Callable[..., Settings]:
    def resolve(**keys: object) -> Settings:
        evaluation = Evaluation.model_validate(keys)
        return resolve_settings(evaluation, check_tasks(evaluation, tmp_path), reference, on_gpu=False)

    return resolve


def test_the_suites_exist_in_the_installed_lm_eval(tmp_path: Path) -> None:
    for suite in SUITES.values():
        assert suite.tasks
        assert {*suite.tasks, *suite.without_template} <= known_tasks().names
    assert check(tmp_path, suite="leaderboard", tasks=["leaderboard_ifeval"]) == [
        "leaderboard_ifeval",
        *(name for name in SUITES["leaderboard"].tasks if name != "leaderboard_ifeval"),
    ]


def test_every_suite_can_be_asked_for_and_no_other() -> None:
    allowed = next(one for one in get_args(Evaluation.model_fields["suite"].annotation) if one is not type(None))
    assert list(get_args(allowed)) == list(SUITES)


def test_a_suites_own_limit_is_part_of_the_settings(settings_of: Callable[..., Settings]) -> None:
    assert settings_of(suite="quick").limit == 100
    assert settings_of(suite="quick", limit=7).limit == 7
    assert settings_of(suite="chat").limit is None
    hashes = [settings_of(suite="quick", **keys).hash for keys in ({}, {"limit": 100}, {"limit": 7})]
    assert hashes[0] == hashes[1] != hashes[2]


def test_the_code_suite_follows_the_chat_template(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match="runs Python code that the model writes"):
        check(tmp_path, suite="code")
    assert check(tmp_path, suite="code", confirm_run_unsafe_code=True) == ["humaneval_instruct", "mbpp"]
    asked_plainly = {"suite": "code", "confirm_run_unsafe_code": True, "apply_chat_template": False}
    assert check(tmp_path, **asked_plainly) == ["humaneval", "mbpp"]


def test_what_decides_the_score_of_code_is_part_of_the_settings(settings_of: Callable[..., Settings]) -> None:
    """Limits and Python: where one is changed, what was measured before is not compared."""
    assert settings_of(tasks=("gsm8k",)).generated_code is None
    decides = settings_of(tasks=("humaneval",), confirm_run_unsafe_code=True).generated_code
    assert decides == asdict(LIMITS) | {"python": platform.python_version()}


def test_a_mistyped_task_is_refused_with_the_closest_name(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match=r"`gsm8kk` is not a task of lm_eval .* did you mean `gsm8k`"):
        check(tmp_path, tasks=["gsm8kk"])


def test_a_name_of_ones_own_comes_before_lm_evals(tmp_path: Path, write_task: Callable[..., Path]) -> None:
    path = write_task("gsm8k")
    (tmp_path / "tasks" / "recipe.yaml").write_text("model: not a task\n")
    selection = check_tasks(Evaluation(tasks=("gsm8k",), include_path=str(path.parent)), tmp_path)
    assert [task.given for task in selection.tasks] == [str(path)]
    assert selection.all_local


def test_a_path_names_one_file_whatever_lies_beside_it(tmp_path: Path, write_task: Callable[..., Path]) -> None:
    path = write_task("mine")
    other = path.with_name("other.yaml")
    other.write_text(path.read_text() + "num_fewshot: 3\n")
    selection = check_tasks(Evaluation(tasks=(str(other),)), tmp_path)
    assert [(task.name, task.given) for task in selection.tasks] == [("mine", str(other))]
    with pytest.raises(EvaluationError, match="`mine` is defined by 2 files"):
        check(tmp_path, tasks=["mine"], include_path=str(path.parent))
    with pytest.raises(EvaluationError, match="named twice, with two definitions"):
        check(tmp_path, tasks=[str(path), str(other)])


def test_a_group_of_ones_own_is_found_by_its_folder(tmp_path: Path, write_task: Callable[..., Path]) -> None:
    folder = write_task("one").parent
    (folder / "group.yaml").write_text("group: ours\ntask: [one]\n")
    for asked in ("ours", str(folder / "group.yaml")):
        selection = check_tasks(Evaluation(tasks=(asked,), include_path=str(folder)), tmp_path)
        assert [task.given for task in selection.tasks] == ["ours"]
        assert selection.include_paths == (folder,)


def test_a_broken_file_is_told_where_its_task_is_missing(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("task: mine\n  metric: x\n")
    with pytest.raises(
        EvaluationError, match=r"`mine` is not a task(.|\n)*mine.yaml is not a valid task file(.|\n)*line 2"
    ):
        check(tmp_path, tasks=["mine"], include_path=str(tmp_path))


def test_a_check_takes_well_under_a_second(tmp_path: Path) -> None:
    known_tasks()  # on a fresh checkout the names are read here
    code = (
        "import sys, time; started = time.perf_counter()\n"
        "from pathlib import Path; from eval.tasks.suites import check_tasks; from sft.recipe.schema import Evaluation\n"
        f"check_tasks(Evaluation(tasks=('gsm8k',), suite='leaderboard'), Path({str(tmp_path)!r}))\n"
        "assert not {'torch', 'transformers', 'datasets', 'lm_eval'} & set(sys.modules)\n"
        "print(time.process_time())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 1


@pytest.mark.parametrize(
    ("tasks", "told"),
    [
        (["mmlu", "mmlu_stem"], r"mmlu_stem and \d+ more are part of mmlu and of mmlu_stem"),
        (["leaderboard_ifeval", "leaderboard"], "leaderboard_ifeval is part of leaderboard_ifeval and of leaderboard"),
    ],
)
def test_groups_that_share_tasks_are_refused_before_any_is_loaded(tasks: list[str], told: str, tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match=told):
        check(tmp_path, tasks=tasks)


def test_a_task_that_contains_one_that_runs_generated_code_does_too() -> None:
    index = known_tasks()
    assert len(index.names) > 10_000
    assert {"humaneval", "mbpp", "humaneval_infilling"} <= index.unsafe
