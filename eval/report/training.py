"""The report's sections on what was trained, and on how the training went."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from eval.report.blocks import (
    MISSING,
    Block,
    Charts,
    Code,
    Line,
    Link,
    Paragraph,
    code,
    duration,
    facts,
    joined,
    number,
    words,
)
from eval.report.chart import Chart, Series, draw
from eval.report.curve import SMOOTH_FROM, running_mean
from eval.report.results import Recorded, entries, get, is_number, listed, mapping
from eval.report.speed import speed_facts
from sft.recipe.schema import Recipe

FAULTY = ("loss", "grad_norm", "held_out_loss")
"""Keys of metrics.jsonl where null is a number that was not finite; elsewhere it is one that nobody knows."""

MOST_PANELS = 12
"""Charts of the evaluation during training."""


def method(recipe: Recipe | None) -> str:
    """All weights, or which adapters."""
    if recipe is None:
        return MISSING
    lora = recipe.model.lora
    if lora is None:
        return "all weights (full fine-tuning)"
    modules = lora.target_modules if isinstance(lora.target_modules, str) else ", ".join(lora.target_modules)
    return f"LoRA adapters: rank {lora.r}, alpha {lora.lora_alpha}, dropout {lora.lora_dropout}, on {modules}"


def model_line(of: Recorded) -> Line:
    """The base model with its revision."""
    base = of.record.get("base_model")
    revision = get(base, "revision")
    name = code(get(base, "name_or_path"))
    return (name, ", revision ", code(revision)) if revision else name


def data_line(of: Recorded) -> Line:
    """What was trained on."""
    return joined([Code(source.path) for source in of.recipe.sources]) if of.recipe else MISSING


def what_section(of: Recorded) -> list[Block]:
    """What was trained on what."""
    record = of.record
    changed = [Code(str(one)) for one in listed(record, "overrides")]
    tokens = mapping(of.ledger, "total", "tokens")
    known = all(isinstance(tokens.get(key), int) for key in ("trained", "masked"))
    per_pass = f"{tokens['trained']:,} of {tokens['trained'] + tokens['masked']:,}" if known else MISSING
    return [
        facts(
            {
                "Model": model_line(of),
                "Trained": method(of.recipe),
                "Data": data_line(of),
                "Tokens with a loss, in one pass": per_pass,
                "Recipe": f"{words(record.get('recipe'))}, version {words(record.get('recipe_version'))}",
                "Changed on the command line": joined(changed) if changed else "nothing",
                "Tuned model": Link("final", "final") if of.run.final.is_dir() else "not saved",
            }
        )
    ]


def column(points: Iterable[Mapping[str, Any]], key: str) -> list[float]:
    """The numbers of a key, in the order of the steps."""
    return [point[key] for point in points if is_number(point.get(key))]


def training_section(of: Recorded) -> list[Block]:
    """The curves and the numbers of the training."""
    if not of.metrics:
        return [Paragraph(("There is no loss curve: ", Code("metrics.jsonl"), " holds no optimizer step."))]
    loss, memory = column(of.metrics, "loss"), column(of.metrics, "peak_memory_gib")
    last, timings = of.metrics[-1], of.record.get("timings")
    planned = next((one.get("value") for one in of.decisions if one.get("name") == "max_steps"), None)
    rows: dict[str, Line] = {
        "Last logged step": number(last["step"]) + (f" of {number(planned)}" if planned else ""),
        "Epochs": number(last.get("epoch"), ".2f"),
        "Tokens seen": number(last.get("tokens_seen"), ",.0f"),
        "Loss at the first logged step": number(loss[0] if loss else None, ".4f"),
        "Loss at the last logged step": number(loss[-1] if loss else None, ".4f"),
        "Mean loss of the training": number(of.record.get("train_loss"), ".4f"),
        **_held_out(of),
        **_faults(of),
        **speed_facts(of.metrics),
        "Peak memory of the first rank": f"{max(memory):.2f} GiB" if memory else MISSING,
        "Time to prepare the data": duration(get(timings, "prepare_seconds")),
        "Time to train": duration(get(timings, "train_seconds")),
    }
    if of.comparison:
        rows["Time to evaluate"] = duration(get(timings, "evaluate_seconds"))
    image = Link("Training loss and learning rate over optimizer steps", "loss.png")
    return [Charts(training_charts(of), _note(of), image), facts(rows)]


def _faults(of: Recorded) -> dict[str, Line]:
    """What was not as it should be in the numbers, where something was."""
    rows: dict[str, Line] = {}
    faults = [
        f"step {number(fault.get('step'))} ({words(fault.get('answer'))})" for fault in entries(of.record, "nonfinite")
    ]
    if faults:
        rows["Losses or gradients that were not finite"] = ", ".join(faults)
    spikes = [
        f"step {number(point['step'])} ({number(point.get('loss'), '.4f')})"
        for point in of.metrics
        if point.get("spike") is True
    ]
    if spikes:
        more = f" and {len(spikes) - 10} more" if len(spikes) > 10 else ""
        rows["Spikes of the loss"] = ", ".join(spikes[:10]) + more
    return rows


def _held_out(of: Recorded) -> dict[str, Line]:
    """The loss on rows that were not trained, where some were held out."""
    losses, before = column(of.metrics, "held_out_loss"), of.record.get("held_out_loss_before")
    if not losses:
        return {}
    least = min(losses)
    return {
        "Loss on held-out rows, before the first step": number(before, ".4f"),
        "Loss on held-out rows, after the last": number(losses[-1], ".4f")
        + (f" (least on the way: {least:.4f})" if least < losses[-1] else ""),
    }


def series_of(
    points: Sequence[Mapping[str, Any]], key: str, name: str, style: str = "c0", over: str = "step"
) -> Series:
    """One key of metrics.jsonl as a curve.

    Args:
        points: Lines, by step.
        key: Whose values.
        name: For the reader.
        style: Class of the curve.
        over: The key that is x; lines in which it does not rise are left out.
    """
    x: list[float] = []
    y: list[float] = []
    for point in points:
        value, place = point.get(key), point.get(over)
        known = is_number(value) or (key in FAULTY and key in point)
        if known and is_number(place) and (not x or place > x[-1]):
            x.append(float(place))
            y.append(float(value) if is_number(value) else float("nan"))
    return Series(name, np.array(x), np.array(y), style)


def with_mean(one: Series, style: str = "c0") -> list[Series]:
    """A curve of many points as its points, faint, and their mean."""
    if len(one.x) < SMOOTH_FROM:
        return [one]
    window = len(one.x) // 20
    mean = Series(f"mean of the last {window:,}", one.x, running_mean(one.y, window), style, marked=False)
    return [Series(one.name, one.x, one.y, "faint"), mean]


def session_starts(of: Recorded) -> list[tuple[float, str]]:
    """Where the run went on from a checkpoint: step, and what to say of it."""
    starts = []
    for session in entries(of.record, "sessions")[1:]:
        step = str(session.get("checkpoint")).rpartition("-")[2]
        if step.isdecimal():
            starts.append((float(step), f"went on from {session['checkpoint']} at {words(session.get('started'))}"))
    return starts


def training_charts(of: Recorded) -> list[Chart]:
    """Loss first, wide and narrow; then what else was logged."""
    loss = with_mean(series_of(of.metrics, "loss", "loss at each logging step"))
    held_out = series_of(of.metrics, "held_out_loss", "held-out rows", "c1")
    before = of.record.get("held_out_loss_before")
    if is_number(before) and len(held_out.x):
        held_out = Series(held_out.name, np.insert(held_out.x, 0, 0.0), np.insert(held_out.y, 0, before), "c1")
    spikes = [
        (point["step"], point["loss"])
        for point in of.metrics
        if point.get("spike") is True and is_number(point.get("loss"))
    ]
    starts = session_starts(of)
    charts = [draw("Loss", "", [*loss, held_out], verticals=starts, spikes=spikes, wide=wide) for wide in (True, False)]
    for title, unit, key, from_zero in (
        ("Learning rate", "", "learning_rate", True),
        ("Gradient norm", "before clipping", "grad_norm", True),
        ("Throughput", "tokens/s", "tokens_per_second", True),
        ("Peak memory", "GiB, first rank", "peak_memory_gib", True),
        ("MFU", "share of the bf16 peak", "mfu", True),
    ):
        one = series_of(of.metrics, key, title.lower())
        if len(one.x):
            charts.append(draw(title, unit, [one], from_zero=from_zero, verticals=starts))
    return charts


def _note(of: Recorded) -> str:
    told = []
    if session_starts(of):
        told.append(
            "A dashed line is where the run went on from a checkpoint; steps that were done again are shown once."
        )
    if len(of.metrics) > 700:
        told.append(
            f"{len(of.metrics):,} logged steps: of each two pixels the first, lowest, highest and last are drawn, so no spike is left out."
        )
    return " ".join(told)


def scores_by_step(during: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """Step and score of each task and metric that was measured on the way."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for line in during:
        for task, scores in mapping(line, "results").items():
            for metric, value in scores.items() if isinstance(scores, dict) else ():
                if is_number(value) and "_stderr" not in metric:
                    found.setdefault((task, metric.removesuffix(",none")), []).append((line["step"], value))
    return found


def not_measured(during: Sequence[Mapping[str, Any]]) -> str:
    """Which tasks failed at some step, and why at the last of them; nothing where none did.

    >>> not_measured([{"step": 2, "failed": {"mine": "KeyError: x"}}, {"step": 4, "failed": {"mine": "KeyError: y"}}])
    ' mine failed at 2 of these steps, last at step 4: KeyError: y.'
    """
    failures: dict[str, list[tuple[Any, Any]]] = {}
    for line in during:
        for task, reason in mapping(line, "failed").items():
            failures.setdefault(task, []).append((line["step"], reason))
    return "".join(
        f" {task} failed at {len(found)} of these steps, last at step {found[-1][0]}: {found[-1][1]}."
        for task, found in failures.items()
    )


def during_section(of: Recorded) -> list[Block]:
    """Scores on the way; nothing where nobody asked for any."""
    if not of.during:
        asked = get(of.record, "recipe_values", "eval", "every_steps")
        return [Paragraph(("None was measured: ", Code("eval/during.jsonl"), " is missing."))] if asked else []
    found = scores_by_step(of.during)
    charts = [
        draw(task, metric, [Series(metric, *np.array(points, dtype=float).T)])
        for (task, metric), points in list(found.items())[:MOST_PANELS]
    ]
    more = f" {len(found) - MOST_PANELS} more metrics are in eval/during.jsonl." if len(found) > MOST_PANELS else ""
    seconds = sum(column(of.during, "seconds"))
    told = f"Measured {len(of.during):,} times, in {duration(seconds)} together.{more}{not_measured(of.during)}"
    last = of.during[-1]
    rows: dict[str, Line] = {
        f"{task}, {metric}": number(points[-1][1], ".4f")
        for (task, metric), points in list(found.items())[:MOST_PANELS]
    }
    return [Paragraph(told), Charts(charts), Paragraph(f"At step {number(last['step'])}:"), facts(rows)]
