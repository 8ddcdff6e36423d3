"""Gives verdicts on the metrics that decide: one per task, and the mean over tasks, corrected together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isfinite
from statistics import fmean
from typing import Any

from eval.compare.pairs import Paired
from eval.compare.results import Results, top_level
from eval.compare.statistics import ALPHA, Evidence, holm, paired

IMPROVED, REGRESSED, NO_CHANGE = "IMPROVED", "REGRESSED", "NO SIGNIFICANT CHANGE"
TOO_FEW, UNKNOWN = "TOO FEW DOCUMENTS", "UNKNOWN"

Row = dict[str, Any]
"""A metric of a task, or the mean over tasks, as in comparison.json."""


@dataclass(frozen=True)
class Metric:
    """One metric of one task on both models."""

    row: Row
    paired: Paired | None
    """None where the score is no sum over documents."""


def evidence_row(evidence: Evidence | None) -> Row:
    """Test and interval as in comparison.json."""
    if evidence is None:
        return dict.fromkeys(("difference_stderr", "interval_95", "test", "p_value")) | {"too_few": False}
    return {
        "difference_stderr": evidence.stderr,
        "interval_95": list(evidence.interval),
        "test": evidence.test,
        "p_value": evidence.p_value,
        "too_few": evidence.too_few,
    }


def verdict(row: Row) -> str:
    """The verdict on a difference, by its corrected p-value where it has one.

    >>> gain = {"p_value": 0.01, "interval_95": [0.1, 0.3], "too_few": False, "higher_is_better": True}
    >>> [verdict(gain | more) for more in ({}, {"higher_is_better": False}, {"p_adjusted": 0.2}, {"higher_is_better": None})]
    ['IMPROVED', 'REGRESSED', 'NO SIGNIFICANT CHANGE', 'UNKNOWN']
    """
    if row["p_value"] is None or row["higher_is_better"] is None:
        return UNKNOWN
    if row["too_few"]:
        return TOO_FEW
    corrected = row.get("p_adjusted")
    if (row["p_value"] if corrected is None else corrected) > ALPHA:
        return NO_CHANGE
    return IMPROVED if (sum(row["interval_95"]) > 0) == row["higher_is_better"] else REGRESSED


def decide(metrics: list[Metric], results: Results) -> None:
    """Mark the one metric of each task that decides: acc_norm where there is one, else the first that is paired.

    acc favors short answers; acc_norm corrects for the length. Of several filters a flexible one decides: the question is whether an
    answer is right, not whether it has the format of the examples.
    """

    def rank(metric: Metric) -> tuple[bool, bool, bool, bool]:
        row = metric.row
        flexible = str(row["filter"]).startswith("flexible")
        return row["higher_is_better"] is None, metric.paired is None, row["metric"] != "acc_norm", not flexible

    for task in top_level(results):
        of_task = [metric for metric in metrics if metric.row["task"] == task]
        if of_task:
            min(of_task, key=rank).row["decides"] = True


def overall(metrics: list[Metric]) -> Row | None:
    """The mean over the tasks whose deciding metric is a score between 0 and 1; None for fewer than two."""
    counted = [
        (metric.row, metric.paired)
        for metric in metrics
        if metric.row["decides"] and metric.row["higher_is_better"] and metric.paired is not None
        if all(part.bounded for part in metric.paired.parts.values())
    ]
    if len(counted) < 2:
        return None
    mean = [sample for _, documents in counted for sample in documents.samples]
    samples = [replace(sample, weight=sample.weight / len(counted)) for sample in mean]
    base, tuned = (fmean(row[side] for row, _ in counted) for side in ("base", "tuned"))
    return {
        "base": base,
        "tuned": tuned,
        "difference": tuned - base,
        "decides": True,
        "higher_is_better": True,
        "documents": sum(row["documents"] for row, _ in counted),
        "tasks": [row["task"] for row, _ in counted],
        **evidence_row(paired(samples)),
    }


def judge(rows: list[Row]) -> None:
    """Give each row that decides its verdict, with all p-values corrected together; the others have none."""
    family = [row for row in rows if row["decides"] and verdict(row) not in (TOO_FEW, UNKNOWN)]
    adjusted = holm([row["p_value"] for row in family])
    for row in rows:
        row["p_adjusted"] = None
    for row, p_value in zip(family, adjusted, strict=True):
        row["p_adjusted"] = p_value
    for row in rows:
        row["verdict"] = verdict(row) if row["decides"] else None


def note(rows: list[Row], mean: Row | None) -> str:
    """What the verdicts of the metrics that decide and of the mean over tasks say together, and what to know of single ones."""
    judged = sum(row["p_adjusted"] is not None for row in [*rows, *([mean] if mean else [])])
    sentences = []
    if judged > 1:
        sentences.append(
            f"{judged} verdicts are corrected together (Holm): where nothing has changed, at most 5% of evaluations have a wrong verdict. "
            "Confidence intervals are not corrected."
        )
    elif judged:
        sentences.append(
            "One metric is judged. Where nothing has changed, 5% of evaluations give it a verdict by chance."
        )
    if alone := [row["task"] for row in rows if row["verdict"] == NO_CHANGE and row["p_value"] <= ALPHA]:
        sentences.append(f"Significant alone, but not after the correction: {', '.join(alone)}.")
    if few := [row["task"] for row in rows if row["verdict"] == TOO_FEW]:
        sentences.append(f"Too few documents for a verdict: {', '.join(few)}.")
    return " ".join([*sentences, *filter(None, map(_remark, rows))]) or "No metric can be judged."


def _remark(row: Row) -> str | None:
    task, metric = row["task"], row["metric"]
    if not isfinite(row["difference"]):
        return f"{task}: {metric} is not finite (base {row['base']}, tuned {row['tuned']})."
    if row["p_value"] is None:
        return f"{task}: {metric} is not a sum over documents, and lm_eval gives no standard error for it."
    if row["higher_is_better"] is None:
        return f"{task}: the task does not say whether a higher {metric} is better (`higher_is_better:`)."
    return None
