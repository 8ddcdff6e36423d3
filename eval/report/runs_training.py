"""The curves of several runs over each other, and their final numbers, for compare.html."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from eval.report.blocks import Block, Charts, Key, Line, Paragraph, Table, code, duration, number
from eval.report.chart import Chart, Series, draw
from eval.report.curve import SMOOTH_FROM, running_mean
from eval.report.results import Recorded, entries, get
from eval.report.runs_evaluation import Keyed
from eval.report.speed import mean_rate
from eval.report.training import column, series_of

CURVES = (
    ("Loss", "by step", "loss", "step"),
    ("Loss", "by tokens seen", "loss", "tokens_seen"),
    ("Held-out loss", "by step", "held_out_loss", "step"),
    ("Held-out loss", "by tokens seen", "held_out_loss", "tokens_seen"),
    ("Learning rate", "by step", "learning_rate", "step"),
    ("Gradient norm", "before clipping", "grad_norm", "step"),
    ("Throughput", "tokens/s", "tokens_per_second", "step"),
    ("Peak memory", "GiB, first rank", "peak_memory_gib", "step"),
)
"""Title, what is beside it, key of metrics.jsonl, key that is x."""


def _curve(key: Key, of: Recorded, name: str, over: str) -> Series:
    """One run's curve; of many points their mean, as ten faint curves would hide each other."""
    one = series_of(of.metrics, name, key.text, key.style, over)
    if name in ("loss", "tokens_per_second", "grad_norm") and len(one.x) >= SMOOTH_FROM:
        return Series(one.name, one.x, running_mean(one.y, len(one.x) // 20), one.style)
    return one


def curves_part(runs: Keyed) -> list[Block]:
    """Each quantity of all runs in one chart."""
    charts: list[Chart] = []
    for title, unit, name, over in CURVES:
        curves = [one for key, of in runs if len((one := _curve(key, of, name, over)).x)]
        if curves:
            x_label = "optimizer steps" if over == "step" else "tokens"
            charts.append(draw(title, unit, curves, x_label=x_label, from_zero="loss" not in name))
    if not charts:
        return [Paragraph("None of the runs has logged an optimizer step.")]
    note = "Loss, gradient norm and throughput of 60 or more logged steps are means over the last twentieth of them."
    return [Charts(charts, note)]


def _last(of: Recorded, key: str, form: str = ",") -> str:
    values = column(of.metrics, key)
    return number(values[-1] if values else None, form)


FINAL: dict[str, Callable[[Recorded], Line]] = {
    "Last logged step": lambda of: _last(of, "step"),
    "Tokens seen": lambda of: _last(of, "tokens_seen", ",.0f"),
    "Loss at the last logged step": lambda of: _last(of, "loss", ".4f"),
    "Mean loss of the training": lambda of: number(of.record.get("train_loss"), ".4f"),
    "Loss on held-out rows, the last": lambda of: _last(of, "held_out_loss", ".4f"),
    "Tokens per second": lambda of: number(mean_rate(of.metrics), ",.0f"),
    "Peak memory of the first rank, GiB": lambda of: number(
        max(column(of.metrics, "peak_memory_gib"), default=None), ".2f"
    ),
    "Time to train": lambda of: duration(get(of.record, "timings", "train_seconds")),
    "Sessions": lambda of: number(len(entries(of.record, "sessions")) or None),
    "Settings of the evaluation": lambda of: code(_short(of.comparison.get("settings_hash"))),
}


def _short(value: Any) -> str | None:
    return value[:12] if isinstance(value, str) else None


def final_part(runs: Keyed) -> list[Block]:
    """How each run ended."""
    rows: list[list[Line]] = [[name, *(told(of) for _, of in runs)] for name, told in FINAL.items()]
    return [Table(["", *(key for key, _ in runs)], rows, numbers=range(1, len(runs) + 1))]
