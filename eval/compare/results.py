"""Reads what lm_eval left of one measured model: results.json and the samples of each task."""

from __future__ import annotations

import json
from math import isfinite
from pathlib import Path
from typing import Any

Results = dict[str, Any]
"""results.json, or a dict inside it."""

Samples = dict[str, list[dict[str, Any]]]
"""The lines of the samples files, by task."""


def read_samples(folder: Path) -> Samples:
    """Read lm_eval's samples, by task."""
    return {
        # Not splitlines: an answer may hold U+2028, which is no line break in JSON.
        path.stem.removeprefix("samples_"): [json.loads(line) for line in path.read_bytes().split(b"\n") if line]
        for path in sorted(folder.glob("samples_*.jsonl"))
    }


def number(value: object) -> float | None:
    """A score as a number; lm_eval writes "N/A" where it has none."""
    return float(value) if isinstance(value, (int, float)) else None


def finite(value: Any) -> Any:
    """The same value with null for infinite numbers and NaN, which JSON does not know."""
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def metric_keys(scores: Results) -> list[str]:
    """The metrics among a task's results, as lm_eval spells them: metric,filter.

    >>> metric_keys({"alias": "arc", "sample_len": 9, "acc,none": 0.5, "acc_stderr,none": 0.1})
    ['acc,none']
    """
    return [key for key in scores if "," in key and not key.partition(",")[0].endswith("_stderr")]


def leaves(results: Results, task: str) -> list[str]:
    """The tasks inside a group, at any depth; a task itself."""
    inside = results.get("group_subtasks", {}).get(task) or []
    return [leaf for name in inside for leaf in leaves(results, name)] if inside else [task]


def top_level(results: Results) -> list[str]:
    """The tasks and groups that are not part of a group with a score of its own."""
    inside = results.get("group_subtasks", {})

    def scored(name: str) -> list[str]:
        if metric_keys(results["results"].get(name, {})) or not inside.get(name):
            return [name]
        return [found for part in inside[name] for found in scored(part)]

    parts = {part for names in inside.values() for part in names}
    return [found for name in results["results"] if name not in parts for found in scored(name)]
