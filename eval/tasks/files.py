"""Task files that the user brings, read as lm_eval reads them but without running anything in them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from eval.sandbox.metric import CODE_METRIC
from eval.tasks.checks import Function, code_of, datasets_of, functions_missing, parts_of, problems_of
from eval.tasks.data_files import files_outside
from eval.tasks.index import members
from eval.tasks.metrics import lm_eval_folder
from sft.errors import EvaluationError
from sft.recipe.load import find_file

_OUTSIDE = (
    "The task came with a run, which may be somebody else's, and reads files outside of the run's folder and its own. To allow that, name "
    "the task on this command line: tasks=FILE."
)


@dataclass(frozen=True)
class Task:
    """A task, group or tag that was asked for."""

    name: str
    """As results call it."""

    given: str
    """What lm_eval is given: the name, or the path of the task's file."""

    definition: str | None = None
    """SHA-256 of a definition that is not lm_eval's own: two tasks of one name are not one task."""

    datasets: tuple[str, ...] = ()
    """Those on the hub that such a definition names."""


class _TaskLoader(yaml.SafeLoader):
    """A task's YAML as lm_eval reads it, with `!function` left as text: nothing of the user's is imported here."""


def _function_as_text(_: yaml.SafeLoader, node: yaml.Node) -> str:
    return Function(node.value)


_TaskLoader.add_constructor("!function", _function_as_text)


def _read_task_file(
    path: Path, missing: list[str], code: list[str], within: Sequence[Path] | None, including: tuple[Path, ...] = ()
) -> dict[str, Any]:
    """A task's YAML with what it includes.

    Args:
        path: The file.
        missing: Gets the functions that it names and that are not there.
        code: Gets what it runs.
        within: The only folders that it may read from; None for all.
        including: The files that include it.

    Raises:
        EvaluationError: It is no task file.
    """
    if path in including:
        raise EvaluationError(f"{path} is not a valid task file: it includes itself.")
    try:
        config = yaml.load(path.read_text(encoding="utf-8"), _TaskLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise EvaluationError(f"The task file {path} cannot be read: {error}.") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        reason = getattr(error, "problem", None) or str(error)
        raise EvaluationError(f"{path} is not a valid task file:\n  {place}{reason}") from None
    if not isinstance(config, dict):
        raise EvaluationError(f"{path} is not a valid task file: it holds no keys.")
    missing += functions_missing(path, config)
    if not path.is_relative_to(lm_eval_folder()):  # what is installed is trusted
        code += code_of(config)
    included = config.pop("include", [])
    merged: dict[str, Any] = {}
    for name in included if isinstance(included, list) else [included]:
        other = (path.parent / str(name)).resolve()
        if within is not None and not any(other.is_relative_to(folder) for folder in within):
            raise EvaluationError(f"{path} includes {other}. {_OUTSIDE}")
        merged |= _read_task_file(other, missing, code, within, (*including, path))
    return merged | config


def _task_of(path: Path, config: dict[str, Any]) -> Task:
    name = config.get("group") or config.get("task")
    if not isinstance(name, str):
        raise EvaluationError(f"{path} is not a valid task file: it has no `task:` with the task's name.")
    try:
        text = json.dumps(config, default=str)
    except (ValueError, TypeError, RecursionError) as error:  # an anchor inside itself, or a key that is a list
        raise EvaluationError(f"{path} is not a valid task file: {error}.") from None
    # Where the file lies is no part of the definition; the code beside it is.
    text = text.replace(str(path.parent), "")
    code = b"".join(file.read_bytes() for file in sorted(path.parent.glob("*.py")))
    # lm_eval takes a task by its path; a group only by name, from a folder.
    given = name if "group" in config else str(path)
    return Task(name, given, hashlib.sha256(text.encode() + code).hexdigest(), datasets_of(config))


class LocalTasks:
    """The definitions that the user brings.

    Args:
        include_path: A folder of them.
        run: The run's folder that they came with; they read nothing outside of it and of their own. None: the user has named them.
    """

    def __init__(self, include_path: str | None, run: Path | None = None) -> None:
        self.run = run
        self.code: dict[str, list[str]] = {}
        self.by_name: dict[str, list[Task]] = {}
        self.folders: list[Path] = []
        self.unsafe: set[str] = set()
        self.unreadable: list[str] = []
        self._problems: dict[str, list[str]] = {}
        self.members: dict[str, list[str]] = {}
        """Per group, the names in it; a task has none."""

        if include_path is None:
            return
        folder = find_file(include_path).resolve()
        if not folder.is_dir():
            raise EvaluationError(
                f"eval.include_path={include_path} is not a folder. Name the folder of your task files."
            )
        for path in sorted(folder.rglob("*.yaml")):
            try:
                task = self.read(path, folder)
                self.by_name.setdefault(task.name, []).append(task)
            except EvaluationError as error:
                self.unreadable.append(str(error))  # told only where a task is missing: the folder may hold other YAML

    def read(self, path: Path, folder: Path) -> Task:
        """The task in a file.

        Raises:
            EvaluationError: It holds none.
        """
        missing: list[str] = []
        code: list[str] = []
        within = None if self.run is None else (self.run, path.resolve().parent, lm_eval_folder())
        config = _read_task_file(path, missing, code, within)
        task = _task_of(path, config)
        outside = [] if within is None else [file for part in parts_of(config) for file in files_outside(part, within)]
        problems = [f"{path} reads {file}. {_OUTSIDE}" for file in outside] or problems_of(path, config)
        self._problems[task.given] = [*problems, *missing]
        self.code[task.given] = code
        self.members[task.name] = members(config, ()) if "group" in config else []
        if "group" in config and folder not in self.folders:
            self.folders.append(folder)
        metrics = config.get("metric_list")
        listed = metrics if isinstance(metrics, list) else []
        named = [metric.get("metric") for metric in listed if isinstance(metric, dict)]
        if config.get("unsafe_code") or CODE_METRIC in named:
            self.unsafe.add(task.given)
        return task

    def problems(self, task: Task) -> list[str]:
        """What is wrong with a task, or with the tasks of the user's that a group of the user's has in it."""
        return [problem for given in self._reached(task) for problem in self._problems.get(given, [])]

    def code_in(self, task: Task) -> list[str]:
        """What a task, or a task of the user's in a group, runs of its author's code."""
        return [words for given in self._reached(task) for words in self.code.get(given, [])]

    def _reached(self, task: Task) -> list[str]:
        found, left = list[str](), [task.given]
        while left:
            given = left.pop()
            if given not in found:
                found.append(given)
                left += [part.given for name in self.members.get(given, ()) for part in self.by_name.get(name, ())]
        return found
