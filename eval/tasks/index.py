"""Keeps the names of lm_eval's tasks and metrics: reading its 14,000 task files takes seconds, a typo should cost none."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sft.files import cached


@dataclass(frozen=True)
class TaskIndex:
    """What lm_eval knows by name."""

    names: frozenset[str] = frozenset()
    """Tasks, groups and tags."""

    unsafe: frozenset[str] = frozenset()
    """Those that run code which the model wrote, or contain a task that does."""

    metrics: frozenset[str] = frozenset()

    members: dict[str, list[str]] | None = None
    """Per group and tag, the names in it."""


def known_tasks() -> TaskIndex:
    """The index of the installed lm_eval, from the user's cache."""
    kept = cached("eval-tasks", version("lm_eval"), [Path(__file__)], _build)
    names, unsafe, metrics = (frozenset(kept[key]) for key in ("names", "unsafe", "metrics"))
    return TaskIndex(names, unsafe, metrics, kept["members"])


def _build() -> dict[str, Any]:
    """Read lm_eval's task files; takes seconds."""
    import lm_eval.api.metrics  # noqa: F401  # registers them
    from lm_eval.api.registry import metric_registry
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._index import Kind

    entries = TaskManager().task_index
    inside = {
        # A task's own `tags` are the tags it carries; only those of a tag are its members.
        name: sorted([*members_of(entry.cfg), *(entry.tags if entry.kind is Kind.TAG else ())])
        for name, entry in entries.items()
        if entry.kind in (Kind.GROUP, Kind.TAG)
    }
    marked = {name for name, entry in entries.items() if (entry.cfg or {}).get("unsafe_code")}
    unsafe = marked | {name for name in inside if marked & reached(name, inside)}
    return {"names": [*entries], "unsafe": sorted(unsafe), "metrics": [*metric_registry], "members": inside}


def members_of(config: dict[str, Any] | None) -> list[str]:
    """The names in a group's configuration, groups defined inside it included."""
    inside: list[str] = []
    listed = (config or {}).get("task")
    for item in listed if isinstance(listed, list) else []:
        if isinstance(item, str):
            inside.append(item)
        elif isinstance(item, dict):
            inside += [str(item[key]) for key in ("group", "task") if isinstance(item.get(key), str)]
            inside += members_of(item)
    return inside


def reached(name: str, inside: dict[str, list[str]]) -> set[str]:
    """A name and everything in it, through groups in groups.

    >>> sorted(reached("all", {"all": ["maths", "a"], "maths": ["b"], "other": ["c"]}))
    ['a', 'all', 'b', 'maths']
    """
    seen, left = {name}, [name]
    while left:
        more = set(inside.get(left.pop(), ())) - seen
        seen |= more
        left += more
    return seen
