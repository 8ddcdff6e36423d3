"""Loads the tasks of an evaluation with their documents through lm_eval, before any weights, and refuses what cannot be measured."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Iterator, Sized
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.sandbox.metric import CODE_METRIC, prepare_code_tasks, score_code_within_limits
from eval.tasks.files import Task
from eval.tasks.output import chatter_to, summary
from eval.tasks.settings import Settings
from eval.tasks.suites import TaskSelection, measured_twice, needs_consent
from sft.errors import EvaluationError, did_you_mean

if TYPE_CHECKING:
    from lm_eval.api.group import Group
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks import TaskManager

# The first of these in a task's YAML decides.
LENGTH_ALIASES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")

WHERE_TO_GET = (
    "Load them once where there is a network, with the cache that this machine uses (HF_HOME, HF_DATASETS_CACHE), or name a task file over "
    "data of your own."
)

_FILE_NAME = re.compile(r"[^\W][\w.()+,:@ -]*")


@dataclass(frozen=True)
class LoadedTasks:
    """Tasks with their documents."""

    by_name: dict[str, list[ConfigurableTask | Group]]
    """Per selected task: lm_eval's Task or Group, several for a tag."""

    missing: dict[str, str]
    """Tasks whose documents cannot be reached, and why."""

    run_code: bool
    """Whether they may run what the model writes."""

    generated_code: dict[str, Any] = field(default_factory=dict)
    """The isolation of the code that they run, as the results record it; empty where none of them runs any."""


def load_tasks(selection: TaskSelection, settings: Settings, run_code: bool, log: Path) -> LoadedTasks:
    """Load every task's documents, and set the length of its answers; `run_code` is eval.confirm_run_unsafe_code.

    Raises:
        EvaluationError: A task is broken, needs a package, or contradicts the settings; all in one message.
    """
    tasks = read_tasks(selection, settings.num_fewshot, run_code, log)
    if not tasks.by_name:
        reasons = "".join(f"\n  {name}: {reason}" for name, reason in tasks.missing.items())
        raise EvaluationError(f"No task can be measured:{reasons}\n{WHERE_TO_GET}")
    if tasks.missing:  # the results record the reasons
        print(f"Out of reach, and left out: {', '.join(tasks.missing)}. {WHERE_TO_GET}", file=sys.stderr)
    parts = [part for items in tasks.by_name.values() for part in leaves(items)]
    _refuse([problem for part in parts for problem in _set_answer_length(part, settings)])
    code = [part for part in parts if _runs_code(part)]
    if code:
        tasks.generated_code.update(prepare_code_tasks(code))
    return tasks


def read_tasks(selection: TaskSelection, num_fewshot: int | None, run_code: bool, log: Path) -> LoadedTasks:
    """Load every task's documents, and check what needs no tokenizer; errors as `load_tasks`."""
    from lm_eval.tasks import TaskManager

    # A code task loads its metric at once. That the user's shell has set this variable is no consent.
    os.environ["HF_ALLOW_CODE_EVAL"] = "1" if run_code else "0"
    render_in_sandbox()
    score_code_within_limits()
    tasks = LoadedTasks({}, {}, run_code)
    problems: list[str] = []
    with chatter_to(log):
        folders = [str(path) for path in selection.include_paths]
        manager = TaskManager(include_path=folders, include_defaults=not selection.all_local)
        for task in selection.tasks:
            for loaded in _load_task(manager, task, tasks, problems):
                problems += _problems_of(loaded, selection.limit, num_fewshot, run_code)
    # What groups of files share is known only now.
    parts = [(leaf.task_name, name) for name, items in tasks.by_name.items() for leaf in leaves(items)]
    _refuse([*problems, *measured_twice(parts)])
    return tasks


def _refuse(problems: list[str]) -> None:
    if problems:
        raise EvaluationError("\n".join(dict.fromkeys(problems)))


def leaves(loaded: list[ConfigurableTask | Group]) -> list[ConfigurableTask]:
    """The tasks in groups and tags."""
    from lm_eval.api.group import Group

    return [task for item in loaded for task in (item.get_all_tasks() if isinstance(item, Group) else [item])]


def source_of(task: ConfigurableTask) -> Path:
    """The task's YAML."""
    return Path(str((task.config.metadata or {}).get("config_source")))


def is_own(task: ConfigurableTask) -> bool:
    """Whether the task comes from a file of the user's: lm_eval's own are measured as everybody measures them."""
    import lm_eval

    return not source_of(task).resolve().is_relative_to(Path(str(lm_eval.__file__)).resolve().parent)


def compares_choices(task: ConfigurableTask) -> bool:
    """Whether lm_eval itself scores the task's choices, not code of the task."""
    from lm_eval.api.task import ConfigurableTask

    return (
        task.get_config("process_results") is None
        and task.get_config("output_type") == "multiple_choice"
        and type(task).process_results is ConfigurableTask.process_results
    )


def render_in_sandbox() -> None:
    """Have lm_eval render a task's templates in jinja's sandbox: a task file without functions runs no code."""
    from jinja2.sandbox import SandboxedEnvironment
    from lm_eval import utils

    if isinstance(utils.env, SandboxedEnvironment):
        return
    own = utils.env
    utils.env = SandboxedEnvironment(
        loader=own.loader, undefined=own.undefined, keep_trailing_newline=own.keep_trailing_newline
    )
    utils.env.filters = own.filters


def _load_task(manager: TaskManager, task: Task, tasks: LoadedTasks, problems: list[str]) -> list[ConfigurableTask]:
    """Load a task's parts and add them to the loaded ones; none where it is missing or has problems."""
    try:
        loaded = manager.load([task.given])
    except Exception as error:  # a task's YAML, code and dataset are the user's: anything may come out of them
        traceback.print_exc()
        if _is_unreachable(error):
            tasks.missing[task.name] = summary(error)
        else:
            cause = error.__cause__ or error  # `datasets` names the row in the cause
            problems.append(
                f"The task {task.name} ({task.given}) cannot be loaded: {summary(cause)}. Check its splits, data files and metrics."
            )
        return []
    found: list[ConfigurableTask] = list(loaded["tasks"].values())
    if unloaded := dict.fromkeys(name for part in found for name in _metrics_not_loaded(part)):
        reasons = [
            f"`metric: {name}` is none of lm_eval, and `evaluate` cannot load it here (lm_eval.log)"
            for name in unloaded
        ]
        tasks.missing[task.name] = "; ".join(reasons)
        return []
    group = loaded["groups"].get(task.name)
    tasks.by_name[task.name] = [group] if group is not None else found
    return found


def _is_unreachable(error: BaseException) -> bool:
    libraries = {"httpx", "httpx2", "requests", "urllib3"}
    if isinstance(error, (ConnectionError, TimeoutError)) or type(error).__module__.partition(".")[0] in libraries:
        return True
    # A metric's script, which `evaluate` downloads.
    return isinstance(error, FileNotFoundError) and "Couldn't find a module script" in str(error)


def _metrics_not_loaded(task: ConfigurableTask) -> list[str]:
    """The metrics that `evaluate` could not load; lm_eval would fail on them after everything is generated."""
    if task.get_config("output_type") != "generate_until" or task.get_config("process_results") is not None:
        return []
    return [name for name, function in task._metric_fn_list.items() if function is None]


def _runs_code(task: ConfigurableTask) -> bool:
    metrics = [metric.get("metric") for metric in task.get_config("metric_list") or []]
    return bool(getattr(task, "UNSAFE_CODE", False)) or CODE_METRIC in metrics


def _problems_of(task: ConfigurableTask, limit: int | None, num_fewshot: int | None, run_code: bool) -> Iterator[str]:
    """What lm_eval loads and could not measure, or would measure as something else than was asked for."""
    yield from _example_problems(task, num_fewshot)
    if not _FILE_NAME.fullmatch(str(task.task_name)):
        yield (
            f"The task {task.task_name!r} cannot be measured: its samples go to a file of that name. Rename it, without "
            "slashes and not beginning with a dot."
        )
    if _runs_code(task) and not run_code:
        yield needs_consent(str(task.task_name))
    if is_own(task):
        yield from _metric_problems(task)
        if compares_choices(task):
            yield from _gold_problems(task, limit)


def _example_problems(task: ConfigurableTask, wanted: int | None) -> Iterator[str]:
    own = task.get_config("num_fewshot")
    # lm_eval would keep the task's own 0 and say so in its log.
    if wanted and own == 0:
        yield f"eval.num_fewshot={wanted}, and {task.task_name} is defined without examples. Leave eval.num_fewshot out, or the task."
    number = wanted if wanted is not None else own if is_own(task) else None
    if not number:
        return
    if _examples_are_the_questions(task):
        asked = f"num_fewshot: {own}" if wanted is None else f"eval.num_fewshot={wanted}"
        yield (
            f"{asked}, and {task.task_name} has no documents for examples but those it measures, so that a question could come with its "
            "own answer. Set num_fewshot to 0, or give the task a fewshot_split that it does not measure."
        )
    there = task.fewshot_docs()
    if isinstance(there, Sized) and number > len(there):
        yield f"{task.task_name} has {len(there)} documents for examples, and num_fewshot is {number}. Lower it."


def _examples_are_the_questions(task: ConfigurableTask) -> bool:
    """Whether lm_eval would draw examples from the documents it measures, the one that is asked among them."""
    examples, config = task.fewshot_cfg, task.config
    if examples.split is None and examples.samples is not None:
        return False
    drawn = examples.split or config.training_split or config.validation_split or config.test_split
    # lm_eval takes the question out of its own examples where the test split is named for both, and only there.
    taken_out = examples.split is not None and examples.split == config.test_split
    return drawn is not None and drawn == (config.test_split or config.validation_split) and not taken_out


def _metric_problems(task: ConfigurableTask) -> Iterator[str]:
    """Names that lm_eval would look up only after everything is measured, or never."""
    from lm_eval.api.registry import metric_registry

    for name, aggregation in task._aggregation_list.items():
        if aggregation is None:
            yield f"{task.task_name}: the `aggregation:` of its metric {name} is none of lm_eval's."
    for name in task._metric_fn_list if compares_choices(task) else ():
        if name not in metric_registry:
            hint = did_you_mean(str(name), sorted(metric_registry), ".")
            yield f"{task.task_name}: `metric: {name}` is none that lm_eval has for multiple_choice{hint}"


def _gold_problems(task: ConfigurableTask, limit: int | None) -> Iterator[str]:
    """Right answers that are no choice: lm_eval counts such a document as answered wrong, and says so in its log alone."""
    wrong, number = [], 0
    for number, document in enumerate(islice(task.eval_docs, limit), 1):
        try:
            choices = task.doc_to_choice(document)
            gold = task.doc_to_text(document) if task.multiple_input else task.doc_to_target(document)
            for one in gold if isinstance(gold, list) else [gold]:
                if one not in choices if isinstance(one, str) else not 0 <= one < len(choices):
                    wrong.append((number, one, len(choices)))
        except Exception as error:  # the task's templates and code are the user's
            yield f"The task {task.task_name} cannot be measured: its document {number}: {summary(error)}"
            return
    if wrong:
        first, one, count = wrong[0]
        yield (
            f"{task.task_name}: {len(wrong)} right answers of {number} documents are none of their choices: document {first} has {one!r}, "
            f"and its {count} choices are numbered from 0 to {count - 1}. doc_to_target must give that number or the choice's text; a "
            "label of -1 is a hidden one."
        )


def _set_answer_length(task: ConfigurableTask, settings: Settings) -> Iterator[str]:
    """Decide the longest answer; yields why it does not fit."""
    if task.get_config("output_type") != "generate_until":
        return
    own = _own_generation(task)
    length = next((own[name] for name in LENGTH_ALIASES if own.get(name) is not None), settings.default_max_gen_toks)
    length = length if settings.max_gen_toks is None else settings.max_gen_toks
    rest = {key: value for key, value in own.items() if key not in (*LENGTH_ALIASES, "max_length")}
    task.set_config("generation_kwargs", {**rest, "max_gen_toks": length})
    if settings.max_length is not None and length >= settings.max_length:
        yield (
            f"{task.task_name} asks for answers of {length} tokens, and a context of {settings.max_length} has no room for "
            "them beside a prompt. Set eval.max_gen_toks to less."
        )


def _own_generation(task: ConfigurableTask) -> dict[str, Any]:
    """What the task's file says of generation: lm_eval fills in 256 tokens where it says nothing."""
    from lm_eval.defaults import default_gen_kwargs
    from lm_eval.tasks._yaml_loader import load_yaml

    given: dict[str, Any] = task.config.generation_kwargs
    source = source_of(task)
    if given == default_gen_kwargs(task.config.fewshot_delimiter) and source.is_file():
        written: dict[str, Any] = load_yaml(source, resolve_func=False)
        if "generation_kwargs" not in written:
            return {key: value for key, value in given.items() if key not in LENGTH_ALIASES}
    return given
