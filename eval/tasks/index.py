"""The names that lm_eval knows, kept: reading its 14,000 task files takes seconds."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sft.files import write_json

# What `datasets` reads from files of one's own.
LOCAL_FORMATS = ("json", "csv", "parquet", "text", "arrow", "pandas", "xml", "webdataset")


@dataclass(frozen=True)
class TaskIndex:
    """The names that lm_eval knows."""

    names: frozenset[str]
    """Of tasks, groups and tags."""

    unsafe: frozenset[str]
    """Those that run code which the model wrote, on this machine."""

    datasets: dict[str, list[str]]
    """Per name, the datasets on the hub that it needs."""

    members: dict[str, list[str]]
    """Per group and tag, the names in it."""


def _index_files() -> list[Path]:
    """Where the names are kept: in the environment they come from or, where it is read-only, in the user's cache."""
    name = f"lm_eval-{version('lm_eval')}-tasks.json"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return [Path(sys.prefix) / "cache" / name, cache / "sft-recipes" / name]


def read_index(path: Path) -> TaskIndex | None:
    """The names in a file; None where there are none to be read."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        return TaskIndex(
            frozenset(kept["names"]), frozenset(kept["unsafe"]), dict(kept["datasets"]), dict(kept["members"])
        )
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


def members(config: dict[str, Any] | None, tagged: Iterable[str]) -> list[str]:
    """What a group's file or a tag names, groups inside groups included."""
    inside = list(tagged)
    listed = (config or {}).get("task")
    for item in listed if isinstance(listed, list) else []:
        if isinstance(item, str):
            inside.append(item)
        elif isinstance(item, dict):
            inside += [str(item[key]) for key in ("group", "task") if isinstance(item.get(key), str)]
            inside += members(item, ())
    return inside


def build_index() -> TaskIndex:
    """Read the names from lm_eval's task files; seconds."""
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._index import Kind

    entries = TaskManager().task_index
    groups = {name: entry for name, entry in entries.items() if entry.kind in (Kind.GROUP, Kind.TAG)}
    # A task's own `tags` are the tags it carries; only those of a tag are its members.
    inside = {
        name: sorted(members(entry.cfg, entry.tags if entry.kind is Kind.TAG else ())) for name, entry in groups.items()
    }
    marked = [name for name, entry in entries.items() if (entry.cfg or {}).get("unsafe_code")]
    datasets = {name: [entry.cfg["dataset_path"]] for name, entry in entries.items() if _on_hub(entry.cfg)}
    return TaskIndex(
        frozenset(entries), _unsafe_names(inside, marked), datasets | _datasets_of_groups(inside, datasets), inside
    )


def _on_hub(config: dict[str, Any] | None) -> bool:
    path = (config or {}).get("dataset_path")
    return isinstance(path, str) and path not in LOCAL_FORMATS and not path.startswith((".", "/", "~"))


def _datasets_of_groups(inside: dict[str, list[str]], datasets: dict[str, list[str]]) -> dict[str, list[str]]:
    """The datasets of each group and tag, through the groups in it.

    >>> _datasets_of_groups({"all": ["maths", "a"], "maths": ["b"]}, {"a": ["x"], "b": ["y"]})
    {'all': ['x', 'y'], 'maths': ['y']}
    """
    return {
        group: sorted({path for name in reached(group, inside) for path in datasets.get(name, ())}) for group in inside
    }


def reached(name: str, inside: dict[str, list[str]]) -> set[str]:
    """A name and all that is in it, through groups in groups.

    >>> sorted(reached("all", {"all": ["maths", "a"], "maths": ["b"], "other": ["c"]}))
    ['a', 'all', 'b', 'maths']
    """
    seen, left = {name}, [name]
    while left:
        more = set(inside.get(left.pop(), ())) - seen
        seen |= more
        left += more
    return seen


def keep_index(index: TaskIndex, files: Iterable[Path]) -> None:
    """Write the names to the first file that can be written; without one they are read again each time."""
    for path in files:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lists = {
                "names": sorted(index.names),
                "unsafe": sorted(index.unsafe),
                "datasets": index.datasets,
                "members": index.members,
            }
            write_json(path, lists)
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
