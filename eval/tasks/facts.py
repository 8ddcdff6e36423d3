"""Describes the loaded tasks by what decides a score: definition, code, documents, examples, answer length."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable
from inspect import getsource
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.tasks.load import LoadedTasks, is_own, leaves, source_of
from eval.tasks.settings import Settings

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask

_OF_THE_PLACE = ("dataset_path", "dataset_name", "dataset_kwargs", "metadata")
"""Keys of a task that say where its documents lie: the documents themselves are hashed."""


def documents_hash(documents: Iterable[Any]) -> str:
    """SHA-256 of documents in their order, each as lm_eval writes it for its own hash of a document."""
    from lm_eval.utils import handle_non_serializable

    sha256 = hashlib.sha256()
    for document in documents:
        sha256.update(json.dumps(document, default=handle_non_serializable, ensure_ascii=False).encode())
        sha256.update(b"\n")
    return sha256.hexdigest()


def definition_hash(task: ConfigurableTask) -> str:
    """SHA-256 of a task's configuration as lm_eval has it, with all that it includes and overrides, and of a user's task's code.

    The code of lm_eval's own tasks is known by its version.
    """
    config = {key: value for key, value in task.dump_config().items() if key not in _OF_THE_PLACE}
    source = source_of(task)
    # Where the folder lies is no part of what a task does.
    parts = [json.dumps(config, default=_code).replace(f"{source.parent}/", "").encode()]
    if is_own(task) and source.is_absolute():  # lm_eval says "inline" of what has no file
        loaded = {str(getattr(module, "__file__", None)) for module in list(sys.modules.values())}
        for file in sorted(Path(one) for one in loaded if Path(one).is_relative_to(source.parent)):
            parts += [str(file.relative_to(source.parent)).encode(), file.read_bytes()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def _code(value: object) -> str:
    """A function's source; of any other object its type, since its text may name an address in memory."""
    try:
        return getsource(value)  # type: ignore[arg-type]
    except (TypeError, OSError):
        return type(value).__qualname__


def _facts(task: ConfigurableTask, settings: Settings) -> dict[str, Any]:
    own = task.get_config("num_fewshot")
    examples = (own if own == 0 or settings.num_fewshot is None else settings.num_fewshot) or 0
    generates = task.get_config("output_type") == "generate_until"
    return {
        "version": task.VERSION,
        "definition_sha256": definition_hash(task),
        "num_fewshot": examples,
        "documents_sha256": documents_hash(islice(task.eval_docs, settings.limit)),
        "examples_sha256": documents_hash(task.fewshot_docs() or ()) if examples else None,
        "repeats": task.get_config("repeats"),
        "generation_kwargs": task.get_config("generation_kwargs") if generates else None,
    }


def task_facts(settings: Settings, tasks: LoadedTasks) -> dict[str, dict[str, Any]]:
    """The value of `Settings.loaded`."""
    from lm_eval.api.group import Group

    items = [item for loaded in tasks.by_name.values() for item in loaded]
    groups = [group for item in items if isinstance(item, Group) for group in (item, *item.get_all_groups())]
    aggregates = {
        group.name: {"aggregation": {key: value for key, value in (group.to_dict() or {}).items() if key != "metadata"}}
        for group in groups
        if group.has_aggregation
    }
    facts = {str(task.task_name): _facts(task, settings) for task in leaves(items)}
    # As it will be read from results.json: a tuple is a list there.
    plain: dict[str, dict[str, Any]] = json.loads(json.dumps(facts | aggregates, default=str))
    return plain
