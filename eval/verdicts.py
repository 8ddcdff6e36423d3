"""From differences to words: which metric decides, what several comparisons at once change, and the mean over tasks."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import Any

from eval.pairs import Paired, Results, metric_keys
from eval.statistics import ALPHA, FEWEST_DOCUMENTS, Evidence, holm
from eval.strata import paired

IMPROVED, REGRESSED, NO_EVIDENCE = "IMPROVED", "REGRESSED", "NO EVIDENCE"
TOO_FEW, UNKNOWN = "TOO FEW DOCUMENTS", "UNKNOWN"


@dataclass
class Entry:
    """One metric of one task, and what it is made of."""

    row: dict[str, Any]
    paired: Paired | None
    evidence: Evidence | None
    adjusted: float | None = None

    @property
    def can_be_judged(self) -> bool:
        """Whether a verdict can be given."""
        return (
            self.evidence is not None
            and self.row["higher_is_better"] is not None
            and not _too_few(self.evidence, self.row["documents"])
        )


def _too_few(evidence: Evidence, documents: int) -> bool:
    return evidence.too_few or documents < FEWEST_DOCUMENTS[evidence.test]


def _verdict(evidence: Evidence | None, p_value: float | None, higher_is_better: bool | None, documents: int) -> str:
    """What may be said of a difference.

    >>> gain = Evidence("mcnemar", 0.01, 0.1, (0.1, 0.3))
    >>> [_verdict(gain, p, better, n) for p, better, n in ((0.01, True, 99), (0.01, False, 99), (0.2, True, 99), (0.01, True, 9))]
    ['IMPROVED', 'REGRESSED', 'NO EVIDENCE', 'TOO FEW DOCUMENTS']
    """
    if evidence is None or higher_is_better is None:
        return UNKNOWN
    if _too_few(evidence, documents):
        return TOO_FEW
    if p_value is None or p_value > ALPHA:
        return NO_EVIDENCE
    return IMPROVED if (sum(evidence.interval) > 0) == higher_is_better else REGRESSED


def top_level(results: Results) -> list[str]:
    """The tasks and groups that stand for themselves: no part of a group that has a score of its own."""
    inside = results.get("group_subtasks", {})

    def standing(name: str) -> list[str]:
        if metric_keys(results["results"].get(name, {})) or not inside.get(name):
            return [name]
        return [found for part in inside[name] for found in standing(part)]

    parts = {part for names in inside.values() for part in names}
    return [found for name in results["results"] if name not in parts for found in standing(name)]


def decide(entries: list[Entry], results: Results) -> None:
    """Mark the one metric of each task that decides: acc_norm where there is one, else the first that is paired.

    acc takes the likeliest answer, which a short one is; acc_norm corrects for the length.
    """
    for task in top_level(results):
        known = [entry for entry in entries if entry.row["task"] == task]
        known = [entry for entry in known if entry.row["higher_is_better"] is not None] or known

        def rank(entry: Entry) -> tuple[bool, bool]:
            return entry.paired is None, entry.row["metric"] != "acc_norm"

        for entry in sorted(known, key=rank)[:1]:
            entry.row["decides"] = True


def judge(entries: list[Entry]) -> None:
    """Correct the p-values, of those that decide together and of the others together, and give the verdicts."""
    for decides in (True, False):
        family = [entry for entry in entries if entry.row["decides"] == decides and entry.can_be_judged]
        adjusted = holm([entry.evidence.p_value for entry in family if entry.evidence is not None])
        for entry, p_value in zip(family, adjusted, strict=True):
            entry.adjusted = p_value
    for entry in entries:
        entry.row["p_adjusted"] = entry.adjusted
        entry.row["verdict"] = _verdict(
            entry.evidence, entry.adjusted, entry.row["higher_is_better"], entry.row["documents"]
        )


def overall(entries: list[Entry]) -> dict[str, Any] | None:
    """The mean over the tasks whose deciding metric is a share between 0 and 1; None for fewer than two."""
    counted = [
        entry
        for entry in entries
        if entry.row["decides"] and entry.row["higher_is_better"] and entry.paired is not None
        if all(side.min() >= 0 and side.max() <= 1 for part in entry.paired.strata for side in (part.base, part.tuned))
    ]
    if len(counted) < 2:
        return None
    samples = [
        (differences, weight / len(counted))
        for entry in counted
        if entry.paired is not None
        for differences, weight in entry.paired.samples
    ]
    evidence = paired(samples)
    documents = sum(len(differences) for differences, _ in samples)
    means = {side: fmean(entry.row[side] for entry in counted) for side in ("base", "tuned")}
    return {
        **means,
        "difference": means["tuned"] - means["base"],
        "difference_stderr": evidence.stderr,
        "interval_95": list(evidence.interval),
        "test": evidence.test,
        "p_value": evidence.p_value,
        "documents": documents,
        "verdict": _verdict(evidence, evidence.p_value, True, documents),
        "tasks": [entry.row["task"] for entry in counted],
    }


def note(entries: list[Entry]) -> str:
    """How many were compared at once, and what that does to the verdicts."""
    deciding = [entry for entry in entries if entry.row["decides"] and entry.can_be_judged]
    few = [entry.row["task"] for entry in entries if entry.row["decides"] and entry.row["verdict"] == TOO_FEW]
    left_out = f" Too few documents to be judged: {', '.join(few)}." if few else ""
    if not deciding:
        return left_out.strip() or "No metric can be judged."
    if len(deciding) < 2:
        judged = f"Only {deciding[0].row['task']} is judged" if few else "One metric decides"
        return f"{judged}, so no correction for several is needed; an interval leaves the truth out in 5 % of cases.{left_out}"
    alone = [
        entry.row["task"]
        for entry in deciding
        if entry.evidence is not None and entry.evidence.p_value <= ALPHA and entry.row["verdict"] == NO_EVIDENCE
    ]
    by_itself = f"; by itself {', '.join(alone)} would be more than chance, among so many it is not" if alone else ""
    judged = f"{len(deciding)} metrics {'are judged' if few else 'decide'}, one for each task"
    return (
        f"{judged}: their verdicts are corrected for that (Holm), so that where nothing has changed even one wrong verdict among them "
        f"comes up in at most 5 % of evaluations; the intervals are each metric's own{by_itself}.{left_out}"
    )
