"""Collects what a report shows of the training: curves, numbers, and the evaluation during training."""

from __future__ import annotations

from statistics import median
from typing import Any

import numpy as np

from eval.report.blocks import Block, facts, text
from eval.report.charts import Series, chart, series_of, with_mean
from eval.report.formats import duration, is_number, number, words
from eval.report.run_files import RunFiles, column

MOST_CHARTS = 12
"""Of the evaluation during training."""


def training_blocks(files: RunFiles) -> list[Block]:
    """The curves and numbers of the training."""
    metrics = files.metrics
    if not metrics:
        return [text("There is no loss curve: metrics.jsonl holds no optimizer step.")]
    planned, time, peak = (_planned(files, name) for name in ("max_steps", "time", "memory"))
    loss, eval_loss, memory = (column(files, key) for key in ("loss", "held_out_loss", "peak_memory_gib"))
    values: dict[str, Any] = {
        "Last logged step": number(metrics[-1]["step"]) + (f" of {number(planned)}" if planned else ""),
        "Epochs": number(metrics[-1].get("epoch"), ".2f"),
        "Tokens seen": number(metrics[-1].get("tokens_seen"), ",.0f"),
        "Loss at the first logged step": number(loss[0] if loss else None, ".4f"),
        "Loss at the last logged step": number(loss[-1] if loss else None, ".4f"),
        "Mean training loss": number(files.at("train_loss"), ".4f"),
    }
    if best := files.at("best"):
        by = f", by {words(best['metric'])}: {number(best['value'], '.4f')}" if best["value"] is not None else ""
        values["Step of the model in final/"] = number(best["step"]) + by
    if eval_loss:
        values["Eval loss before training"] = number(files.at("held_out_loss_before"), ".4f")
        values["Eval loss at the end"] = f"{eval_loss[-1]:.4f} (lowest: {min(eval_loss):.4f})"
    if faults := [f"step {number(one['step'])} ({words(one['answer'])})" for one in files.at("nonfinite") or []]:
        values["Steps with a loss or gradient that was not finite"] = faults
    values["Tokens per second"] = number(median_of(files, "tokens_per_second"), ",.0f")
    values["MFU, of the GPUs' bf16 peak"] = number(median_of(files, "mfu"), ".1%")
    values["Peak memory of a rank"] = f"{max(memory):.2f} GiB" if memory else words(None)
    values["Peak memory of a rank"] += f" (planned: {number(peak)} GiB)" if is_number(peak) else ""
    values["Time to prepare the data"] = duration(files.at("timings.prepare_seconds"))
    values["Time to train"] = duration(files.at("timings.train_seconds"))
    values["Time to train"] += f" (planned: {words(time)})" if time else ""
    if files.comparison:
        values["Time to evaluate"] = duration(files.at("timings.evaluate_seconds"))
    return [Block("curve", "loss.png"), Block("charts", _training_charts(files)), facts(values)]


def _planned(files: RunFiles, name: str) -> object:
    return next((one["value"] for one in files.decisions if one["name"] == name), None)


def _training_charts(files: RunFiles) -> list[dict[str, Any]]:
    eval_loss, before = series_of(files.metrics, "held_out_loss", "eval loss", 1), files.at("held_out_loss_before")
    if is_number(before) and len(eval_loss.x):
        eval_loss = Series("eval loss", np.insert(eval_loss.x, 0, 0.0), np.insert(eval_loss.y, 0, before), 1)
    losses = [*with_mean(series_of(files.metrics, "loss", "loss at each logged step")), eval_loss]
    charts = [chart("Loss", "", losses)]
    for title, unit, key in (
        ("Learning rate", "", "learning_rate"),
        ("Gradient norm", "before clipping", "grad_norm"),
        ("Throughput", "tokens/s", "tokens_per_second"),
        ("Peak memory", "GiB, the rank with most", "peak_memory_gib"),
        ("MFU", "of the bf16 peak", "mfu"),
    ):
        series = series_of(files.metrics, key, title.lower())
        if len(series.x):
            charts.append(chart(title, unit, [series], from_zero=True))
    return charts


def during_blocks(files: RunFiles) -> list[Block]:
    """The scores measured during training."""
    if not files.during:
        wanted = files.at("recipe_values.eval.every_steps")
        return [text("None was measured: eval/during.jsonl is missing.")] if wanted else []
    scores: dict[tuple[str, str], list[tuple[float, float]]] = {}
    failures: dict[str, list[str]] = {}
    for line in files.during:
        for task, metrics in (line.get("results") or {}).items():
            for metric, value in metrics.items():
                if is_number(value) and "_stderr" not in metric:
                    scores.setdefault((task, metric.removesuffix(",none")), []).append((line["step"], value))
        for task, reason in (line.get("failed") or {}).items():
            failures.setdefault(task, []).append(f"step {line['step']}: {reason}")
    shown = list(scores.items())[:MOST_CHARTS]
    sentences = [f"Measured {len(files.during):,} times: eval/during.jsonl has all scores."]
    sentences += [f"{task} failed {len(found)} times, last at {found[-1]}." for task, found in failures.items()]
    charts = [chart(task, metric, [Series(metric, *np.array(points, float).T)]) for (task, metric), points in shown]
    last = {f"{task}, {metric}, last": number(points[-1][1], ".4f") for (task, metric), points in shown}
    return [text(" ".join(sentences)), Block("charts", charts), facts(last)]


def median_of(files: RunFiles, key: str) -> float | None:
    """The median of a rate over the logged steps, without the first, which includes the warmup of everything."""
    return median(values) if (values := column(files, key)[1:]) else None
