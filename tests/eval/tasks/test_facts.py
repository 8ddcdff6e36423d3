"""A change to any file that a group of the user's leads to is another definition; another place is not."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from eval.tasks.facts import task_facts
from eval.tasks.load import LoadedTasks
from eval.tasks.settings import Settings

WriteTask = Callable[..., Path]
HELPER = "from scoring.parts import half\n\n\ndef score(doc, results):\n    return {'acc': half()}\n"


@pytest.fixture
def folder(write_task: WriteTask) -> Path:
    """A group in a group, whose task is scored by a function of a subfolder."""
    path = write_task("leaf", metric_list=[{"metric": "acc", "aggregation": "mean", "higher_is_better": True}])
    path.write_text(path.read_text() + "process_results: !function scoring.score.score\ninclude: common\n")
    folder = path.parent
    (folder / "common").write_text("target_delimiter: ' '\n")
    (folder / "scoring").mkdir()
    (folder / "scoring" / "parts.py").write_text("def half():\n    return 0.5\n")
    (folder / "scoring" / "score.py").write_text(HELPER)
    inner = {"group": "inner", "task": ["leaf"], "aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}]}
    (folder / "inner.yaml").write_text(yaml.safe_dump(inner))
    (folder / "outer.yaml").write_text(yaml.safe_dump({"group": "outer", "task": ["inner"]}))
    return folder


@pytest.fixture
def facts(monkeypatch: pytest.MonkeyPatch, settings: Callable[..., Settings]) -> Callable[[Path], dict[str, Any]]:
    def load(folder: Path) -> dict[str, Any]:
        """As a process of its own: what the folder's code imports is imported anew."""
        from lm_eval.tasks import TaskManager

        for name in [name for name in sys.modules if name.startswith(("scoring", str(folder.parent)))]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        group = TaskManager(include_path=str(folder), include_defaults=False).load(["outer"])["groups"]["outer"]
        return task_facts(settings("outer"), LoadedTasks({"outer": [group]}, {}, False))

    return load


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("leaf.yaml", "{{answer}}", "{{question}}"),
        ("common", "' '", "'\\n'"),
        ("scoring/score.py", "half()", "half() / 2"),
        ("scoring/parts.py", "0.5", "0.25"),
        ("inner.yaml", "weight_by_size: true", "weight_by_size: false"),
    ],
)
def test_a_change_that_no_document_shows_is_another_definition(
    file: str, before: str, after: str, folder: Path, facts: Callable[[Path], dict[str, Any]]
) -> None:
    first = facts(folder)
    assert facts(folder) == first
    path = folder / file
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after))
    assert facts(folder) != first


def test_a_definition_does_not_name_its_place(folder: Path, facts: Callable[[Path], dict[str, Any]]) -> None:
    first = facts(folder)
    moved = folder.with_name("moved")
    shutil.move(folder, moved)
    leaf = moved / "leaf.yaml"
    leaf.write_text(leaf.read_text().replace(str(folder), str(moved)))
    assert facts(moved) == first
