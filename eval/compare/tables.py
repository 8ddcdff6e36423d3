"""Formats scores and comparisons for a terminal: the name of each metric on one line, its numbers below."""

from __future__ import annotations

from typing import Any

from eval.compare.results import Results, metric_keys, number

MOST_ROWS = 12
"""Of metrics that do not decide; of more, only the significant ones are shown."""


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


def _numbers(row: dict[str, Any]) -> str:
    """Both scores, the difference with its interval, and the verdict.

    >>> _numbers({"base": 0.5, "tuned": 0.6, "difference": 0.1, "interval_95": [0.00004, 0.2], "verdict": "IMPROVED"})
    '    0.5000 -> 0.6000  +0.1000 [+4e-05, +0.2000]  IMPROVED'
    """
    scores = f"{format_score(row['base'])} -> {format_score(row['tuned'])}"
    interval = ""
    if row["interval_95"] is not None:
        # An end that is not 0 must not look like 0, which would contradict the verdict.
        ends = [
            format_score(end, "+") if abs(end) >= 0.00005 or end == 0 else f"{end:+.0e}" for end in row["interval_95"]
        ]
        interval = f" [{', '.join(ends)}]"
    return f"    {scores}  {format_score(row['difference'], '+')}{interval}  {row['verdict']}"


def comparison_lines(comparison: dict[str, Any]) -> list[str]:
    """The comparison for a terminal: metrics, then flips, contamination and gate."""
    rows, overall = comparison["metrics"], comparison["overall"]
    others = sum(not row["decides"] for row in rows)
    shown = [
        row for row in rows if others <= MOST_ROWS or row["decides"] or row["verdict"] in ("IMPROVED", "REGRESSED")
    ]
    lines = [
        "Base -> tuned, difference [95% confidence interval]" + ("" if comparison["complete"] else " (incomplete)")
    ]
    for row in shown:
        star = "" if row["decides"] else " (does not decide)"
        lines += [
            f"{row['task']}: {_metric_name(row['metric'], row['filter'], row['higher_is_better'])}{star}",
            _numbers(row),
        ]
    if overall is not None:
        lines += [f"mean of {len(overall['tasks'])} tasks", _numbers(overall)]
    lines.append(comparison["note"])
    if len(shown) < len(rows):
        lines.append(f"{len(rows) - len(shown)} more metrics, which do not decide, are in comparison.json.")
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
        return [f"Not searched for contamination: {contamination['reason']}"]
    tasks, shared = contamination["tasks"], f"a {contamination['ngram']}-gram with the training data"
    lines = []
    for task, counts in tasks.items():
        if counts["found"]:
            line = f"{task}: {counts['found']} of {counts['documents']} documents share {shared}"
            if counts.get("difference_without") is not None:
                line += f"; without them {counts['base_without']:.3f} -> {counts['tuned_without']:.3f}"
            lines.append(f"{line}.")
    lines = lines or [f"No document of the tasks shares {shared}."]
    short, documents = (sum(counts[key] for counts in tasks.values()) for key in ("too_short", "documents"))
    return [*lines, *([f"{short} of {documents} documents are too short to search for."] if short else [])]


def _gate_lines(gate: dict[str, Any] | None, complete: bool) -> list[str]:
    if gate is None:
        return []
    if gate["passed"]:
        return ["Gate: passed."]
    # After a complete evaluation, eval/run.py ends with the failures.
    return ["Gate: failed.", *([] if complete else [f"  {failure}" for failure in gate["failures"]])]


def score_lines(results: Results) -> list[str]:
    """One model's scores for a terminal."""
    lines = [str(results["measured_model"]["model"])]
    for task, scores in results["results"].items():
        for key in metric_keys(scores):
            metric, _, filter_name = key.partition(",")
            value, stderr = number(scores[key]), number(scores.get(f"{metric}_stderr,{filter_name}"))
            if value is not None:
                higher_is_better = results["higher_is_better"].get(task, {}).get(metric)
                error = "" if stderr is None else f" ± {format_score(stderr)}"
                documents = f", {scores['sample_len']} documents" if "sample_len" in scores else ""
                lines.append(f"{task}: {_metric_name(metric, filter_name, higher_is_better)}{documents}")
                lines.append(f"    {format_score(value)}{error}")
    return lines
