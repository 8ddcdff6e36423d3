"""The loss and learning-rate curve of a run, as an image. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import style
from matplotlib.figure import Figure

SMOOTH_FROM = 60
"""Points from which a mean over the neighbours is easier to read than the points."""


def _column(points: Sequence[Mapping[str, Any]], key: str) -> np.ndarray:
    return np.array(
        [point[key] if isinstance(point.get(key), int | float) else np.nan for point in points], dtype=float
    )


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """The mean over up to `window` values before and including each; values that are no number are left out.

    >>> running_mean(np.array([1.0, 3.0, np.nan, 5.0]), 2).tolist()
    [1.0, 2.0, 3.0, 5.0]
    """
    known = np.isfinite(values)
    sums = np.cumsum(np.where(known, values, 0.0))
    counts = np.cumsum(known).astype(float)
    sums[window:] -= sums[:-window].copy()
    counts[window:] -= counts[:-window].copy()
    means = np.full(len(values), np.nan)
    np.divide(sums, counts, out=means, where=counts > 0)
    return means


# Else a matplotlibrc in the working directory would have its say.
@style.context("default")
def draw_curve(points: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Draw the loss, and under it the learning rate, over optimizer steps.

    Args:
        points: At least one line of metrics.jsonl, by step: `step`, `loss`, `learning_rate`, `held_out_loss` of some.
        title: Of the figure.
        path: PNG to write.
    """
    steps, loss = _column(points, "step"), _column(points, "loss")
    figure = Figure(figsize=(8, 5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    dots = {"marker": "o", "markersize": 3} if len(points) < SMOOTH_FROM else {}
    if len(points) < SMOOTH_FROM:
        upper.plot(steps, loss, color="tab:blue", label="loss", **dots)
    else:
        window = len(points) // 20
        upper.plot(steps, loss, color="tab:blue", alpha=0.3, linewidth=0.8, label="each logging step")
        upper.plot(
            steps, running_mean(loss, window), color="tab:blue", label=f"mean of the last {window} logging steps"
        )
        upper.legend(frameon=False)
    held_out = [(point["step"], point["held_out_loss"]) for point in points if point.get("held_out_loss") is not None]
    if held_out:
        upper.plot(*zip(*held_out, strict=True), color="tab:green", marker="o", markersize=4, label="held-out rows")
        upper.legend(frameon=False)
    # Dollar signs would be read as mathematics.
    upper.set_title(title.replace("$", r"\$"), loc="left")
    upper.set_ylabel("loss")
    lower.plot(steps, _column(points, "learning_rate"), color="tab:orange", **dots)
    lower.set_ylabel("learning rate")
    lower.set_xlabel("optimizer step")
    lower.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    for axes in (upper, lower):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.locator_params(axis="x", integer=True)
        axes.set_xlim(left=0)
    figure.savefig(path, format="png", dpi=120)
