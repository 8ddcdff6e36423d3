"""Draws curves with matplotlib: SVG for the page, which colors it by its style sheet, and loss.png.

matplotlib merges points that would be drawn on top of each other and keeps their extremes: a spike of one step in 100,000 stays as high
as it was. A value that is not finite breaks the curve and is marked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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

_COLORS = {
    name: f"#0000{place:02x}" for place, name in enumerate((*(f"c{n}" for n in range(10)), "soft", "rule", "bad"), 1)
}
"""Colors that matplotlib draws with; each becomes a CSS variable, so that the page has a dark mode."""


@dataclass(frozen=True)
class Series:
    """Values over x, ascending; NaN and infinities are marked, not drawn."""

    name: str
    x: np.ndarray
    y: np.ndarray
    color: str = "c0"
    """c0 to c9."""

    faint: bool = False
    """Whether these are the points behind a running mean."""


def series_of(
    points: Sequence[Mapping[str, Any]], key: str, name: str, color: str = "c0", over: str = "step"
) -> Series:
    """One key of metrics.jsonl over another; a loss or gradient norm of null was not finite."""
    drawn: list[tuple[float, float]] = []
    for point in points:
        value, place = point.get(key), point.get(over)
        known = is_number(value) or (key in point and key in ("loss", "grad_norm", "held_out_loss"))
        if known and is_number(place) and (not drawn or place > drawn[-1][0]):
            drawn.append((float(place), float(value) if is_number(value) else float("nan")))
    x, y = np.array(drawn, float).reshape(-1, 2).T
    return Series(name, x, y, color)


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """The mean of up to `window` values before and including each, without those that are not finite.

    >>> running_mean(np.array([1.0, 3.0, np.nan, 5.0]), 2).tolist()
    [1.0, 2.0, 3.0, 5.0]
    """
    known = np.isfinite(values)
    sums, counts = np.cumsum(np.where(known, values, 0.0)), np.cumsum(known).astype(float)
    for total in (sums, counts):
        total[window:] -= total[:-window].copy()
    means = np.full(len(values), np.nan)
    np.divide(sums, counts, out=means, where=counts > 0)
    return means


def with_mean(series: Series) -> list[Series]:
    """A curve of many points as its points, faint, and their running mean."""
    if len(series.x) < SMOOTH_FROM:
        return [series]
    window = len(series.x) // 20
    mean = Series(f"mean of the last {window:,}", series.x, running_mean(series.y, window), series.color)
    return [Series(series.name, series.x, series.y, series.color, faint=True), mean]


def y_range(values: np.ndarray, from_zero: bool) -> tuple[float, float]:
    """The range of the y axis: of all finite values but those far outside the usual ones."""
    if not len(values):
        return 0.0, 1.0
    low, high = np.quantile(values, [0.01, 0.99], method="closest_observation")
    room = _FAR * (high - low) or abs(high)
    inside = values[(values >= low - room) & (values <= high + room)]
    low, high = float(inside.min()), float(inside.max())
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    # Noise in the fourth digit must not look like a curve.
    missing = max((0.005 * max(abs(low), abs(high)) or 1.0) - (high - low), 0.0)
    low, high = low - missing / 2, high + missing / 2
    margin = 0.05 * (high - low)
    return (low if from_zero and low == 0 else low - margin), high + margin


def chart(
    title: str,
    unit: str,
    series: Sequence[Series],
    *,
    x_label: str = "optimizer step",
    from_zero: bool = False,
    verticals: Sequence[float] = (),
    wide: bool = False,
) -> dict[str, Any]:
    """A chart for the page: its SVG, legend and description.

    Args:
        title: What is shown.
        unit: Of the values; empty for none.
        series: At least one.
        x_label: What x counts.
        from_zero: Whether the y axis includes 0.
        verticals: x of dashed lines.
        wide: Twice as wide; the page needs a narrow one beside it for phones.
    """
    drawn = [one for one in series if len(one.x)]
    settings: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": f"{title} {unit} {wide}", "font.size": 10.5}
    with style.context("default"), rc_context(settings | {"path.simplify_threshold": 0.5}):
        width, height = (732, 240) if wide else (356, 190)
        figure = Figure(figsize=(width / 72, height / 72))
        axes = figure.add_axes((46 / width, 22 / height, 1 - 62 / width, 1 - 36 / height))
        finite = [one.y[np.isfinite(one.y)] for one in drawn]
        axes.set_ylim(*y_range(np.concatenate(finite or [np.empty(0)]), from_zero))
        axes.set_xlim(0, max((one.x[-1] for one in drawn), default=1.0) * 1.01 or 1.0)
        for x in verticals:
            axes.axvline(x, color=_COLORS["soft"], linewidth=1, linestyle=(0, (3, 3)))
        notes = {note for one in drawn for note in _draw(axes, one)}
        _simplify_axes(axes, integers=x_label.endswith("step"))
        file = StringIO()
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=no_metadata)
    return {
        "title": title,
        "unit": unit,
        "legend": drawn if len(drawn) > 1 else [],
        "svg": _for_page(file.getvalue()),
        "description": "; ".join(map(_described, drawn)) or "no values",
        "notes": sorted(notes),
        "x_label": x_label,
        "wide": wide,
    }


def _draw(axes: Axes, series: Series) -> list[str]:
    """Draw a curve, and return what its marks mean."""
    color, finite = _COLORS[series.color], np.isfinite(series.y)
    dashes = ("-", "--", ":", "-.", (0, (8, 2)))[int(series.color[1:]) % 5]  # for readers who cannot tell colors apart
    axes.plot(
        series.x,
        np.where(finite, series.y, np.nan),
        color=color,
        alpha=0.35 if series.faint else 1.0,
        linewidth=1.0 if series.faint else 1.6,
        linestyle=dashes,
        marker="o" if len(series.x) < SMOOTH_FROM else "",
        markersize=3.5,
    )
    right = axes.get_xlim()[1]
    x = np.unique(np.round(series.x[~finite] / right, 2)) * right
    top = axes.get_xaxis_transform()
    axes.plot(x, np.ones(len(x)), "x", color=_COLORS["bad"], markersize=5, transform=top, clip_on=False)
    return ["\N{MULTIPLICATION SIGN} not a finite number"] if len(x) else []


def _simplify_axes(axes: Axes, integers: bool) -> None:
    axes.spines[:].set_visible(False)
    axes.grid(axis="y", color=_COLORS["rule"], linewidth=1)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, pad=5, colors=_COLORS["soft"])
    axes.ticklabel_format(useOffset=False, scilimits=(-3, 5))
    axes.locator_params(axis="x", nbins=5, integer=integers)
    axes.locator_params(axis="y", nbins=5)
    for axis in (axes.xaxis, axes.yaxis):
        axis.offsetText.set_color(_COLORS["soft"])


def _for_page(svg: str) -> Markup:
    """matplotlib's SVG inside HTML: without its own ids, sizes and styles, in the colors of the style sheet."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<(metadata|style)\b.*?</\1>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', r'<svg \1 aria-hidden="true">', svg, count=1)
    svg = re.sub(r' id="[\w.]+_\d+"| transform="rotate\(-0[^"]*"', "", svg)
    svg = re.sub(r"(\.\d)\d+", r"\1", svg)
    svg = re.sub(r" font-family: [^;]*;", "", svg)
    for name, color in _COLORS.items():
        svg = svg.replace(color, f"var(--{name})")
    return Markup(re.sub(r"\n\s*", "\n", svg))


def _described(series: Series) -> str:
    y = series.y[np.isfinite(series.y)]
    if not len(y):
        return f"{series.name}: no finite value"
    return f"{series.name}: first {y[0]:.4g}, last {y[-1]:.4g}, from {y.min():.4g} to {y.max():.4g}"


@style.context("default")
def draw_curve(points: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Draw the loss, and under it the learning rate, as a PNG; there is at least one line of metrics.jsonl."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    losses = [*with_mean(series_of(points, "loss", "loss")), series_of(points, "held_out_loss", "eval loss", "c2")]
    for axes, curves in ((upper, losses), (lower, [series_of(points, "learning_rate", "learning rate", "c1")])):
        for one in curves:
            dots, alpha = "o" if len(one.x) < SMOOTH_FROM else "", 0.3 if one.faint else 1.0
            axes.plot(one.x, one.y, color=one.color.upper(), alpha=alpha, marker=dots, markersize=3, label=one.name)
        axes.set(ylabel=curves[0].name, xlim=(0, None))
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    upper.legend(frameon=False, loc="upper right")
    upper.set_title(title, loc="left", parse_math=False)
    lower.set_xlabel("optimizer step")
    figure.savefig(path, format="png", dpi=120)
