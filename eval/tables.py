"""What scores and comparisons look like on a terminal of 80 columns."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from eval.pairs import Results, metric_keys, number

MOST_ROWS = 12
"""Of metrics that decide nothing: more are only in comparison.json, but for those that say something."""


def _metric_name(metric: str, filter_name: str, higher_is_better: bool | None) -> str:
    name = metric if filter_name == "none" else f"{metric}, {filter_name}"
    return f"{name} (lower is better)" if higher_is_better is False else name


def _table(title: str, words: tuple[str, ...], numbers: tuple[str, ...], last: tuple[str, ...] = ()) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in (*words, *numbers, *last):
        is_number = column in numbers
        table.add_column(column, justify="right" if is_number else "left", overflow="fold", no_wrap=is_number)
    return table


def _interval(row: dict[str, Any]) -> str:
    if row["interval_95"] is None:
        return f"{row['difference']:+.3f}"
    low, high = row["interval_95"]
    # The last digit of an end must not tell another story than the verdict.
    ends = [f"{end:+.3f}" if abs(end) >= 0.0005 or end == 0 else f"{end:+.1g}" for end in (low, high)]
    return f"{row['difference']:+.3f} [{', '.join(ends)}]"


def _shown(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    others = sum(not row["decides"] for row in rows)
    if others <= MOST_ROWS:
        return rows
    return [row for row in rows if row["decides"] or row["verdict"] in ("IMPROVED", "REGRESSED")]


def comparison_table(comparison: dict[str, Any]) -> Table:
    """The comparison for a terminal: a row for each metric, with a star at those that decide."""
    title = "Base and tuned" + ("" if comparison["complete"] else " (incomplete)")
    table = _table(title, ("task: metric",), ("base", "tuned", "difference [95 %]"), ("verdict",))
    rows = _shown(comparison["metrics"])
    several = any(not row["decides"] for row in rows)
    for row in rows:
        metric = _metric_name(row["metric"], row["filter"], row["higher_is_better"])
        star = "*" if several and row["decides"] else ""
        scores = (f"{row['base']:.3f}", f"{row['tuned']:.3f}", _interval(row))
        table.add_row(f"{row['task']}: {metric}{star}", *scores, row["verdict"])
    overall = comparison["overall"]
    if overall is not None:
        scores = (f"{overall['base']:.3f}", f"{overall['tuned']:.3f}", _interval(overall))
        table.add_row(f"mean of {len(overall['tasks'])} tasks", *scores, overall["verdict"])
    return table


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


def scores_table(results: Results) -> Table:
    """One model's scores for a terminal."""
    table = _table(str(results["measured_model"]["model"]), ("task", "metric"), ("documents", "score"))
    for task, scores in results["results"].items():
        for key in metric_keys(scores):
            metric, _, filter_name = key.partition(",")
            score, stderr = number(scores[key]), number(scores.get(f"{metric}_stderr,{filter_name}"))
            if score is None:
                continue
            higher_is_better = results["higher_is_better"].get(task, {}).get(metric)
            shown = f"{score:.3f}" if stderr is None else f"{score:.3f} ± {stderr:.3f}"
            table.add_row(
                task, _metric_name(metric, filter_name, higher_is_better), str(scores.get("sample_len", "")), shown
            )
    return table
