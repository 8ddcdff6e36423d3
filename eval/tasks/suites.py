"""Which tasks an evaluation runs, checked before anything is loaded.

    python -m eval.tasks.suites    # reads the names of lm_eval's tasks once and keeps them

Reading lm_eval's 14,000 task files takes seconds, so their names are kept: a mistyped task is refused at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from eval.tasks.files import LocalTasks, Task
from eval.tasks.index import TaskIndex, known_tasks, reached
from eval.tasks.named_suites import limit_of, tasks_of
from sft.errors import EvaluationError, did_you_mean
from sft.program import run_main
from sft.recipe.eval import Gate
from sft.recipe.load import find_file
from sft.recipe.schema import Evaluation


@dataclass(frozen=True)
class TaskSelection:
    """What an evaluation runs."""

    tasks: tuple[Task, ...]
    include_paths: tuple[Path, ...]
    """Folders in which lm_eval looks for the names that are not its own."""

    runs_code: bool = False
    """Whether one of them, or what a group of the user's may reach, runs code that the model writes."""

    suite_limit: int | None = None
    """Documents per task where eval.limit says nothing."""

    datasets: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Per task that has them, the datasets on the hub that it needs."""

    @property
    def all_local(self) -> bool:
        """Whether lm_eval's own task files need not be read, which takes seconds."""
        return all(task.given != task.name for task in self.tasks)


def _find_task(asked: str, local: LocalTasks, known: TaskIndex, output_dir: Path) -> Task:
    if asked == "builtin:demo":
        from sft.hub.demo import make_demo

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


def _datasets(tasks: dict[str, Task], known: TaskIndex) -> tuple[tuple[str, tuple[str, ...]], ...]:
    own = [(name, task.datasets or tuple(known.datasets.get(task.given, ()))) for name, task in tasks.items()]
    return tuple((name, datasets) for name, datasets in own if datasets)


def asked_twice(measured: Iterable[tuple[str, str]]) -> list[str]:
    """What is wrong where a task is measured in two ways.

    Args:
        measured: Each task with the task, group or tag that was asked for.

    >>> asked_twice([("a", "letters"), ("b", "letters"), ("a", "a")])
    ['eval.tasks: a is part of letters and of a. Leave one of them out.']
    """
    owners: dict[str, str] = {}
    shared: dict[tuple[str, str], list[str]] = {}
    for part, name in measured:
        if owners.setdefault(part, name) != name:
            shared.setdefault((owners[part], name), []).append(part)
    problems = []
    for (one, other), parts in shared.items():
        more = f" and {len(parts) - 1} more" if len(parts) > 1 else ""
        verb = "are" if more else "is"
        problems.append(f"eval.tasks: {parts[0]}{more} {verb} part of {one} and of {other}. Leave one of them out.")
    return problems


def check_gate(gate: Gate | None, measured: Sequence[str], parts: Collection[str]) -> None:
    """Refuse a gate on tasks that are not measured.

    Args:
        gate: The recipe's eval.gate.
        measured: Names of the tasks and groups that are measured.
        parts: Everything inside these groups.

    Raises:
        EvaluationError: It names other tasks; all of them in one message.
    """
    if gate is None:
        return
    whole = ("default", "overall")
    named = dict.fromkeys(name.partition("/")[0] for name in [*gate.max_regression, *gate.require] if name not in whole)
    unknown = [name for name in named if name not in measured and name not in parts]
    if unknown:
        names = ", ".join(measured) or "nothing"
        problems = [
            f"eval.gate: `{name}` is not measured{did_you_mean(name, [*measured, *whole], '.')} Measured: {names}."
            for name in unknown
        ]
        raise EvaluationError(
            "\n".join([*problems, "Another selection of tasks needs another gate; eval.gate=null is none."])
        )


def check_tasks(evaluation: Evaluation, output_dir: Path, run: Path | None = None) -> TaskSelection:
    """Find every task that the recipe asks for. Loads no model and no dataset.

    Args:
        evaluation: The recipe's `eval` section.
        output_dir: The recipe's output_dir, where `builtin:demo` is made.
        run: The folder that the tasks came with, where no person has named them: they read nothing outside of it and of their own.

    Raises:
        EvaluationError: A task or a folder is missing, a task runs generated code or code of its own without consent, all at once; or the
            gate names a task that is not measured.
    """
    local = LocalTasks(evaluation.include_path, run)
    asked = dict.fromkeys([*evaluation.tasks, *tasks_of(evaluation.suite, evaluation.apply_chat_template)])
    known = known_tasks() if asked else TaskIndex(frozenset(), frozenset(), {}, {})
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
        problems += local.problems(task) if task.definition is not None else []
        code = dict.fromkeys(local.code_in(task)) if task.definition is not None else {}
        if code and not evaluation.confirm_run_task_code:
            problems.append(
                f"eval.tasks: `{name}` runs Python code that comes with its file ({', '.join(code)}), with all that you may do on this "
                "machine. Read it; to allow it, set eval.confirm_run_task_code=true."
            )
        # What a local group reaches is known once lm_eval has loaded it: eval/run.py asks again.
        runs_code = task.given in (known.unsafe if task.definition is None else local.unsafe)
        unsafe += [name] if runs_code or (evaluation.confirm_run_unsafe_code and local.folders) else []
        if runs_code and not evaluation.confirm_run_unsafe_code:
            problems.append(
                f"eval.tasks: `{name}` runs Python code that the model writes, on this machine, within limits that are tried out "
                "first (docs/evaluation-code.md says which). To allow that, set eval.confirm_run_unsafe_code=true."
            )
    inside = {name: sorted(reached(name, known.members | local.members) - {name}) for name in tasks}
    problems += asked_twice((part, name) for name in tasks for part in [name, *inside[name]])
    if problems:
        raise EvaluationError("\n".join(problems))
    check_gate(evaluation.gate, list(tasks), {part for parts in inside.values() for part in parts})
    return TaskSelection(
        tuple(tasks.values()), tuple(local.folders), bool(unsafe), limit_of(evaluation.suite), _datasets(tasks, known)
    )


def main(_: list[str]) -> None:
    """Read the names, keep them, and say how many there are."""
    index = known_tasks()
    print(f"lm_eval {version('lm_eval')}: {len(index.names):,} tasks, groups and tags.")


if __name__ == "__main__":
    run_main(main)
