"""One metric of one task on both models: in words, in a table, and drawn."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

from eval.report.blocks import MISSING, Bar, Line, Score, Scores, Table, number, score, words
from eval.report.results import get, is_number

Z95 = NormalDist().inv_cdf(0.975)
"""95 % of a normal distribution lie within this many standard errors."""

KINDS = {"IMPROVED": "good", "better": "good", "REGRESSED": "bad", "worse": "bad"}
"""Of a verdict; the lower case is how earlier versions of the comparison say it."""


def kind_of(verdict: object) -> str:
    """good, bad or plain."""
    return KINDS.get(str(verdict), "plain")


def metric_name(entry: dict[str, Any]) -> str:
    """A metric, its filter, and which way is better where that is down."""
    name = words(entry.get("metric"))
    name += f", {words(entry['filter'])}" if entry.get("filter") not in (None, "none") else ""
    return name + (" (lower is better)" if entry.get("higher_is_better") is False else "")


def interval_of(entry: object, key: str = "interval_95") -> tuple[float, float] | None:
    """The interval of an entry, where it is recorded."""
    found = get(entry, key)
    both = isinstance(found, list) and len(found) == 2 and all(map(is_number, found))
    return (float(found[0]), float(found[1])) if both else None


def shown_interval(interval: tuple[float, float] | None) -> str:
    """An interval of a difference."""
    return f"[{score(interval[0], '+')}, {score(interval[1], '+')}]" if interval else MISSING


def score_of(entry: dict[str, Any], side: str) -> str:
    """One model's score with its standard error."""
    stderr = entry.get(f"{side}_stderr")
    return score(entry.get(side)) + (f" ± {score(stderr)}" if is_number(stderr) else "")


def scores_table(metrics: list[dict[str, Any]]) -> Table:
    """Every number of every metric."""
    tested = any(is_number(entry.get("p_value")) for entry in metrics)
    rows: list[list[Line]] = []
    for entry in metrics:
        probabilities = [
            number(entry.get("p_value"), ".2g"),
            number(entry.get("p_adjusted"), ".2g"),
            words(entry.get("test")),
        ]
        rows.append(
            [
                words(entry.get("task")),
                metric_name(entry),
                number(entry.get("documents")),
                score_of(entry, "base"),
                score_of(entry, "tuned"),
                score(entry.get("difference"), "+"),
                score(entry.get("difference_stderr")),
                shown_interval(interval_of(entry)),
                *(probabilities if tested else []),
                words(entry.get("verdict")) + (" (decides nothing)" if entry.get("decides") is False else ""),
            ]
        )
    head = ["Task", "Metric", "Documents", "Base", "Tuned", "Difference", "Standard error", "95% interval"]
    head += ["p", "p (Holm)", "Test"] if tested else []
    return Table([*head, "Verdict"], rows, numbers=range(2, 10 if tested else 8))


def drawn_scores(metrics: list[dict[str, Any]]) -> Scores:
    """Bars and differences, on one scale for all shares between 0 and 1."""
    shares = [entry for entry in metrics if _is_share(entry)]
    widest = max((_reach(entry) for entry in shares), default=0.0)
    rows = []
    for entry in metrics:
        ends = [end for side in ("base", "tuned") for end in _ends(entry, side) if end is not None]
        full = 1.0 if entry in shares else max(map(abs, ends), default=0.0)
        reach = widest if entry in shares else _reach(entry)
        rows.append(
            Score(
                task=words(entry.get("task")),
                metric=f"{metric_name(entry)}; {number(entry.get('documents'))} documents"
                + ("" if entry in shares else "; on a scale of its own"),
                verdict=words(entry.get("verdict")),
                kind=kind_of(entry.get("verdict")),
                base=_bar(entry, "base", full),
                tuned=_bar(entry, "tuned", full),
                difference=score(entry.get("difference"), "+"),
                interval=shown_interval(interval_of(entry)),
                span=_span(entry, reach),
            )
        )
    return Scores(rows, f"{widest:.3f}" if shares else "")


def _is_share(entry: dict[str, Any]) -> bool:
    scores = [entry.get(side) for side in ("base", "tuned")]
    return all(is_number(one) and 0 <= one <= 1 for one in scores)


def _reach(entry: dict[str, Any]) -> float:
    values = [entry.get("difference"), *(interval_of(entry) or ())]
    return max((abs(value) for value in values if is_number(value)), default=0.0)


def _ends(entry: dict[str, Any], side: str) -> tuple[float | None, float | None, float | None]:
    value, stderr = entry.get(side), entry.get(f"{side}_stderr")
    if not is_number(value):
        return None, None, None
    return (value, value - Z95 * stderr, value + Z95 * stderr) if is_number(stderr) else (value, None, None)


def _within(value: float | None, full: float, low: float = 0.0) -> float | None:
    return None if value is None or not full else min(max(value / full, low), 1.0)


def _bar(entry: dict[str, Any], side: str, full: float) -> Bar:
    value, low, high = _ends(entry, side)
    return Bar(score(value), _within(value, full), _within(low, full), _within(high, full))


def _span(entry: dict[str, Any], reach: float) -> Bar | None:
    difference, (low, high) = entry.get("difference"), interval_of(entry) or (None, None)
    if not is_number(difference) or not reach:
        return None
    return Bar("", _within(difference, reach, -1), _within(low, reach, -1), _within(high, reach, -1))
