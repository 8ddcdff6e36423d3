"""What came out of loading a task, in words: its file, the split or the line that is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from traceback import walk_tb
from typing import TYPE_CHECKING

from eval.quiet import first_line, summary
from eval.tasks.data_files import splits_of
from sft.errors import did_you_mean

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask

SPLIT_KEYS = ("test_split", "validation_split", "fewshot_split", "training_split")


def _task_in(error: BaseException) -> ConfigurableTask | None:
    """The task that was being loaded, of a group's too: the innermost on the way to the error."""
    from lm_eval.api.task import ConfigurableTask

    held = [frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__)]
    tasks = [value for value in held if isinstance(value, ConfigurableTask)]
    return tasks[-1] if tasks else None


def _own_file(task: ConfigurableTask) -> Path | None:
    """The task's YAML where it is the user's."""
    import lm_eval

    config = getattr(task, "config", None)
    source = Path(str((getattr(config, "metadata", None) or {}).get("config_source")))
    inside = Path(str(lm_eval.__file__)).parent
    return source if source.is_file() and not source.resolve().is_relative_to(inside) else None


def _split_missing(error: BaseException, task: ConfigurableTask) -> str | None:
    splits = getattr(task, "dataset", None)
    if not (isinstance(error, KeyError) and error.args and isinstance(splits, dict)) or error.args[0] in splits:
        return None
    asked = str(error.args[0])
    keys = [key for key in SPLIT_KEYS if getattr(task.config, key) == asked]
    named = f"{keys[0]}: {asked}" if keys else asked
    hint = did_you_mean(asked, [*map(str, splits)], ".")
    return f"`{named}` is no split of its dataset, which has {', '.join(map(str, splits))}{hint}"


def _lines_wrong(file: Path) -> Iterator[str]:
    """Where a file is not what `datasets` reads as JSON: lines, or one list."""
    text = file.read_bytes()
    whole = text.lstrip().startswith(b"[")
    for number, line in enumerate([text] if whole else text.splitlines(), 1):
        try:
            if line.strip():
                json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            at = number + line.count(b"\n", 0, error.start)
            yield f"{file}, line {at}: it is not UTF-8 text ({error.reason})."
        except json.JSONDecodeError as error:
            at = error.lineno if whole else number
            yield f"{file}, line {at}: it is not JSON: {error.msg} (column {error.colno})."


def _file_unread(error: BaseException, task: ConfigurableTask) -> str | None:
    """The file, and the line where that is known, of documents that cannot be read."""
    from datasets.exceptions import DatasetGenerationError

    empty = isinstance(error, StopIteration) or "corresponds to no data" in str(error)
    if not (empty or isinstance(error, (DatasetGenerationError, UnicodeDecodeError))) and not type(
        error
    ).__module__.startswith("pyarrow"):
        return None
    config = {"dataset_path": task.config.dataset_path, "dataset_kwargs": task.config.dataset_kwargs}
    files = [Path(file).expanduser() for files in splits_of(config).values() for file in files]
    here = [file for file in files if file.is_file()]
    if config["dataset_path"] == "json":
        told = next((wrong for file in here for wrong in _lines_wrong(file)), None)
        if told is not None:
            return told
    reason = "there are none" if empty else first_line(error.__cause__ or error)
    return f"its documents cannot be read{' from ' if here else ''}{', '.join(map(str, here))}: {reason}"


def why_not_loaded(name: str, error: BaseException) -> str:
    """One line on a task that cannot be loaded.

    Args:
        name: The task, group or tag that was asked for.
        error: What came out of lm_eval.
    """
    reason = summary(error)
    task = _task_in(error)
    if task is None:
        return f"The task {name} cannot be loaded: {reason}"
    file = _own_file(task)
    if isinstance(error, IndexError) and getattr(task, "dataset", None) and "size 0" in reason:
        reason = "no document is left of its split: check its process_docs"
    reason = _split_missing(error, task) or _file_unread(error, task) or reason
    return f"The task {name}{f' ({file})' if file else ''} cannot be loaded: {reason}"


def metrics_not_found(task: ConfigurableTask) -> list[str]:
    """The metrics of a task that neither lm_eval has nor `evaluate` could load; lm_eval would fail on them after all is generated."""
    if task.get_config("output_type") != "generate_until" or task.get_config("process_results") is not None:
        return []
    names = [name for name, function in task._metric_fn_list.items() if function is None]
    return [f"`metric: {name}` is none of lm_eval, and `evaluate` cannot load it here (lm_eval.log)" for name in names]
