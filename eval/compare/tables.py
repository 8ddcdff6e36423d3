"""What scores and comparisons look like on a terminal, however narrow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.text import Text

from eval.compare.pairs import Results, metric_keys, number

MOST_ROWS = 12
"""Of metrics that decide nothing: more are only in comparison.json, but for those that say something."""


def format_score(value: float, sign: str = "") -> str:
    """A score or a difference in about seven characters.

    >>> format_score(0.5), format_score(0.125, "+"), format_score(123456.789), format_score(-24691.357, "+"), format_score(5e19)
    ('0.5000', '+0.1250', '123457', '-24691.4', '5.00e+19')
    """
    for limit, form in ((100, ".4f"), (1e4, ".2f"), (1e5, ".1f"), (1e7, ".0f")):
        if abs(value) < limit:
            return format(value, sign + form)
    return format(value, sign + ".2e")


def _metric_name(metric: str, filter_name: str, higher_is_better: bool | None) -> str:
    name = metric if filter_name == "none" else f"{metric}, {filter_name}"
    return f"{name} (lower is better)" if higher_is_better is False else name


@dataclass(frozen=True)
class Aligned:
    """Rows of cells in columns; where they do not fit side by side, each row's name stands above its other cells.

    No name is cut inside a word, and no number is left out: a rich table does both where it runs out of room.
    """

    title: str
    rows: Sequence[tuple[str, ...]]
    """The head first; a name, then the other cells."""

    words: tuple[int, ...] = (0,)
    """Columns that are aligned to the left."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        widths = [max(map(cell_len, column)) for column in zip(*self.rows, strict=True)]
        stacked = sum(widths) + 2 * (len(widths) - 1) > options.max_width
        yield Text(self.title, style="italic")
        for row in self.rows:
            style = "bold" if row is self.rows[0] else ""
            cells = [
                cell + " " * (width - cell_len(cell)) if column in self.words else " " * (width - cell_len(cell)) + cell
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            if stacked:
                yield Text(row[0], style=style)
                cells[0] = ""
            yield Text("  ".join(cells).rstrip(), style=style)


def _interval(row: dict[str, Any]) -> str:
    difference = _number(row["difference"], "+")
    if row["interval_95"] is None:
        return difference
    low, high = row["interval_95"]
    # The last digit of an end must not tell another story than the verdict.
    ends = [_number(end, "+") if abs(end) >= 0.0005 or end == 0 else f"{end:+.1g}" for end in (low, high)]
    return f"{difference} [{', '.join(ends)}]"


def _number(value: float, sign: str = "") -> str:
    return format(value, f"{sign}.3f") if abs(value) < 100 else format_score(value, sign)


def _shown(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    others = sum(not row["decides"] for row in rows)
    if others <= MOST_ROWS:
        return rows
    return [row for row in rows if row["decides"] or row["verdict"] in ("IMPROVED", "REGRESSED")]


def comparison_table(comparison: dict[str, Any]) -> Aligned:
    """The comparison for a terminal: a row for each metric, with a star at those that decide."""
    title = "Base and tuned" + ("" if comparison["complete"] else " (incomplete)")
    lines = [("task: metric", "base", "tuned", "difference [95 %]", "verdict")]
    rows = _shown(comparison["metrics"])
    several = any(not row["decides"] for row in rows)
    for row in rows:
        metric = _metric_name(row["metric"], row["filter"], row["higher_is_better"])
        star = "*" if several and row["decides"] else ""
        scores = (_number(row["base"]), _number(row["tuned"]), _interval(row))
        lines.append((f"{row['task']}: {metric}{star}", *scores, row["verdict"]))
    overall = comparison["overall"]
    if overall is not None:
        scores = (_number(overall["base"]), _number(overall["tuned"]), _interval(overall))
        lines.append((f"mean of {len(overall['tasks'])} tasks", *scores, overall["verdict"]))
    return Aligned(title, lines, words=(0, 4))


def comparison_lines(comparison: dict[str, Any]) -> list[str]:
    """What is to be said under the table: which metrics decide, what flipped, what was trained on, and the gate."""
    rows = comparison["metrics"]
    lines = [comparison["note"]]
    hidden = len(rows) - len(_shown(rows))
    if any(not row["decides"] for row in _shown(rows)):
        lines.append("* decides; the others weigh little in the correction.")
    if hidden:
        lines.append(f"{hidden} more metrics are in comparison.json: parts of groups, and metrics that do not decide.")
    for task, counts in comparison["flips"].items():
        lines.append(f"{task}: {counts['gained']} documents gained, {counts['lost']} lost ({counts['metric']}).")
    return (
        lines
        + _contamination_lines(comparison["contamination"])
        + _gate_lines(comparison["gate"], comparison["complete"])
    )


def _contamination_lines(contamination: dict[str, Any] | None) -> list[str]:
    if contamination is None:
        return []
    if contamination.get("reason"):
        return [f"Not searched for documents that were trained on: {contamination['reason']}"]
    tasks, shared = contamination["tasks"], f"{contamination['ngram']} words in a row with the training data"
    lines = []
    for task, counts in tasks.items():
        if not counts["found"]:
            continue
        line = f"{task}: {counts['found']} of {counts['documents']} documents share {shared}"
        if counts.get("difference_without") is not None:
            line += f"; without them {counts['base_without']:.3f} -> {counts['tuned_without']:.3f}"
        lines.append(f"{line}.")
    lines = lines or [f"No document of the tasks shares {shared}."]
    short, documents = (sum(counts[key] for counts in tasks.values()) for key in ("too_short", "documents"))
    return [*lines, *([f"{short} of {documents} documents are too short to be looked for there."] if short else [])]


def _gate_lines(gate: dict[str, Any] | None, complete: bool) -> list[str]:
    if gate is None:
        return []
    if gate["passed"]:
        return ["Gate: passed."]
    # Of a complete evaluation they are the last thing that is said: eval/run.py ends with them.
    return ["Gate: failed.", *([] if complete else [f"  {failure}" for failure in gate["failures"]])]


def scores_table(results: Results) -> Aligned:
    """One model's scores for a terminal."""
    lines = [("task: metric", "documents", "score")]
    for task, scores in results["results"].items():
        for key in metric_keys(scores):
            metric, _, filter_name = key.partition(",")
            value, stderr = number(scores[key]), number(scores.get(f"{metric}_stderr,{filter_name}"))
            if value is None:
                continue
            higher_is_better = results["higher_is_better"].get(task, {}).get(metric)
            shown = _number(value) if stderr is None else f"{_number(value)} ± {_number(stderr)}"
            name = f"{task}: {_metric_name(metric, filter_name, higher_is_better)}"
            lines.append((name, str(scores.get("sample_len", "")), shown))
    return Aligned(str(results["measured_model"]["model"]), lines)
