"""Draws curves with matplotlib: SVG for the page, and loss.png.

matplotlib merges points that would be drawn on top of each other and keeps their extremes: a spike of one step in 100,000 stays as high
as it was. A value that is not finite breaks the curve.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib import rc_context, style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eval.report.formats import is_number

SMOOTH_FROM = 60
"""Points from which their running mean is easier to read than the points; fewer are drawn as dots."""

_FAR = 4.0
"""A value further than this many times the range of the 1st to 99th percentile outside of it is left out of the axis."""

_GREY = "#808890"
"""Of axes and their labels: legible on a light and on a dark page."""


@dataclass(frozen=True)
class Series:
    """Values over x, ascending; those that are not finite are not drawn."""

    name: str
    x: np.ndarray
    y: np.ndarray
    color: int = 0
    """0 to 9, of matplotlib's cycle."""

    faint: bool = False
    """Whether these are the points behind a running mean."""


def series_of(points: Sequence[Mapping[str, Any]], key: str, name: str, color: int = 0, over: str = "step") -> Series:
    """One key of metrics.jsonl over another; a null, as of a loss that was not finite, breaks the curve."""
    known = [point for point in points if key in point and is_number(point.get(over))]
    x = np.array([point[over] for point in known], float)
    return Series(name, x, np.array([point[key] if is_number(point[key]) else np.nan for point in known]), color)


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """The mean of up to `window` values before and including each, without those that are not finite.

    >>> running_mean(np.array([1.0, 3.0, np.nan, 5.0]), 2).tolist()
    [1.0, 2.0, 3.0, 5.0]
    """
    known = np.isfinite(values)
    sums, counts = (np.append(0.0, np.cumsum(part)) for part in (np.where(known, values, 0.0), known))
    first = np.maximum(np.arange(len(values)) + 1 - window, 0)
    number = counts[1:] - counts[first]
    return np.where(number > 0, (sums[1:] - sums[first]) / np.maximum(number, 1), np.nan)


def with_mean(series: Series) -> list[Series]:
    """A curve of many points as its points, faint, and their running mean."""
    if len(series.x) < SMOOTH_FROM:
        return [series]
    window = len(series.x) // 20
    mean = replace(series, name=f"mean of the last {window:,}", y=running_mean(series.y, window))
    return [replace(series, faint=True), mean]


def y_range(values: np.ndarray) -> tuple[float, float] | None:
    """The range of the y axis where few values lie far outside the usual ones; None: all of them."""
    if not len(values):
        return None
    low, high = np.quantile(values, [0.01, 0.99])
    room = _FAR * (high - low)
    inside = values[(values >= low - room) & (values <= high + room)]
    if not room or len(inside) == len(values):
        return None
    margin = 0.05 * (inside.max() - inside.min())
    return float(inside.min() - margin), float(inside.max() + margin)


def _draw(axes: Axes, curves: Sequence[Series], from_zero: bool = False) -> None:
    """Draw curves with their legend, where there is more than one."""
    for one in curves:
        y = np.where(np.isfinite(one.y), one.y, np.nan)
        dots, alpha, width = "o" if len(one.x) < SMOOTH_FROM else "", 0.3 if one.faint else 1.0, 1 if one.faint else 1.6
        axes.plot(one.x, y, f"C{one.color}{dots}-", alpha=alpha, linewidth=width, markersize=3, label=one.name)
    finite = np.concatenate([one.y[np.isfinite(one.y)] for one in curves] or [np.empty(0)])
    if from_zero:
        axes.set_ylim(bottom=0)
    elif (limits := y_range(finite)) is not None:
        axes.set_ylim(limits)
    axes.set_xlim(left=0)
    axes.grid(axis="y", color=_GREY, alpha=0.25)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, colors=_GREY)
    axes.ticklabel_format(useOffset=False, scilimits=(-3, 5))
    axes.locator_params(nbins=5)
    for axis in (axes.xaxis, axes.yaxis):
        axis.offsetText.set_color(_GREY)
    if len(curves) > 1:
        axes.legend(frameon=False, labelcolor=_GREY, fontsize="small")


def chart(
    title: str,
    unit: str,
    curves: Sequence[Series],
    *,
    x_label: str = "optimizer step",
    from_zero: bool = False,
) -> dict[str, Any]:
    """A chart for the page, with its SVG.

    Args:
        title: What is shown.
        unit: Of the values; empty for none.
        curves: At least one.
        x_label: What x counts.
        from_zero: Whether the y axis begins at 0.
    """
    settings: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": f"{title} {unit}", "font.size": 9}
    with style.context("default"), rc_context(settings | {"path.simplify_threshold": 0.5}):
        figure = Figure(figsize=(5, 2.8), layout="constrained")
        axes = figure.subplots()
        _draw(axes, [one for one in curves if len(one.x)], from_zero)
        axes.set_xlabel(x_label, color=_GREY)
        file = StringIO()
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=no_metadata)
    return {"title": title, "unit": unit, "svg": _for_page(file.getvalue())}


def _for_page(svg: str) -> Markup:
    """matplotlib's SVG inside HTML: without a size, metadata and style sheet of its own, and without ids that two charts share."""
    svg = re.sub(r"<(metadata|style)\b.*?</\1>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', r'<svg \1 aria-hidden="true">', svg, count=1)
    svg = re.sub(r' id="[\w.]+_\d+"', "", svg)
    return Markup(re.sub(r' d="[^"]+"', lambda path: re.sub(r"(\.\d)\d+", r"\1", path[0]), svg))


@style.context("default")
def draw_curve(points: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Draw the loss, and under it the learning rate, as a PNG; there is at least one line of metrics.jsonl."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    _draw(upper, [*with_mean(series_of(points, "loss", "loss")), series_of(points, "held_out_loss", "eval loss", 2)])
    _draw(lower, [series_of(points, "learning_rate", "learning rate", 1)], from_zero=True)
    upper.set_title(title, loc="left", parse_math=False)
    upper.set_ylabel("loss")
    lower.set(xlabel="optimizer step", ylabel="learning rate")
    figure.savefig(path, format="png", dpi=120)
