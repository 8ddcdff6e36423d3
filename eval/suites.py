"""Which tasks an evaluation runs, checked before anything is loaded.

    python -m eval.suites    # reads the names of lm_eval's tasks once and keeps them

Reading lm_eval's 14,000 task files takes seconds, so their names are kept: a mistyped task is refused at once.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from eval.task_files import LocalTasks, Task
from sft.errors import EvaluationError, did_you_mean, run_main
from sft.recipe import Evaluation
from sft.recipe_file import find_file
from sft.run_directory import write_json

SUITES: dict[str, tuple[str, ...]] = {
    # The Open LLM Leaderboard, but for leaderboard_math_hard: lm_eval cannot import it without math-verify, sympy and
    # antlr4-python3-runtime==4.11 (its extra `math`), and requirements.lock installs its extra `ifeval` alone.
    # leaderboard_gpqa's dataset is gated: it needs an account on the hub that was granted access.
    "leaderboard": (
        "leaderboard_bbh",
        "leaderboard_gpqa",
        "leaderboard_ifeval",
        "leaderboard_mmlu_pro",
        "leaderboard_musr",
    )
}


@dataclass(frozen=True)
class TaskIndex:
    """The names that lm_eval knows."""

    names: frozenset[str]
    """Of tasks, groups and tags."""

    unsafe: frozenset[str]
    """Those that run code which the model wrote, on this machine."""


@dataclass(frozen=True)
class TaskSelection:
    """What an evaluation runs."""

    tasks: tuple[Task, ...]
    include_paths: tuple[Path, ...]
    """Folders in which lm_eval looks for the names that are not its own."""

    runs_code: bool = False
    """Whether one of them, or what a group of the user's may reach, runs code that the model writes."""

    @property
    def all_local(self) -> bool:
        """Whether lm_eval's own task files need not be read, which takes seconds."""
        return all(task.given != task.name for task in self.tasks)


def _index_files() -> list[Path]:
    """Where the names are kept: in the environment they come from or, where it is read-only, in the user's cache."""
    name = f"lm_eval-{version('lm_eval')}-tasks.json"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return [Path(sys.prefix) / "cache" / name, cache / "sft-recipes" / name]


def read_index(path: Path) -> TaskIndex | None:
    """The names in a file; None where there are none to be read."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        return TaskIndex(frozenset(kept["names"]), frozenset(kept["unsafe"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _unsafe_names(members: dict[str, list[str]], marked: Iterable[str]) -> frozenset[str]:
    """The marked tasks and every group or tag that reaches one of them.

    >>> sorted(_unsafe_names({"code": ["humaneval", "group"], "group": ["mbpp"], "maths": ["gsm8k"]}, ["mbpp"]))
    ['code', 'group', 'mbpp']
    """
    unsafe = set(marked)
    while found := {name for name, inside in members.items() if name not in unsafe and unsafe.intersection(inside)}:
        unsafe |= found
    return frozenset(unsafe)


def _members(config: dict[str, Any] | None, tagged: Iterable[str]) -> list[str]:
    """What a group's file or a tag names, groups inside groups included."""
    inside = list(tagged)
    listed = (config or {}).get("task")
    for item in listed if isinstance(listed, list) else []:
        if isinstance(item, str):
            inside.append(item)
        elif isinstance(item, dict):
            inside += [str(item[key]) for key in ("group", "task") if isinstance(item.get(key), str)]
            inside += _members(item, ())
    return inside


def build_index() -> TaskIndex:
    """Read the names from lm_eval's task files; seconds."""
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._index import Kind

    entries = TaskManager().task_index
    groups = {name: entry for name, entry in entries.items() if entry.kind in (Kind.GROUP, Kind.TAG)}
    # A task's own `tags` are the tags it carries; only those of a tag are its members.
    members = {
        name: _members(entry.cfg, entry.tags if entry.kind is Kind.TAG else ()) for name, entry in groups.items()
    }
    marked = [name for name, entry in entries.items() if (entry.cfg or {}).get("unsafe_code")]
    return TaskIndex(frozenset(entries), _unsafe_names(members, marked))


def keep_index(index: TaskIndex, files: Iterable[Path]) -> None:
    """Write the names to the first file that can be written; without one they are read again each time."""
    for path in files:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, {key: sorted(names) for key, names in asdict(index).items()})
        except OSError:
            continue
        return


def known_tasks() -> TaskIndex:
    """The names of the installed lm_eval: as they were kept, or read now and kept."""
    files = _index_files()
    kept = next((index for index in map(read_index, files) if index is not None), None)
    if kept is None:
        kept = build_index()
        keep_index(kept, files)
    return kept


def _find_task(asked: str, local: LocalTasks, known: TaskIndex, output_dir: Path) -> Task:
    if asked == "builtin:demo":
        from sft.demo import make_demo

        path = make_demo(output_dir).task
        return local.read(path, path.parent)
    found = local.by_name.get(asked, [])
    if len(found) > 1:
        files = ", ".join(task.given for task in found)
        raise EvaluationError(
            f"eval.tasks: `{asked}` is defined by {len(found)} files: {files}. Name the file instead."
        )
    if found:
        return found[0]
    if asked in known.names:
        return Task(asked, asked)
    if asked.endswith((".yaml", ".yml")):
        path = find_file(asked).resolve()
        if not path.is_file():
            raise EvaluationError(f"eval.tasks: there is no task file {asked}.")
        return local.read(path, path.parent)
    hint = did_you_mean(asked, [*local.by_name, *known.names, "builtin:demo"])
    told = "".join(f"\n  {reason}" for reason in local.unreadable)
    raise EvaluationError(f"eval.tasks: `{asked}` is not a task of lm_eval {version('lm_eval')}{hint or '.'}{told}")


def check_tasks(evaluation: Evaluation, output_dir: Path) -> TaskSelection:
    """Find every task that the recipe asks for. Loads no model and no dataset.

    Args:
        evaluation: The recipe's `eval` section.
        output_dir: The recipe's output_dir, where `builtin:demo` is made.

    Raises:
        EvaluationError: A task or a folder is missing, or a task runs generated code without consent; all at once.
    """
    local = LocalTasks(evaluation.include_path)
    asked = dict.fromkeys([*evaluation.tasks, *SUITES.get(evaluation.suite or "", ())])
    known = known_tasks() if asked else TaskIndex(frozenset(), frozenset())
    tasks: dict[str, Task] = {}
    problems: list[str] = []
    unsafe: list[str] = []
    for name in asked:
        try:
            task = _find_task(name, local, known, output_dir)
        except EvaluationError as error:
            problems.append(str(error))
            continue
        if tasks.setdefault(task.name, task) != task:
            problems.append(f"eval.tasks: `{task.name}` is asked for twice, with two definitions.")
        # What a local group reaches is known once lm_eval has loaded it: eval/run.py asks again.
        runs_code = task.given in (known.unsafe if task.definition is None else local.unsafe)
        unsafe += [name] if runs_code or (evaluation.confirm_run_unsafe_code and local.folders) else []
        if runs_code and not evaluation.confirm_run_unsafe_code:
            problems.append(
                f"eval.tasks: `{name}` runs Python code that the model writes, on this machine, with your permissions. "
                "To allow that, set eval.confirm_run_unsafe_code=true; a container without network is the place for it."
            )
    if problems:
        raise EvaluationError("\n".join(problems))
    return TaskSelection(tuple(tasks.values()), tuple(local.folders), bool(unsafe))


def main(_: list[str]) -> None:
    """Read the names, keep them, and say how many there are."""
    index = known_tasks()
    print(f"lm_eval {version('lm_eval')}: {len(index.names):,} tasks, groups and tags.")


if __name__ == "__main__":
    run_main(main)
