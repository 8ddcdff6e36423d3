"""What only the loaded tasks tell of themselves and decides a score: their versions, documents, examples and answer lengths."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any

from eval.settings import Settings
from eval.tasks import LoadedTasks, leaves

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask


def documents_hash(documents: Iterable[Any]) -> str:
    """SHA-256 of documents in their order, each as lm_eval writes it for its own hash of a document."""
    from lm_eval.utils import handle_non_serializable

    sha256 = hashlib.sha256()
    for document in documents:
        sha256.update(json.dumps(document, default=handle_non_serializable, ensure_ascii=False).encode())
        sha256.update(b"\n")
    return sha256.hexdigest()


def _facts(task: ConfigurableTask, settings: Settings) -> dict[str, Any]:
    own = task.get_config("num_fewshot")
    examples = (own if own == 0 or settings.num_fewshot is None else settings.num_fewshot) or 0
    facts = {
        "version": task.VERSION,
        "num_fewshot": examples,
        "documents_sha256": documents_hash(islice(task.eval_docs, settings.limit)),
        "examples_sha256": documents_hash(task.fewshot_docs() or ()) if examples else None,
        "repeats": task.get_config("repeats"),
        "generation_kwargs": None,
    }
    if task.get_config("output_type") == "generate_until":
        facts["generation_kwargs"] = task.get_config("generation_kwargs")
    # As it will be read from results.json: a tuple is a list there.
    plain: dict[str, Any] = json.loads(json.dumps(facts, default=str))
    return plain


def task_facts(settings: Settings, tasks: LoadedTasks) -> dict[str, dict[str, Any]]:
    """What the loaded tasks add to the settings: the value of `Settings.loaded`.

    Args:
        settings: From `resolve_settings`.
        tasks: From `load_tasks`.
    """
    loaded = [task for items in tasks.by_name.values() for task in leaves(items)]
    return {str(task.task_name): _facts(task, settings) for task in loaded}
