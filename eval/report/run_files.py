"""Reads a run directory for the report. Files that are missing or broken never stop the reader."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval.report.formats import Code, code, is_number, words
from sft.errors import UserError
from sft.recipe.schema import Recipe
from sft.run.directory import Run, read_lines


@dataclass(frozen=True)
class RunFiles:
    """The files of a run directory; empty for each that is missing or cannot be read."""

    run: Run
    record: dict[str, Any] = field(default_factory=dict)
    recipe: Recipe | None = None
    decisions: list[dict[str, Any]] = field(default_factory=list)
    ledger: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    """Lines of metrics.jsonl, by step."""

    comparison: dict[str, Any] = field(default_factory=dict)
    chat: dict[str, Any] = field(default_factory=dict)
    flips: list[dict[str, Any]] | None = None
    """None where the file is missing."""

    during: list[dict[str, Any]] = field(default_factory=list)
    """Lines of eval/during.jsonl, by step."""

    @property
    def name(self) -> str:
        """The recipe's name and the run's."""
        return f"{self.record.get('recipe') or self.run.path.parent.name}, run {self.run.path.name}"

    def at(self, path: str) -> Any:
        """A value of run.json by its dotted path; None where it is missing."""
        return value_at(self.record, path)

    def tokens(self) -> dict[str, int]:
        """The total of the token ledger."""
        return value_at(self.ledger, "total.tokens") or {}


def value_at(value: Any, path: str) -> Any:
    """A value in nested dicts by its dotted path; None where it is missing."""
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def read_run(run: Run) -> RunFiles:
    """Read everything that a report shows."""
    try:
        recipe: Recipe | None = run.recipe()
    except (UserError, OSError, KeyError, TypeError, ValueError):
        recipe = None
    evaluation = run.comparison_file.parent
    decisions = _read(run.plan_file).get("decisions")
    flips = evaluation / "flips.jsonl"
    return RunFiles(
        run=run,
        record=_read(run.path / "run.json"),
        recipe=recipe,
        decisions=[one for one in decisions if isinstance(one, dict)] if isinstance(decisions, list) else [],
        ledger=_read(run.ledger_file),
        metrics=_by_step(run.metrics_file),
        comparison=_read(run.comparison_file),
        chat=_read(evaluation / "chat.json"),
        flips=list(_lines(flips)) if flips.is_file() else None,
        during=_by_step(evaluation / "during.jsonl"),
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The dicts in a file of JSON lines."""
    # Not splitlines: an answer may hold U+2028, which is no line break in JSON.
    for line in path.read_bytes().split(b"\n") if path.is_file() else []:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue  # the last line of a run that was killed while it wrote
        if isinstance(value, dict):
            yield value


def _by_step(path: Path) -> list[dict[str, Any]]:
    """One line per step: the last one written, where a resumed run repeated a step."""
    points = {line["step"]: line for line in read_lines(path) if abs(line["step"]) < 2**53}
    return [points[step] for step in sorted(points)]


def model_name(files: RunFiles) -> list[str]:
    """The base model and its revision."""
    revision = files.at("base_model.revision")
    return [code(files.at("base_model.name_or_path")), *([f"revision {revision}"] if revision else [])]


def data_names(files: RunFiles) -> list[str]:
    """The paths of the training data."""
    return [Code(source.path) for source in files.recipe.sources] if files.recipe else [words(None)]


def method(files: RunFiles) -> str:
    """Full fine-tuning, or which adapters."""
    if files.recipe is None:
        return words(None)
    lora = files.recipe.model.lora
    if lora is None:
        return "all weights (full fine-tuning)"
    kind = files.recipe.model.quantization
    return f"LoRA adapters: rank {lora.r}, alpha {lora.lora_alpha}" + (f"; the base in {kind} (QLoRA)" if kind else "")


def column(files: RunFiles, key: str) -> list[float]:
    """The numbers of one key of metrics.jsonl, by step."""
    return [point[key] for point in files.metrics if is_number(point.get(key))]
