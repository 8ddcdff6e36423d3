"""Collects the comparison of several runs for compare.html: what differs between them, how they trained, what they scored.

The first run is the one that the others are compared with. Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from eval.compare.gate import describe_gate
from eval.report.charts import SMOOTH_FROM, Series, chart, running_mean, series_of
from eval.report.collect import guarded
from eval.report.evaluation import flattened
from eval.report.formats import Code, code, duration, interval, kind_of, metric_name, number, words
from eval.report.run_files import RunFiles, column, data_names, method, model_name
from eval.report.training import mean_rate
from sft.recipe.changes import MISSING as NOT_THERE
from sft.recipe.changes import differences, is_same_training

Part = dict[str, Any]

LETTERS = "ABCDEFGHIJ"
"""Of the runs on the page: at most so many."""

CURVES = (
    ("Loss", "by step", "loss", "step"),
    ("Loss", "by tokens seen", "loss", "tokens_seen"),
    ("Eval loss", "by step", "held_out_loss", "step"),
    ("Learning rate", "by step", "learning_rate", "step"),
    ("Gradient norm", "before clipping", "grad_norm", "step"),
    ("Throughput", "tokens/s", "tokens_per_second", "step"),
    ("Peak memory", "GiB, rank 0", "peak_memory_gib", "step"),
)
"""Title, what is beside it, key of metrics.jsonl, key that is x."""


def collect_runs(runs: Sequence[RunFiles], folder: Path) -> Part:
    """What runs.html.jinja shows.

    Args:
        runs: 2 to 10.
        folder: Where the page will be: its links are relative to it.
    """
    parts: dict[str, Callable[[Sequence[RunFiles]], Part]] = {
        "overview": partial(_overview, folder=folder),
        "differences": _differences,
        "evaluation": _evaluation,
        "curves": _curves,
        "final": _final,
    }
    return {
        "title": f"{len(runs)} runs compared",
        "letters": LETTERS[: len(runs)],
        "attention": guarded(_attention, runs).get("lines", []),
        **{name: guarded(collect, runs) for name, collect in parts.items()},
    }


def _attention(runs: Sequence[RunFiles]) -> Part:
    lines = []
    for letter, files in zip(LETTERS, runs, strict=False):
        if files.record.get("status") != "finished":
            lines.append(f"{letter}: not finished ({words(files.record.get('status'))}): the numbers are those so far.")
        if files.comparison and not files.comparison.get("complete"):
            lines.append(f"{letter}: the evaluation is incomplete.")
        if not _comparable(files, runs):
            lines.append(
                f"{letter}: measured under other settings than the first run, so its scores are not comparable."
            )
    return {"lines": lines}


def _comparable(files: RunFiles, runs: Sequence[RunFiles]) -> bool:
    """Whether a run was measured under the settings of the first run that was measured."""
    first = next((one.comparison for one in runs if one.comparison), {})
    return not files.comparison or files.comparison.get("settings_hash") == first.get("settings_hash")


def _overview(runs: Sequence[RunFiles], folder: Path) -> Part:
    """Each run, and what is the same in all."""
    described: dict[str, list[Any]] = {
        "Model": [model_name(files) for files in runs],
        "Method": [method(files) for files in runs],
        "Data": [data_names(files) for files in runs],
    }
    same = {name: values[0] for name, values in described.items() if all(value == values[0] for value in values)}
    rows = [
        {
            "name": files.name,
            "status": words(files.record.get("status")),
            "started": words(files.record.get("started"))[:16].replace("T", " "),
            "differing": [values[place] for name, values in described.items() if name not in same],
            "link": quote(os.path.relpath(files.run.page_file, folder)) if files.run.page_file.is_file() else None,
        }
        for place, files in enumerate(runs)
    ]
    return {"rows": rows, "differing": [name for name in described if name not in same], "same": same}


def _values(files: RunFiles) -> dict[str, Part]:
    """What runs may differ in, by subject; empty where it is not recorded."""
    recipe = files.record.get("recipe_values") or (files.recipe.model_dump(mode="json") if files.recipe else {})
    fingerprint = files.record.get("data_fingerprint")
    return {
        "Recipe": recipe,
        "Plan": {words(one.get("name")): one.get("value") for one in files.decisions},
        "Data": ({"fingerprint": str(fingerprint)[:12]} if fingerprint else {}) | (files.ledger.get("total") or {}),
        "Hardware": files.record.get("hardware") or {},
        "Versions": files.record.get("versions") or {},
        "Git": files.record.get("git") or {},
    }


def _differences(runs: Sequence[RunFiles]) -> Part:
    """The keys that are not the same in all runs that recorded them, by subject."""
    values = [_values(files) for files in runs]
    subjects, same = [], []
    for name in values[0]:
        known = [place for place in range(len(runs)) if values[place][name]]
        rows = _differing([values[place][name] for place in known], name == "Recipe")
        unknown = [LETTERS[place] for place in range(len(runs)) if place not in known]
        if rows or unknown:
            subjects.append(
                {"name": name, "letters": [LETTERS[place] for place in known], "rows": rows, "unknown": unknown}
            )
        else:
            same.append(name.lower())
    return {"subjects": subjects, "same": ", ".join(same)}


def _differing(values: Sequence[Part], is_recipe: bool) -> list[Part]:
    found: dict[str, dict[int, Any]] = {}
    for place, others in enumerate(values[1:], 1):
        for change in differences(values[0], others):
            found.setdefault(change.key, {0: change.old})[place] = change.new
    return [
        {
            "key": Code(key),
            "counts": not (is_recipe and is_same_training(key)),
            "cells": [_cell(key, by_run.get(place, by_run[0])) for place in range(len(values))],
        }
        for key, by_run in sorted(found.items())
    ]


def _cell(key: str, value: object) -> str:
    if value == NOT_THERE:
        return "-"
    if key == "eval.gate" and isinstance(value, dict):
        return describe_gate(value)
    if isinstance(value, float):
        return f"{value:.10g}"  # 3e-05, not 3.0000000000000004e-05
    if isinstance(value, dict):  # a section that the other run lacks
        inside = {name: one for name, one in flattened(value).items() if one not in (None, {}, "[]")}
        return ", ".join(f"{name}: {_cell(name, one)}" for name, one in inside.items()) or "defaults"
    return "none" if value is None else words(value)


def _evaluation(runs: Sequence[RunFiles]) -> Part:
    """Every metric of every run, and the settings that differ where scores are not comparable."""
    measured = [place for place, files in enumerate(runs) if files.comparison]
    if not measured:
        return {"missing": "None of the runs has a comparison of base and tuned."}
    found: dict[tuple[str, str], dict[int, Part]] = {}
    for place in measured:
        for entry in runs[place].comparison.get("metrics") or []:
            found.setdefault((words(entry.get("task")), metric_name(entry)), {})[place] = _score(entry)
    first = flattened(runs[measured[0]].comparison.get("settings") or {})
    others = [place for place in measured if not _comparable(runs[place], runs)]
    settings = [differences(first, flattened(runs[place].comparison.get("settings") or {})) for place in others]
    return {
        "columns": [(LETTERS[place], place not in others) for place in measured],
        "rows": [
            {"task": task, "metric": metric, "cells": [by_run.get(place) for place in measured]}
            for (task, metric), by_run in found.items()
        ],
        "unmeasured": [LETTERS[place] for place in range(len(runs)) if place not in measured],
        "first": LETTERS[measured[0]],
        "settings": [
            {
                "letter": LETTERS[place],
                "rows": [[Code(one.key), _cell(one.key, one.old), _cell(one.key, one.new)] for one in changes],
            }
            for place, changes in zip(others, settings, strict=True)
        ],
    }


def _score(entry: Part) -> Part:
    return {
        "scores": f"{number(entry.get('base'), '.4f')} → {number(entry.get('tuned'), '.4f')}",
        "difference": f"{number(entry.get('difference'), '+.4f')} {interval(entry.get('interval_95'))}",
        "verdict": "does not decide" if entry.get("decides") is False else words(entry.get("verdict")),
        "kind": kind_of(entry.get("verdict")),
    }


def _curves(runs: Sequence[RunFiles]) -> Part:
    """Each quantity of all runs in one chart; of many points their running mean, as ten noisy curves would hide each other."""
    charts = []
    for title, unit, key, over in CURVES:
        curves = []
        for place, files in enumerate(runs):
            one = series_of(files.metrics, key, LETTERS[place], f"c{place}", over)
            if key in ("loss", "tokens_per_second", "grad_norm") and len(one.x) >= SMOOTH_FROM:
                one = Series(one.name, one.x, running_mean(one.y, len(one.x) // 20), one.color)
            curves.append(one)
        if any(len(one.x) for one in curves):
            x_label = "optimizer step" if over == "step" else "tokens"
            charts.append(chart(title, unit, curves, x_label=x_label, from_zero="loss" not in key))
    return {"charts": charts} if charts else {"missing": "None of the runs has logged an optimizer step."}


def _final(runs: Sequence[RunFiles]) -> Part:
    """How each run ended."""

    def last(files: RunFiles, key: str, form: str = ",") -> str:
        values = column(files, key)
        return number(values[-1] if values else None, form)

    facts: dict[str, Callable[[RunFiles], str]] = {
        "Last logged step": lambda files: last(files, "step"),
        "Tokens seen": lambda files: last(files, "tokens_seen", ",.0f"),
        "Loss at the last logged step": lambda files: last(files, "loss", ".4f"),
        "Mean training loss": lambda files: number(files.record.get("train_loss"), ".4f"),
        "Eval loss at the end": lambda files: last(files, "held_out_loss", ".4f"),
        "Tokens per second": lambda files: number(mean_rate(files.metrics), ",.0f"),
        "Peak memory of rank 0, GiB": lambda files: number(max(column(files, "peak_memory_gib"), default=None), ".2f"),
        "Time to train": lambda files: duration((files.record.get("timings") or {}).get("train_seconds")),
        "Settings of the evaluation": lambda files: code(str(files.comparison.get("settings_hash") or "")[:12] or None),
    }
    return {"rows": [[name, *map(fact, runs)] for name, fact in facts.items()]}
