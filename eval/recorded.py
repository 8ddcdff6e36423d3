"""What a run's folder holds, read so that nothing that is missing or broken stops the reader. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft.errors import UserError
from sft.recipe import Recipe
from sft.run_directory import Run


@dataclass(frozen=True)
class Recorded:
    """What the run's folder holds; empty for each file that is missing or cannot be read."""

    run: Run
    record: dict[str, Any]
    recipe: Recipe | None
    decisions: list[dict[str, Any]]
    ledger: dict[str, Any]
    metrics: list[dict[str, Any]]
    """Lines of metrics.jsonl, by step."""

    comparison: dict[str, Any]


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _read_metrics(path: Path) -> list[dict[str, Any]]:
    """One line for each logged step: the last written, where a resumed run went through a step again."""
    points: dict[int, dict[str, Any]] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    for line in lines:
        try:
            point = json.loads(line)
            points[int(point["step"])] = point
        except (ValueError, KeyError, TypeError):
            continue  # the last line of a run that was killed while it wrote
    return [points[step] for step in sorted(points)]


def read_run(run: Run) -> Recorded:
    """Read everything that a report shows."""
    try:
        recipe: Recipe | None = run.recipe()
    except (UserError, OSError, KeyError, TypeError, ValueError):
        recipe = None
    return Recorded(
        run=run,
        record=_read(run.path / "run.json"),
        recipe=recipe,
        decisions=entries(_read(run.plan_file), "decisions"),
        ledger=_read(run.ledger_file),
        metrics=_read_metrics(run.metrics_file),
        comparison=_read(run.comparison_file),
    )


def get(values: object, *keys: str) -> Any:
    """A value inside dictionaries, or None where one of them is missing."""
    for key in keys:
        values = values.get(key) if isinstance(values, dict) else None
    return values


def entries(values: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """The dictionaries of a list inside a dictionary; none where there is no such list."""
    found = values.get(key)
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
