from pathlib import Path

import pytest

from eval.tasks.files import LocalTasks
from sft.errors import EvaluationError


def read(path: Path, text: str | None = None) -> tuple[str, str | None]:
    if text is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    task = LocalTasks(None).read(path, path.parent)
    return task.name, task.definition


def test_a_definition_does_not_depend_on_where_it_lies(tmp_path: Path) -> None:
    text = "task: mine\ndoc_to_text: !function utils.text\ndataset_path: {folder}/data\n"
    here = read(tmp_path / "a" / "mine.yaml", text.format(folder=tmp_path / "a"))
    there = read(tmp_path / "b" / "mine.yaml", text.format(folder=tmp_path / "b"))
    assert here == there


def test_a_definition_changes_with_what_it_includes_and_the_code_beside_it(tmp_path: Path) -> None:
    (tmp_path / "common").write_text("num_fewshot: 1\n")
    path = tmp_path / "mine.yaml"
    seen = [read(path, "task: mine\ninclude: common\n")]
    (tmp_path / "common").write_text("num_fewshot: 2\n")
    seen.append(read(path))
    (tmp_path / "utils.py").write_text("def text(doc): return doc['a']\n")
    seen.append(read(path))
    assert len(set(seen)) == 3


def test_what_a_task_includes_may_mark_it_as_running_code(tmp_path: Path) -> None:
    (tmp_path / "common").write_text("unsafe_code: true\n")
    path = tmp_path / "mine.yaml"
    path.write_text("task: mine\ninclude: common\n")
    local = LocalTasks(str(tmp_path))
    assert local.unsafe == {str(path)}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("task: [1, 2\n", "line 2, column 1"),
        ("task: !import os.system\n", "could not determine a constructor"),
        ("- task\n", "it holds no keys"),
        ("", "it holds no keys"),
        ("dataset_path: json\n", "it has no `task:`"),
        ("task: mine\ninclude: mine.yaml\n", "it includes itself"),
        ("task: mine\ninclude: nowhere\n", "nowhere cannot be read"),
        ("task: mine\nunsafe_code: &a [*a]\n", "is not a valid task file"),
    ],
)
def test_a_file_that_is_no_task_is_told_with_the_place(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(EvaluationError, match=r"mine\.yaml|nowhere") as error:
        read(tmp_path / "mine.yaml", text)
    assert told in str(error.value)


def test_nothing_in_a_task_file_runs_while_it_is_checked(tmp_path: Path) -> None:
    (tmp_path / "utils.py").write_text("raise SystemExit('imported')\n")
    assert read(tmp_path / "mine.yaml", "task: mine\ndoc_to_text: !function utils.text\n")[0] == "mine"
