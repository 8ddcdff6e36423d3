"""The evaluations of several runs side by side, for compare.html."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eval.report.blocks import Block, Code, Key, Line, Paragraph, Table, Under, joined, number, words
from eval.report.evaluation import flattened
from eval.report.results import Recorded, entries, get, mapping
from eval.report.scores import interval_of, kind_of, metric_name, shown_interval
from sft.recipe.changes import MISSING as NOT_THERE
from sft.recipe.changes import differences

Keyed = Sequence[tuple[Key, Recorded]]
"""Runs with their letters."""


def not_comparable(runs: Keyed) -> list[Key]:
    """Those measured under other settings than the first run that was measured."""
    measured = [(key, get(of.comparison, "settings_hash")) for key, of in runs if of.comparison]
    return [key for key, settings in measured if settings is None or settings != measured[0][1]]


def cell(value: object) -> str:
    """One value of a table of differences."""
    if value == NOT_THERE:
        return "-"
    if isinstance(value, float):
        return f"{value:.10g}"  # 3e-05, not 3.0000000000000004e-05
    if isinstance(value, dict):  # a section of the recipe that the other run has not
        set_there = {key: one for key, one in flattened(value).items() if one not in (None, {}, "[]")}
        return ", ".join(f"{key}: {cell(one)}" for key, one in set_there.items()) or "as by default"
    return "none" if value is None else words(value)


def evaluation_part(runs: Keyed) -> list[Block]:
    """Every metric of every run, and why some cannot be compared."""
    measured = [(key, of) for key, of in runs if of.comparison]
    if not measured:
        return [Paragraph("None of the runs has a comparison of base and tuned.")]
    told = "In each cell base → tuned; the difference with its 95% interval; the verdict of the run's own comparison."
    blocks: list[Block] = [_scores(measured), Paragraph(told)]
    missing: list[Line] = [key for key, of in runs if not of.comparison]
    if missing:
        blocks.append(Paragraph(joined(["Not evaluated:", joined(missing)], " ")))
    others = not_comparable(measured)
    for key, of in measured:
        if key in others:
            blocks += _why_not(measured[0], (key, of))
    return blocks


def _scores(measured: Keyed) -> Table:
    found: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for key, of in measured:
        for entry in entries(of.comparison, "metrics"):
            found.setdefault((words(entry.get("task")), metric_name(entry)), {})[key.text] = entry
    others = not_comparable(measured)
    head: list[Line] = ["Task"]
    head += [(key, Under("not comparable", "bad")) if key in others else key for key, _ in measured]
    rows: list[list[Line]] = [
        [(task, Under(metric)), *(_score(by_run.get(key.text)) for key, _ in measured)]
        for (task, metric), by_run in found.items()
    ]
    return Table(head, rows, numbers=range(1, len(head)))


def _score(entry: dict[str, Any] | None) -> Line:
    if entry is None:
        return "not measured"
    difference = f"{number(entry.get('difference'), '+.4f')} {shown_interval(interval_of(entry))}"
    verdict = words(entry.get("verdict"))
    scores = f"{number(entry.get('base'), '.4f')} → {number(entry.get('tuned'), '.4f')}"
    return scores, Under(difference), Under(verdict, kind_of(verdict))


def _why_not(first: tuple[Key, Recorded], other: tuple[Key, Recorded]) -> list[Block]:
    settings = [flattened(mapping(of.comparison, "settings")) for _, of in (first, other)]
    changes = differences(settings[0], settings[1])
    rows: list[list[Line]] = [[Code(change.key), cell(change.old), cell(change.new)] for change in changes]
    told: Line = (other[0], " is not comparable with ", first[0], ": it was measured under other settings.")
    return [Paragraph(told), *([Table(["Setting", first[0], other[0]], rows)] if rows else [])]
