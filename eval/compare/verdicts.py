"""Gives verdicts: which metric decides, the correction for several comparisons, and the mean over tasks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isfinite
from statistics import fmean
from typing import Any

from eval.compare.pairs import Paired
from eval.compare.results import Results, top_level
from eval.compare.statistics import ALPHA, Evidence, Sample, holm, paired

IMPROVED, REGRESSED, NO_CHANGE = "IMPROVED", "REGRESSED", "NO SIGNIFICANT CHANGE"
TOO_FEW, UNKNOWN = "TOO FEW DOCUMENTS", "UNKNOWN"

OTHERS = 0.25
"""Weight in the correction of all metrics that do not decide, together; each deciding metric and the mean have 1."""


@dataclass
class Entry:
    """One metric of one task, with its evidence."""

    row: dict[str, Any]
    paired: Paired | None
    evidence: Evidence | None
    adjusted: float | None = None

    @property
    def can_be_judged(self) -> bool:
        """Whether a verdict can be given."""
        return self.evidence is not None and self.row["higher_is_better"] is not None and not self.evidence.too_few

    @property
    def significant_alone(self) -> bool:
        """Whether its p-value is small before the correction."""
        return self.can_be_judged and self.evidence is not None and self.evidence.p_value <= ALPHA


def _verdict(evidence: Evidence | None, p_value: float | None, higher_is_better: bool | None) -> str:
    """The verdict on a difference.

    >>> gain = Evidence("paired t", 0.01, 0.1, (0.1, 0.3))
    >>> [_verdict(gain, p, better) for p, better in ((0.01, True), (0.01, False), (0.2, True), (0.01, None))]
    ['IMPROVED', 'REGRESSED', 'NO SIGNIFICANT CHANGE', 'UNKNOWN']
    """
    if evidence is None or higher_is_better is None:
        return UNKNOWN
    if evidence.too_few:
        return TOO_FEW
    if p_value is None or p_value > ALPHA:
        return NO_CHANGE
    return IMPROVED if (sum(evidence.interval) > 0) == higher_is_better else REGRESSED


def decide(entries: list[Entry], results: Results) -> None:
    """Mark the one metric of each task that decides: acc_norm where there is one, else the first that is paired.

    acc favors short answers; acc_norm corrects for the length. Of several filters a flexible one decides: the question is whether an
    answer is right, not whether it has the format of the examples.
    """
    for task in top_level(results):
        known = [entry for entry in entries if entry.row["task"] == task]
        known = [entry for entry in known if entry.row["higher_is_better"] is not None] or known

        def rank(entry: Entry) -> tuple[bool, bool, bool]:
            return entry.paired is None, entry.row["metric"] != "acc_norm", not _is_flexible(entry.row)

        for entry in sorted(known, key=rank)[:1]:
            entry.row["decides"] = True


def _is_flexible(row: dict[str, Any]) -> bool:
    return str(row["filter"]).startswith("flexible")


def judge(entries: list[Entry], mean: Entry | None) -> None:
    """Correct all p-values together, and give the verdicts.

    Metrics that do not decide weigh little, so that many of them hardly affect the others.

    Args:
        entries: All metrics.
        mean: Over tasks, from `overall`.
    """
    family = [entry for entry in [*entries, mean] if entry is not None and entry.can_be_judged]
    others = sum(not entry.row["decides"] for entry in family)
    adjusted = holm(
        [entry.evidence.p_value for entry in family if entry.evidence is not None],
        [1.0 if entry.row["decides"] else OTHERS / others for entry in family],
    )
    for entry, p_value in zip(family, adjusted, strict=True):
        entry.adjusted = p_value
    for entry in [*entries, *([mean] if mean else [])]:
        entry.row["p_adjusted"] = entry.adjusted
        entry.row["verdict"] = _verdict(entry.evidence, entry.adjusted, entry.row["higher_is_better"])


def overall(entries: list[Entry]) -> Entry | None:
    """The mean over the tasks whose deciding metric is a share between 0 and 1; None for fewer than two."""
    counted = [
        entry
        for entry in entries
        if entry.row["decides"] and entry.row["higher_is_better"] and entry.paired is not None
        if all(part.bounded for part in entry.paired.strata)
    ]
    if len(counted) < 2:
        return None
    samples: list[Sample] = [
        replace(sample, weight=sample.weight / len(counted))
        for entry in counted
        if entry.paired is not None
        for sample in entry.paired.samples
    ]
    evidence = paired(samples)
    means = {side: fmean(entry.row[side] for entry in counted) for side in ("base", "tuned")}
    row = {
        **means,
        "decides": True,
        "higher_is_better": True,
        "difference": means["tuned"] - means["base"],
        "difference_stderr": evidence.stderr,
        "interval_95": list(evidence.interval),
        "test": evidence.test,
        "p_value": evidence.p_value,
        "documents": sum(entry.row["documents"] for entry in counted),
        "tasks": [entry.row["task"] for entry in counted],
    }
    return Entry(row, None, evidence)


def note(entries: list[Entry], mean: Entry | None) -> str:
    """What the verdicts mean together, and what to know of single ones.

    Args:
        entries: All metrics, judged.
        mean: Over tasks, judged.
    """
    judged = sum(entry.can_be_judged for entry in [*entries, *([mean] if mean else [])])
    deciding = [entry for entry in entries if entry.row["decides"]]
    sentences = []
    if judged > 1:
        sentences.append(
            f"{judged} verdicts are corrected together (Holm): where nothing has changed, at most 5 % of evaluations have a wrong verdict. "
            "Confidence intervals are not corrected."
        )
    elif judged:
        sentences.append(
            "One metric is judged and needs no correction: chance alone gives it a verdict in 5 % of evaluations."
        )
    alone = [entry.row["task"] for entry in deciding if entry.significant_alone and entry.row["verdict"] == NO_CHANGE]
    if alone:
        sentences.append(f"Significant alone, but not among so many verdicts: {', '.join(alone)}.")
    few = [entry.row["task"] for entry in deciding if entry.row["verdict"] == TOO_FEW]
    if few:
        sentences.append(f"Too few documents for a verdict: {', '.join(few)}.")
    for entry in deciding:
        sentences += _about(entry, entries)
    return " ".join(sentences) or "No metric can be judged."


def _about(entry: Entry, entries: list[Entry]) -> list[str]:
    """What to know of one metric that decides."""
    row, sentences = entry.row, []
    task, metric = row["task"], row["metric"]
    for other in (one.row for one in entries if _is_flexible(row)):
        same_metric = (other["task"], other["metric"]) == (task, metric)
        if same_metric and other["verdict"] in (IMPROVED, REGRESSED) and other["verdict"] != row["verdict"]:
            sentences.append(
                f"{task}: {other['verdict']} by {other['filter']}, {row['verdict']} by {row['filter']}: the format of the answers changed, "
                "which does not make them right or wrong."
            )
    if row["passages"] is not None and row["passages"] < 0.9 * row["documents"]:  # a few copies do not matter
        sentences.append(f"{task}: {row['documents']} documents share {row['passages']} texts, and count by text.")
    if not isfinite(row["difference"]):
        sentences.append(f"{task}: {metric} is not finite (base {row['base']}, tuned {row['tuned']}).")
    elif entry.evidence is None:
        sentences.append(f"{task}: {metric} is not a sum over documents, and lm_eval gives no standard error for it.")
    elif row["higher_is_better"] is None:
        sentences.append(f"{task}: the task does not say whether a higher {metric} is better (`higher_is_better:`).")
    return sentences
