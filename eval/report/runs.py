"""Collects the comparison of several runs for compare.html: how they trained and what they scored. `sft diff` says what differs.

The first run is the one that the others are compared with. Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from eval.report.blocks import Block, notice, table, text
from eval.report.charts import SMOOTH_FROM, chart, series_of, with_mean
from eval.report.collect import blocks_of, sections
from eval.report.formats import MISSING, Code, Link, duration, interval, name_of, number, score, verdict_of, words
from eval.report.run_files import RunFiles, column, data_names, model_name
from eval.report.training import median_of

LETTERS = "ABCDEFGHIJ"
"""Of the runs on the page: at most so many."""

Runs = Sequence[RunFiles]

CURVES = (
    ("Loss", "by step", "loss", "step"),
    ("Loss", "by tokens seen", "loss", "tokens_seen"),
    ("Eval loss", "by step", "held_out_loss", "step"),
    ("Learning rate", "by step", "learning_rate", "step"),
    ("Gradient norm", "before clipping", "grad_norm", "step"),
    ("Throughput", "tokens/s", "tokens_per_second", "step"),
)
"""Title, what is beside it, key of metrics.jsonl, key that is x."""


def collect_runs(runs: Runs, folder: Path) -> dict[str, Any]:
    """What compare.html shows of 2 to 10 runs; its links are relative to the folder that it will be in."""
    collectors: dict[str, Callable[[Runs], list[Block]]] = {
        "Runs": partial(_overview, folder=folder),
        "Evaluation": _evaluation,
        "Curves": _curves,
    }
    return {
        "title": f"{len(runs)} runs compared",
        "subtitle": [],
        "notices": blocks_of(_attention, runs),
        "sections": sections(collectors, runs),
    }


def _attention(runs: Runs) -> list[Block]:
    first = next((one.comparison for one in runs if one.comparison), {})
    others = [
        letter
        for letter, files in zip(LETTERS, runs, strict=False)
        if files.comparison and files.comparison.get("settings_hash") != first.get("settings_hash")
    ]
    title = "Measured under other settings than the first run, so that the scores are not comparable:"
    return [notice("warning", title, others)] if others else []


def _overview(runs: Runs, folder: Path) -> list[Block]:
    """What each run is, and how it ended."""

    def link(files: RunFiles) -> str:
        page = files.run.page_file
        return Link(quote(os.path.relpath(page, folder))) if page.is_file() else MISSING

    def last(files: RunFiles, key: str, form: str = ",") -> str:
        values = column(files, key)
        return number(values[-1] if values else None, form)

    values: dict[str, Callable[[RunFiles], object]] = {
        "Run": lambda files: files.name,
        "Report": link,
        "Status": lambda files: words(files.record.get("status")),
        "Started": lambda files: words(files.record.get("started"))[:16].replace("T", " "),
        "Model": model_name,
        "Data": data_names,
        "Last logged step": lambda files: last(files, "step"),
        "Tokens seen": lambda files: last(files, "tokens_seen", ",.0f"),
        "Loss at the last logged step": lambda files: last(files, "loss", ".4f"),
        "Eval loss at the end": lambda files: last(files, "held_out_loss", ".4f"),
        "Tokens per second": lambda files: number(median_of(files, "tokens_per_second"), ",.0f"),
        "Peak memory of a rank, GiB": lambda files: number(max(column(files, "peak_memory_gib"), default=None), ".2f"),
        "Time to train": lambda files: duration(files.at("timings.train_seconds")),
    }
    rows: list[list[Any]] = [[name, *map(value, runs)] for name, value in values.items()]
    diff = Code(f"sft diff {runs[0].run.path} {runs[1].run.path}")
    differs = text("What differs between two runs in recipe, plan and data: ", diff)
    return [table(["", *LETTERS[: len(runs)]], rows), differs]


def _evaluation(runs: Runs) -> list[Block]:
    """Every metric of every run."""
    measured = [place for place, files in enumerate(runs) if files.comparison]
    if not measured:
        return [text("None of the runs has a comparison of base and tuned.")]
    found: dict[tuple[str, str], dict[int, str]] = {}
    for place in measured:
        for entry in runs[place].comparison.get("metrics") or []:
            found.setdefault((words(entry.get("task")), name_of(entry)), {})[place] = _score(entry)
    head = ["Task", "Metric", *(LETTERS[place] for place in measured)]
    rows = [[task, metric, *(by_run.get(place, "-") for place in measured)] for (task, metric), by_run in found.items()]
    legend = (
        "Each cell: base → tuned, the difference with its 95% confidence interval, and the verdict of the run's own comparison. "
        "Whether two tuned models differ by more than chance is not tested."
    )
    return [table(head, rows), text(legend)]


def _score(entry: dict[str, Any]) -> str:
    scores = f"{score(entry.get('base'))} → {score(entry.get('tuned'))}"
    difference = f"{score(entry.get('difference'), '+')} {interval(entry.get('interval_95'))}"
    return f"{scores}, {difference}, {verdict_of(entry)}"


def _curves(runs: Runs) -> list[Block]:
    """Each quantity of all runs in one chart; of many points their running mean, as ten noisy curves would hide each other."""
    charts = []
    for title, unit, key, over in CURVES:
        curves = []
        for place, files in enumerate(runs):
            one = series_of(files.metrics, key, LETTERS[place], place, over)
            curves.append(replace(with_mean(one)[-1], name=one.name))
        if any(len(one.x) for one in curves):
            x_label = "optimizer step" if over == "step" else "tokens"
            charts.append(chart(title, unit, curves, x_label=x_label, from_zero="loss" not in key))
    if not charts:
        return [text("None of the runs has logged an optimizer step.")]
    return [
        Block("charts", charts),
        text(f"Of {SMOOTH_FROM} points or more, the running mean over a twentieth of them."),
    ]
