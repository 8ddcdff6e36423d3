"""The tasks of an evaluation with their documents, loaded through lm_eval before any weight is."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Sized
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.quiet import chatter_to, summary
from eval.sandbox.metric import CODE_METRIC, prepare_code_tasks, score_code_within_limits
from eval.tasks.errors import metrics_not_found, why_not_loaded
from eval.tasks.files import Task
from eval.tasks.settings import Settings
from eval.tasks.suites import TaskSelection, asked_twice
from sft.errors import EvaluationError

if TYPE_CHECKING:
    from lm_eval.api.group import Group
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks import TaskManager

# In a task's YAML the first of these that is given decides.
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
    """Per task that was asked for: lm_eval's Task or Group, several for a tag."""

    missing: dict[str, str]
    """Tasks whose documents cannot be reached, and why."""

    run_code: bool
    """Whether they may run what the model writes."""

    generated_code: dict[str, Any] = field(default_factory=dict)
    """What holds the code that they run, as the results keep it; empty where none of them runs any."""


def _is_unreachable(error: BaseException) -> bool:
    if isinstance(error, (ConnectionError, TimeoutError)) or type(error).__module__.partition(".")[0] in {
        "httpx",
        "httpx2",
        "requests",
        "urllib3",
    }:
        return True
    # A metric's script, which `evaluate` downloads.
    return isinstance(error, FileNotFoundError) and "Couldn't find a module script" in str(error)


def render_in_sandbox() -> None:
    """Have lm_eval render a task's templates in jinja's sandbox: a task file without functions is text, and stays so."""
    from jinja2.sandbox import SandboxedEnvironment
    from lm_eval import utils

    if isinstance(utils.env, SandboxedEnvironment):
        return
    sandbox = SandboxedEnvironment(
        loader=utils.env.loader,
        undefined=utils.env.undefined,
        keep_trailing_newline=utils.env.keep_trailing_newline,
    )
    sandbox.filters = utils.env.filters
    utils.env = sandbox


def leaves(loaded: list[ConfigurableTask | Group]) -> list[ConfigurableTask]:
    """The tasks in groups and tags."""
    from lm_eval.api.group import Group

    return [task for item in loaded for task in (item.get_all_tasks() if isinstance(item, Group) else [item])]


def _own_generation(task: ConfigurableTask) -> dict[str, Any]:
    """What the task itself says of generation: lm_eval fills in 256 tokens where it says nothing."""
    from lm_eval.defaults import default_gen_kwargs
    from lm_eval.tasks._yaml_loader import load_yaml

    given: dict[str, Any] = task.config.generation_kwargs
    source = Path(str((task.config.metadata or {}).get("config_source")))
    if given == default_gen_kwargs(task.config.fewshot_delimiter) and source.is_file():
        written: dict[str, Any] = load_yaml(source, resolve_func=False)
        if "generation_kwargs" not in written:
            return {key: value for key, value in given.items() if key not in LENGTH_ALIASES}
    return given


def _set_answer_length(task: ConfigurableTask, settings: Settings) -> str | None:
    """Decide the longest answer; returns what is wrong with it."""
    if task.get_config("output_type") != "generate_until":
        return None
    own = _own_generation(task)
    length = next((own[name] for name in LENGTH_ALIASES if own.get(name) is not None), settings.default_max_gen_toks)
    length = length if settings.max_gen_toks is None else settings.max_gen_toks
    rest = {key: value for key, value in own.items() if key not in (*LENGTH_ALIASES, "max_length")}
    task.set_config("generation_kwargs", {**rest, "max_gen_toks": length})
    if settings.max_length is None or length < settings.max_length:
        return None
    return (
        f"{task.task_name} asks for answers of {length} tokens, and a context of {settings.max_length} has no room for "
        "them beside a prompt. Set eval.max_gen_toks to less."
    )


def _examples_are_the_questions(task: ConfigurableTask) -> bool:
    """Whether lm_eval would draw examples from the documents it measures, the one that is asked among them."""
    examples, config = task.fewshot_cfg, task.config
    if examples.split is None and examples.samples is not None:
        return False
    drawn = examples.split or config.training_split or config.validation_split or config.test_split
    # lm_eval takes the question out of its own examples where the test split is named for both, and only there.
    taken_out = examples.split is not None and examples.split == config.test_split
    return drawn is not None and drawn == (config.test_split or config.validation_split) and not taken_out


def is_own(task: ConfigurableTask) -> bool:
    """Whether a task comes from a file of the user's: lm_eval's own are measured as all others measure them."""
    import lm_eval

    source = Path(str((task.config.metadata or {}).get("config_source")))
    return not source.resolve().is_relative_to(Path(str(lm_eval.__file__)).resolve().parent)


def compares_choices(task: ConfigurableTask) -> bool:
    """Whether lm_eval scores a task's choices itself: code of the task may mean other things by its target."""
    from lm_eval.api.task import ConfigurableTask

    own = task.get_config("process_results") is not None
    return (
        not own
        and task.get_config("output_type") == "multiple_choice"
        and type(task).process_results is ConfigurableTask.process_results
    )


def _runs_code(task: ConfigurableTask) -> bool:
    metrics = [metric.get("metric") for metric in task.get_config("metric_list") or []]
    return bool(getattr(task, "UNSAFE_CODE", False)) or CODE_METRIC in metrics


def _problems_of(task: ConfigurableTask, settings: Settings, run_code: bool) -> list[str]:
    problems = [_set_answer_length(task, settings)]
    if not _FILE_NAME.fullmatch(str(task.task_name)):
        problems.append(
            f"The task {task.task_name!r} cannot be measured: its samples go to a file of that name. Rename it, without "
            "slashes and not beginning with a dot."
        )
    if _runs_code(task) and not run_code:
        problems.append(
            f"{task.task_name} runs Python code that the model writes, on this machine, within limits that are tried out first "
            "(docs/evaluation-code.md says which). To allow that, set eval.confirm_run_unsafe_code=true."
        )
    # lm_eval would leave the task's own 0 and say so in its log.
    if settings.num_fewshot and task.get_config("num_fewshot") == 0:
        problems.append(
            f"eval.num_fewshot={settings.num_fewshot}, and {task.task_name} is defined without examples. Leave "
            "eval.num_fewshot out, or the task."
        )
    own = task.get_config("num_fewshot") if settings.num_fewshot is None and is_own(task) else None
    if (settings.num_fewshot or own) and _examples_are_the_questions(task):
        asked = f"num_fewshot: {own}" if own else f"eval.num_fewshot={settings.num_fewshot}"
        problems.append(
            f"{asked}, and {task.task_name} has no documents for examples but those it measures, so that a question could come with its "
            "own answer. Set num_fewshot to 0, or give the task a fewshot_split that it does not measure."
        )
    examples = settings.num_fewshot or own or 0
    there = task.fewshot_docs() if examples else None
    if isinstance(there, Sized) and examples > len(there):
        problems.append(
            f"{task.task_name} has {len(there)} documents for examples, and num_fewshot is {examples}. Lower it."
        )
    problems.append(_gold_problem(task, settings) if is_own(task) else None)
    return [problem for problem in problems if problem]


def _gold_problem(task: ConfigurableTask, settings: Settings) -> str | None:
    """What is wrong with the right answers: lm_eval counts a document without one as answered wrong, and says so in its log alone."""
    if not compares_choices(task):
        return None
    wrong, number = [], 0
    for number, document in enumerate(islice(task.eval_docs, settings.limit), 1):
        try:
            choices = task.doc_to_choice(document)
            gold = task.doc_to_text(document) if task.multiple_input else task.doc_to_target(document)
            for one in gold if isinstance(gold, list) else [gold]:
                if one not in choices if isinstance(one, str) else not 0 <= one < len(choices):
                    wrong.append((number, one, len(choices)))
        except Exception as error:  # the task's templates and code are the user's
            return f"The task {task.task_name} cannot be measured: its document {number}: {summary(error)}"
    if not wrong:
        return None
    first, one, count = wrong[0]
    return (
        f"{task.task_name}: {len(wrong)} right answers of {number} documents are none of their choices: document {first} has {one!r}, and "
        f"its {count} choices are numbered from 0 to {count - 1}. doc_to_target must give that number or the choice's text; a "
        "label of -1 is a hidden one."
    )


def _parts(manager: TaskManager, name: str) -> list[str]:
    """What a group or tag has in it, where its parts may be reached without each other.

    None where all need one dataset, and where the group changes what its parts are.
    """
    from lm_eval.tasks._index import Kind

    entry = manager.task_index.get(name)
    if entry is None or entry.kind not in (Kind.GROUP, Kind.TAG):
        return []
    listed = sorted(entry.tags) if entry.kind is Kind.TAG else (entry.cfg or {}).get("task")
    parts = [part for part in listed or () if isinstance(part, str)]
    known = [manager.task_index.get(part) for part in parts]
    datasets = {(part.cfg or {}).get("dataset_path") for part in known if part is not None}
    inside = any(part is not None and part.kind in (Kind.GROUP, Kind.TAG) for part in known)
    return parts if len(parts) == len(listed or ()) and (len(datasets) > 1 or inside) else []


def _load_task(manager: TaskManager, task: Task, tasks: LoadedTasks, settings: Settings) -> list[str]:
    """Add a task to those that are loaded; returns what is wrong with it."""
    try:
        loaded = manager.load([task.given])
    except Exception as error:  # a task's YAML, code and dataset are the user's: anything may come out of them
        traceback.print_exc()
        reason = summary(error)
        if not _is_unreachable(error):
            return [why_not_loaded(task.name, error)]
        parts = _parts(manager, task.given)
        beside = (
            " What else the group has in it is measured by itself, and the group's own score is not known."
            if parts
            else ""
        )
        tasks.missing[task.name] = reason + beside
        return [problem for part in parts for problem in _load_task(manager, Task(part, part), tasks, settings)]
    unscored = [reason for leaf in loaded["tasks"].values() for reason in metrics_not_found(leaf)]
    if unscored:
        tasks.missing[task.name] = "; ".join(dict.fromkeys(unscored))
        return []
    group = loaded["groups"].get(task.name)
    tasks.by_name[task.name] = [group] if group is not None else list(loaded["tasks"].values())
    return [problem for leaf in loaded["tasks"].values() for problem in _problems_of(leaf, settings, tasks.run_code)]


def load_tasks(selection: TaskSelection, settings: Settings, run_code: bool, log: Path) -> LoadedTasks:
    """Load every task's documents, before any weight.

    Args:
        selection: From `check_tasks`.
        settings: From `resolve_settings`.
        run_code: Whether tasks may run what the model writes: the recipe's eval.confirm_run_unsafe_code.
        log: Where the libraries' words go.

    Raises:
        EvaluationError: A task is broken, needs a package, or contradicts the settings; all at once.
    """
    from lm_eval.tasks import TaskManager

    # A code task asks `evaluate` for its metric as soon as it is loaded. That the user's shell has it set is no consent.
    os.environ["HF_ALLOW_CODE_EVAL"] = "1" if run_code else "0"
    render_in_sandbox()
    score_code_within_limits()
    tasks = LoadedTasks({}, {}, run_code)
    problems: list[str] = []
    with chatter_to(log):
        manager = TaskManager(
            include_path=[str(path) for path in selection.include_paths], include_defaults=not selection.all_local
        )
        for task in selection.tasks:
            problems += _load_task(manager, task, tasks, settings)
    # Groups of files that are read only now may share tasks too.
    problems += asked_twice((leaf.task_name, name) for name, items in tasks.by_name.items() for leaf in leaves(items))
    if problems:
        raise EvaluationError("\n".join(dict.fromkeys(problems)))
    if not tasks.by_name:
        reasons = "".join(f"\n  {name}: {reason}" for name, reason in tasks.missing.items())
        raise EvaluationError(f"No task can be measured:{reasons}\n{WHERE_TO_GET}")
    if tasks.missing:  # the reasons come with the results
        print(f"Out of reach, and left out: {', '.join(tasks.missing)}. {WHERE_TO_GET}", file=sys.stderr)
    code = [leaf for items in tasks.by_name.values() for leaf in leaves(items) if _runs_code(leaf)]
    if code:
        tasks.generated_code.update(prepare_code_tasks(code))
    return tasks
