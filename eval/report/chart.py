"""Curves as plain numbers for an inline SVG, which eval/report/templates/chart.svg.jinja writes. Imports no torch.

A curve of many points is drawn as the first, lowest, highest and last of each pixel column, so that a spike of one step stays as high
as it was. A value that is no finite number breaks the curve and is marked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from matplotlib.ticker import MaxNLocator

LEFT, RIGHT, TOP, BOTTOM = 46.0, 16.0, 10.0, 22.0
"""Room around the plot, in the SVG's units: about pixels."""

_DOTS_BELOW = 60
"""Points up to which each is drawn as a dot that tells its value."""

_FAR = 4.0
"""How many times the range of the 1st to the 99th percentile a value must lie outside of it to be cut off at the edge."""

_NARROWEST = 0.005
"""Range of the axis at least, as a share of its largest value."""


@dataclass(frozen=True)
class Series:
    """Values over x; NaN and infinities are marked, not drawn."""

    name: str
    x: np.ndarray
    y: np.ndarray
    style: str = "c0"
    """Its class in the style sheet: c0 to c9 are colours; `faint` is the points behind a mean."""

    marked: bool = True
    """Whether values that are not finite, and those far outside, are marked; once is enough for a curve and its mean."""


@dataclass(frozen=True)
class Mark:
    """One thing to point at."""

    kind: str
    """dot, nonfinite, above, below or spike."""

    x: float
    y: float
    title: str
    style: str = ""


@dataclass(frozen=True)
class Chart:
    """Everything that is drawn, in the SVG's units."""

    title: str
    unit: str
    description: str
    width: float
    height: float
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]
    x_label: str
    paths: tuple[tuple[str, str], ...]
    """Class and data of each curve."""

    marks: tuple[Mark, ...]
    verticals: tuple[tuple[float, str], ...]
    legend: tuple[tuple[str, str], ...]
    """Class and name of each curve, where there is more than one."""

    notes: tuple[str, ...] = ()
    wide: bool = False


def tick_labels(values: Sequence[float]) -> list[str]:
    """Numbers short enough for an axis, all in one form.

    >>> tick_labels([0, 2500, 5000]), tick_labels([0, 50_000]), tick_labels([0.0, 0.5]), tick_labels([0, 1e-5, 2e-5])
    (['0', '2500', '5000'], ['0', '50k'], ['0.0', '0.5'], ['0', '1e-5', '2e-5'])
    """
    largest = max((abs(value) for value in values), default=0.0)
    for power, sign in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if 1e15 > largest >= power * (10 if sign == "k" else 1):
            return [f"{value / power:g}{sign}" if value else "0" for value in values]
    if 0 < largest < 1e-2 or largest >= 1e15:
        return [f"{value:g}" if not value else _scientific(value) for value in values]
    step = min((b - a for a, b in pairwise(values) if b > a), default=largest or 1.0)
    digits = next((n for n in range(8) if abs(round(step, n) - step) < 1e-9 * max(step, 1e-3)), 7)
    return [f"{value:.{digits}f}" for value in values]


def _scientific(value: float) -> str:
    mantissa, _, exponent = f"{value:.3e}".partition("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def _ticks(low: float, high: float, count: int, whole: bool = False) -> list[float]:
    values = MaxNLocator(count, steps=[1, 2, 5, 10], integer=whole).tick_values(low, high)
    slack = (high - low) * 1e-6
    return [float(value) for value in values if low - slack <= value <= high + slack]


def kept_places(x: np.ndarray, y: np.ndarray, columns: int) -> np.ndarray:
    """Places of the points that are drawn: the first, lowest, highest and last of each column.

    Args:
        x: Ascending, finite.
        y: Finite.
        columns: Parts of equal width that the range of x is cut into.
    """
    if len(x) <= 4 * columns:
        return np.arange(len(x))
    edges = np.searchsorted(x, np.linspace(x[0], x[-1], columns + 1)[1:-1])
    kept: set[int] = set()
    for start, end in zip([0, *edges.tolist()], [*edges.tolist(), len(x)], strict=True):
        if start < end:
            part = y[start:end]
            kept |= {start, start + int(part.argmin()), start + int(part.argmax()), end - 1}
    return np.array(sorted(kept))


def _limits(values: np.ndarray, from_zero: bool) -> tuple[float, float]:
    """The range of the axis: of all values, but for some far from all others."""
    if not len(values):
        return 0.0, 1.0
    usual_low, usual_high = (float(one) for one in np.quantile(values, [0.01, 0.99], method="closest_observation"))
    room = _FAR * max(usual_high - usual_low, 1e-12 * abs(usual_high))
    inside = values[(values >= usual_low - room) & (values <= usual_high + room)]
    low, high = float(inside.min()), float(inside.max())
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high <= low:
        low, high = (low - abs(low) * 0.1, high + abs(high) * 0.1) if high else (0.0, 1.0)
    # Ticks closer than this would need more digits than there is room for, and show noise as if it were a curve.
    missing = _NARROWEST * max(abs(low), abs(high)) - (high - low)
    if missing > 0:
        low, high = low - missing / 2, high + missing / 2
    margin = (high - low) * 0.05
    return low - (0.0 if from_zero and low == 0 else margin), high + margin


@dataclass(frozen=True)
class _Scale:
    """From values to places in the SVG."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    width: float
    height: float

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (self.width - LEFT - RIGHT)

    def y(self, value: float) -> float:
        inside = min(max(value, self.y_low), self.y_high)
        return TOP + (self.y_high - inside) / (self.y_high - self.y_low) * (self.height - TOP - BOTTOM)


def _path(one: Series, scale: _Scale) -> str:
    finite = np.isfinite(one.y)
    x, y = one.x[finite], one.y[finite]
    if not len(x):
        return ""
    broken = np.cumsum(~finite)[finite]
    data, before = [], None
    for place in kept_places(x, y, int(scale.width - LEFT - RIGHT) // 2):
        start = before is None or broken[place] != before
        data.append(f"{'M' if start else 'L'}{scale.x(x[place]):.1f} {scale.y(y[place]):.1f}{'h0' if start else ''}")
        before = broken[place]
    return "".join(data)


def _grouped(places: Iterable[int], one: Series, scale: _Scale) -> list[list[int]]:
    """Places that would be marked on top of each other."""
    groups: dict[int, list[int]] = {}
    for place in places:
        groups.setdefault(int(scale.x(float(one.x[place])) // 6), []).append(place)
    return list(groups.values())


def _marks(one: Series, scale: _Scale, x_label: str) -> list[Mark]:
    found: list[Mark] = []
    finite = np.isfinite(one.y)
    unit = x_label.removesuffix("s") if x_label.endswith("steps") else x_label
    if len(one.x) < _DOTS_BELOW and one.style != "faint":
        for x, y in zip(one.x[finite].tolist(), one.y[finite].tolist(), strict=True):
            found.append(Mark("dot", scale.x(x), scale.y(y), f"{one.name}: {y:.6g} at {unit} {x:,.10g}", one.style))
    if not one.marked:
        return found
    kinds = {"nonfinite": ~finite, "above": finite & (one.y > scale.y_high), "below": finite & (one.y < scale.y_low)}
    for kind, which in kinds.items():
        for group in _grouped(np.flatnonzero(which).tolist(), one, scale):
            first = group[0]
            value = "not a finite number" if kind == "nonfinite" else f"{one.y[first]:.6g}, outside the axis"
            more = f" (and {len(group) - 1} more beside it)" if len(group) > 1 else ""
            title = f"{one.name}: {value}, at {unit} {one.x[first]:,.10g}{more}"
            y = scale.height - BOTTOM if kind == "below" else TOP
            found.append(Mark(kind, scale.x(float(one.x[first])), y, title, one.style))
    return found


def _described(one: Series, x_label: str) -> str:
    finite = np.isfinite(one.y)
    if not finite.any():
        return f"{one.name}: no finite value"
    x, y = one.x[finite], one.y[finite]
    return f"{one.name}: {y[0]:.4g} at first, {y[-1]:.4g} at last ({x_label} {x[-1]:,.10g}), {y.min():.4g} to {y.max():.4g} between"


def draw(
    title: str,
    unit: str,
    series: Sequence[Series],
    *,
    x_label: str = "optimizer steps",
    from_zero: bool = False,
    verticals: Sequence[tuple[float, str]] = (),
    spikes: Sequence[tuple[float, float]] = (),
    wide: bool = False,
    x_range: tuple[float, float] | None = None,
) -> Chart:
    """Work out where everything of a chart is.

    Args:
        title: What is shown.
        unit: Of the values; empty for none.
        series: At least one, x ascending.
        x_label: What x counts.
        from_zero: Whether the axis of the values begins at 0.
        verticals: x and a word for each line from top to bottom.
        spikes: x and value of points to mark.
        wide: Twice as wide; a narrow one must be beside it for phones.
        x_range: First and last x of the axis; None: from 0 to the last.
    """
    width, height = (732.0, 240.0) if wide else (356.0, 190.0)
    drawn = [one for one in series if len(one.x)]
    lasts = [float(one.x[-1]) for one in drawn]
    x_low, x_high = x_range or (0.0, max(lasts, default=1.0))
    values = np.concatenate([one.y[np.isfinite(one.y)] for one in drawn] or [np.empty(0)])
    y_low, y_high = _limits(values, from_zero)
    scale = _Scale(x_low, max(x_high, x_low + 1e-9), y_low, y_high, width, height)
    whole = x_label.endswith("steps")
    x_ticks, y_ticks = _ticks(x_low, scale.x_high, 8 if wide else 5, whole), _ticks(y_low, y_high, 5)
    marks = [mark for one in drawn for mark in _marks(one, scale, x_label)]
    marks += [Mark("spike", scale.x(x), scale.y(y), f"spike: {y:.6g} at step {x:,.10g}") for x, y in spikes[:100]]
    named = [one for one in drawn if one.name]
    return Chart(
        title=title,
        unit=unit,
        description="; ".join(_described(one, x_label) for one in named if one.style != "faint") or "no values",
        width=width,
        height=height,
        x_ticks=tuple(zip(map(scale.x, x_ticks), tick_labels(x_ticks), strict=True)),
        y_ticks=tuple(zip(map(scale.y, y_ticks), tick_labels(y_ticks), strict=True)),
        x_label=x_label,
        paths=tuple((one.style, _path(one, scale)) for one in drawn),
        marks=tuple(marks),
        verticals=tuple((scale.x(x), word) for x, word in verticals if x_low <= x <= x_high),
        legend=tuple((one.style, one.name) for one in named) if len(named) > 1 else (),
        notes=_notes(marks),
        wide=wide,
    )


def _notes(marks: Sequence[Mark]) -> tuple[str, ...]:
    """What the marks mean, for those that are there."""
    meaning = {
        "nonfinite": "\N{MULTIPLICATION SIGN} not a finite number",
        "above": "▲ far above the axis",
        "below": "▼ far below the axis",
        "spike": "○ spike",
    }
    there = {mark.kind for mark in marks}
    return tuple(words for kind, words in meaning.items() if kind in there)
