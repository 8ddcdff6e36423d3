"""What a run's folder holds, read so that nothing that is missing or broken stops the reader. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from sft.errors import UserError
from sft.recipe.schema import Recipe
from sft.run.directory import Run


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
    chat: dict[str, Any] = field(default_factory=dict)
    """Answers of base and tuned to the fixed prompts."""

    flips: list[dict[str, Any]] | None = None
    """Documents that one of the two answered right and the other wrong; None where nobody has looked."""

    during: list[dict[str, Any]] = field(default_factory=list)
    """Lines of eval/during.jsonl, by step."""

    @property
    def name(self) -> str:
        """Of the run, with its recipe's."""
        return f"{self.record.get('recipe') or self.run.path.parent.name}, run {self.run.path.name}"


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The dictionaries in a file of JSON lines, without those that are cut off."""
    try:
        content = path.read_bytes()
    except OSError:
        return
    # Not splitlines: an answer may hold U+2028, which ends no line of JSON.
    for line in content.split(b"\n"):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue  # the last line of a run that was killed while it wrote
        if isinstance(value, dict):
            yield value


def _by_step(path: Path) -> list[dict[str, Any]]:
    """One line for each step: the last written, where a resumed run went through a step again."""
    points: dict[int, dict[str, Any]] = {}
    for line in _lines(path):
        step = line.get("step")
        if isinstance(step, int) and not isinstance(step, bool) and abs(step) < 2**53:
            points[step] = line
    return [points[step] for step in sorted(points)]


def read_run(run: Run) -> Recorded:
    """Read everything that a report shows."""
    try:
        recipe: Recipe | None = run.recipe()
    except (UserError, OSError, KeyError, TypeError, ValueError):
        recipe = None
    evaluation = run.comparison_file.parent
    return Recorded(
        run=run,
        record=_read(run.path / "run.json"),
        recipe=recipe,
        decisions=entries(_read(run.plan_file), "decisions"),
        ledger=_read(run.ledger_file),
        metrics=_by_step(run.metrics_file),
        comparison=_read(run.comparison_file),
        chat=_read(evaluation / "chat.json"),
        flips=list(_lines(evaluation / "flips.jsonl")) if (evaluation / "flips.jsonl").is_file() else None,
        during=_by_step(evaluation / "during.jsonl"),
    )


def get(values: object, *keys: str) -> Any:
    """A value inside dictionaries, or None where one of them is missing."""
    for key in keys:
        values = values.get(key) if isinstance(values, dict) else None
    return values


def entries(values: object, key: str) -> list[dict[str, Any]]:
    """The dictionaries of a list inside a dictionary; none where there is no such list."""
    return [one for one in listed(values, key) if isinstance(one, dict)]


def listed(values: object, *keys: str) -> list[Any]:
    """A list inside dictionaries; empty where there is none."""
    found = get(values, *keys)
    return found if isinstance(found, list) else []


def mapping(values: object, *keys: str) -> dict[str, Any]:
    """A dictionary inside dictionaries; empty where there is none."""
    found = get(values, *keys)
    return found if isinstance(found, dict) else {}


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is one, not a truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool)
