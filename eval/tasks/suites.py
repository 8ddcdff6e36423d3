"""Choose the tasks of an evaluation: named suites, lm_eval's tasks, the user's files; checked before anything loads.

python -m eval.tasks.suites    # reads the names of lm_eval's tasks once and caches them
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from eval.tasks.files import LocalTasks, Task
from eval.tasks.index import TaskIndex, known_tasks, reached
from sft.errors import EvaluationError, did_you_mean
from sft.program import run_main
from sft.recipe.eval import Gate
from sft.recipe.load import find_file
from sft.recipe.schema import Evaluation


@dataclass(frozen=True)
class Suite:
    """A named set of tasks."""

    tasks: tuple[str, ...]

    limit: int | None = None
    """Documents per task where eval.limit says nothing. Of the evaluation's settings, as eval.limit is."""

    without_template: tuple[str, ...] = ()
    """The tasks in their place where eval.apply_chat_template=false; none: the same."""


SUITES: dict[str, Suite] = {
    # A first look: knowledge and common sense by likelihood, reasoning aloud, following instructions: what fine-tuning breaks first.
    "quick": Suite(
        ("arc_challenge", "hellaswag", "gsm8k", "ifeval"),
        limit=100,
    ),
    # Answers that the model writes.
    # Without truthfulqa_gen, whose metrics are scripts from the hub, and math500, which needs lm_eval's extra `math`.
    "chat": Suite(
        ("ifeval", "gsm8k_cot_zeroshot", "arc_challenge_chat"),
    ),
    # Programs that the model writes.
    # humaneval_instruct asks in words and takes the code out of the answer's ```, humaneval has the model go on with a file, which no chat
    # model does. mbpp shows by three examples what an answer looks like, in a chat as turns. In mbpp_instruct a right answer that begins
    # with `def` or `import` counts as wrong: lm_eval takes its first word for the name of its language.
    "code": Suite(
        ("humaneval_instruct", "mbpp"),
        without_template=("humaneval", "mbpp"),
    ),
    # The Open LLM Leaderboard, without leaderboard_math_hard, which needs lm_eval's extra `math`; gpqa is gated on the hub.
    "leaderboard": Suite(
        ("leaderboard_bbh", "leaderboard_gpqa", "leaderboard_ifeval", "leaderboard_mmlu_pro", "leaderboard_musr"),
    ),
}


def tasks_of(suite: str | None, apply_chat_template: bool) -> tuple[str, ...]:
    """The tasks of a suite.

    >>> tasks_of("code", True), tasks_of("code", False), tasks_of(None, True)
    (('humaneval_instruct', 'mbpp'), ('humaneval', 'mbpp'), ())
    """
    if suite is None:
        return ()
    chosen = SUITES[suite]
    return chosen.tasks if apply_chat_template else chosen.without_template or chosen.tasks


def describe_suite(evaluation: Evaluation) -> str | None:
    """What the suite measures; None without a suite."""
    if evaluation.suite is None:
        return None
    limit = limit_of(evaluation)
    tasks = ", ".join(tasks_of(evaluation.suite, evaluation.apply_chat_template))
    documents = "all documents" if limit is None else f"the first {limit:,} documents of each task"
    return f"eval.suite={evaluation.suite}: {tasks}; {documents}."


@dataclass(frozen=True)
class TaskSelection:
    """What an evaluation measures."""

    tasks: tuple[Task, ...]
    include_paths: tuple[Path, ...] = ()
    """Folders in which lm_eval looks for the user's groups."""

    runs_code: bool = False
    """Whether a task, or what a group of the user's may reach, runs code that the model writes."""

    limit: int | None = None
    """Documents per task: eval.limit, or the suite's own."""

    @property
    def all_local(self) -> bool:
        """Whether lm_eval need not read its own task files, which takes seconds."""
        return all(task.given != task.name for task in self.tasks)


def check_tasks(evaluation: Evaluation, output_dir: Path) -> TaskSelection:
    """Find every task that the recipe names. Loads no model and no dataset, runs no code; `builtin:demo` is made in output_dir.

    Raises:
        EvaluationError: A task is unknown, is measured twice, or runs code without consent; or the gate names a task that is not
            measured. All in one message.
    """
    asked = dict.fromkeys([*evaluation.tasks, *tasks_of(evaluation.suite, evaluation.apply_chat_template)])
    known = known_tasks() if asked else TaskIndex()
    local = LocalTasks(evaluation.include_path, known.metrics)
    tasks: dict[str, Task] = {}
    problems: list[str] = []
    runs_code = False
    for name in asked:
        try:
            task = _find_task(name, local, known, output_dir)
        except EvaluationError as error:
            problems.append(str(error))
            continue
        files = local.reached(task)
        if tasks.setdefault(task.name, task) != task:
            problems.append(f"eval.tasks: `{task.name}` is named twice, with two definitions.")
        code = dict.fromkeys(words for file in files for words in file.code)
        if code and not evaluation.confirm_run_task_code:
            problems.append(
                f"eval.tasks: `{name}` runs Python code that comes with its file ({', '.join(code)}), with all that you may do on this "
                "machine. Read it; to allow it, set eval.confirm_run_task_code=true."
            )
        unsafe = any(file.unsafe for file in files)
        # Which of lm_eval's own tasks a group of the user's reaches is known once it is loaded; load_tasks asks again.
        runs_code |= unsafe or (evaluation.confirm_run_unsafe_code and bool(local.folders))
        if unsafe and not evaluation.confirm_run_unsafe_code:
            problems.append(f"eval.tasks: {needs_consent(f'`{name}`')}")
    members = (known.members or {}) | {name: found[0].members for name, found in local.by_name.items()}
    inside = {name: sorted(reached(name, members) - {name}) for name in tasks}
    problems += measured_twice((part, name) for name in tasks for part in [name, *inside[name]])
    if problems:
        raise EvaluationError("\n".join(dict.fromkeys(problems)))
    check_gate(evaluation.gate, list(tasks), {part for parts in inside.values() for part in parts})
    return TaskSelection(tuple(tasks.values()), tuple(local.folders), runs_code, limit_of(evaluation))


def limit_of(evaluation: Evaluation) -> int | None:
    """Documents per task; None: all."""
    suite = SUITES.get(evaluation.suite or "")
    return suite.limit if suite is not None and evaluation.limit is None else evaluation.limit


def _find_task(asked: str, local: LocalTasks, known: TaskIndex, output_dir: Path) -> Task:
    if asked == "builtin:demo":
        from sft.hub.demo import make_demo

        path = make_demo(output_dir).task
        return local.read(path, path.parent)
    found = local.by_name.get(asked, [])
    if len(found) > 1:
        files = ", ".join(file.given for file in found)
        raise EvaluationError(
            f"eval.tasks: `{asked}` is defined by {len(found)} files: {files}. Name the file instead."
        )
    if found:
        return found[0]
    if asked in known.names:
        return Task(asked, asked, asked in known.unsafe)
    if asked.endswith((".yaml", ".yml")):
        path = find_file(asked).resolve()
        if not path.is_file():
            raise EvaluationError(f"eval.tasks: there is no task file {asked}.")
        return local.read(path, path.parent)
    hint = did_you_mean(asked, [*local.by_name, *known.names, "builtin:demo"], ".")
    unreadable = "".join(f"\n  {reason}" for reason in local.unreadable)
    raise EvaluationError(f"eval.tasks: `{asked}` is not a task of lm_eval {version('lm_eval')}{hint}{unreadable}")


def needs_consent(task: str) -> str:
    """The refusal of a task that runs generated code."""
    return (
        f"{task} runs Python code that the model writes, on this machine, within limits "
        "(docs/evaluation-code.md says which). To allow that, set eval.confirm_run_unsafe_code=true."
    )


def measured_twice(measured: Iterable[tuple[str, str]]) -> list[str]:
    """A line for each two tasks, groups or tags that share a task; each task comes with the name that it was selected by.

    >>> measured_twice([("a", "letters"), ("b", "letters"), ("a", "a")])
    ['eval.tasks: a is part of letters and of a. Leave one of them out.']
    """
    owners: dict[str, str] = {}
    shared: dict[tuple[str, str], list[str]] = {}
    for part, name in measured:
        if owners.setdefault(part, name) != name:
            shared.setdefault((owners[part], name), []).append(part)
    problems = []
    for (one, other), parts in shared.items():
        more = f" and {len(parts) - 1} more are" if len(parts) > 1 else " is"
        problems.append(f"eval.tasks: {parts[0]}{more} part of {one} and of {other}. Leave one of them out.")
    return problems


def check_gate(gate: Gate | None, measured: Sequence[str], parts: Collection[str]) -> None:
    """Refuse a gate on tasks that are not measured. `parts` is everything inside the measured groups."""
    whole = ("default", "overall")
    required = [*gate.max_regression, *gate.require] if gate is not None else []
    named = dict.fromkeys(name.partition("/")[0] for name in required if name not in whole)
    problems = [
        f"eval.gate: `{name}` is not measured{did_you_mean(name, [*measured, *whole], '.')} Measured: {', '.join(measured) or 'nothing'}."
        for name in named
        if name not in measured and name not in parts
    ]
    if problems:
        remedy = "Another selection of tasks needs another gate; eval.gate=null is none."
        raise EvaluationError("\n".join([*problems, remedy]))


def main(_: list[str]) -> None:
    """Build the index of names unless it is cached."""
    index = known_tasks()
    print(f"lm_eval {version('lm_eval')}: {len(index.names):,} tasks, groups and tags.")


if __name__ == "__main__":
    run_main(main)
