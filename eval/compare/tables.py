"""Formats scores and comparisons for a terminal: the name of each metric on one line, its numbers below."""

from __future__ import annotations

from typing import Any

from eval.compare.results import Results, metric_keys, number


def format_score(value: float, sign: str = "") -> str:
    """A score or a difference in about seven characters.

    >>> format_score(0.5), format_score(0.125, "+"), format_score(123456.789), format_score(-24691.357, "+"), format_score(5e19)
    ('0.5000', '+0.1250', '123457', '-24691.4', '5e+19')
    """
    return format(value, sign + (".4f" if abs(value) < 100 else ".6g"))


def metric_name(metric: object, filter_name: object, higher_is_better: bool | None) -> str:
    """A metric, its filter, and which way is better where lower is."""
    name = str(metric) if filter_name in (None, "none") else f"{metric}, {filter_name}"
    return f"{name} (lower is better)" if higher_is_better is False else name


def _numbers(row: dict[str, Any]) -> str:
    """Both scores, the difference with its interval, and the verdict.

    >>> _numbers({"base": 0.5, "tuned": 0.6, "difference": 0.1, "interval_95": [0.02, 0.18], "verdict": "IMPROVED"})
    '    0.5000 -> 0.6000  +0.1000 [+0.0200, +0.1800]  IMPROVED'
    """
    interval = ""
    if row["interval_95"] is not None:
        interval = " [{}, {}]".format(*(format_score(end, "+") for end in row["interval_95"]))
    scores = f"{format_score(row['base'])} -> {format_score(row['tuned'])}"
    return f"    {scores}  {format_score(row['difference'], '+')}{interval}  {row['verdict'] or ''}".rstrip()


def comparison_lines(comparison: dict[str, Any]) -> list[str]:
    """The comparison for a terminal: metrics, then flips, contamination and gate."""
    rows, overall, complete = comparison["metrics"], comparison["overall"], comparison["complete"]
    shown = [row for row in rows if row["decides"]]
    lines = ["Base -> tuned, difference [95% confidence interval]" + ("" if complete else " (incomplete)")]
    for row in shown:
        name = metric_name(row["metric"], row["filter"], row["higher_is_better"])
        lines += [f"{row['task']}: {name}", _numbers(row)]
    if overall is not None:
        lines += [f"mean of {len(overall['tasks'])} tasks", _numbers(overall)]
    lines.append(comparison["note"])
    if len(shown) < len(rows):
        lines.append(f"{len(rows) - len(shown)} more metrics, which do not decide, are in comparison.json.")
    for task, counts in comparison["flips"].items():
        lines.append(f"{task}: {counts['gained']} documents gained, {counts['lost']} lost ({counts['metric']}).")
    lines += _contamination_lines(comparison["contamination"])
    gate = comparison["gate"]
    if gate is not None:
        lines.append(f"Gate: {'passed' if gate['passed'] else 'failed'}.")
        # After a complete evaluation, the exit message has the failures.
        lines += [] if complete else [f"  {failure}" for failure in gate["failures"]]
    return lines


def _contamination_lines(contamination: dict[str, Any] | None) -> list[str]:
    if contamination is None:
        return []
    if contamination.get("reason"):
        return [f"Not searched for contamination: {contamination['reason']}"]
    lines = []
    for task, counts in contamination["tasks"].items():
        found = f"{counts['found']} of {counts['documents']} documents share a {contamination['ngram']}-gram"
        short = f" ({counts['too_short']} are too short to search for)" if counts["too_short"] else ""
        lines.append(f"{task}: {found} with the training data{short}.")
    return lines


def score_lines(results: Results) -> list[str]:
    """One model's scores for a terminal."""
    lines = [str(results["measured_model"]["model"])]
    for task, scores in results["results"].items():
        for key in metric_keys(scores):
            metric, _, filter_name = key.partition(",")
            value, stderr = number(scores[key]), number(scores.get(f"{metric}_stderr,{filter_name}"))
            if value is not None:
                name = metric_name(metric, filter_name, results["higher_is_better"].get(task, {}).get(metric))
                documents = f", {scores['sample_len']} documents" if "sample_len" in scores else ""
                error = "" if stderr is None else f" ± {format_score(stderr)}"
                lines += [f"{task}: {name}{documents}", f"    {format_score(value)}{error}"]
    return lines
