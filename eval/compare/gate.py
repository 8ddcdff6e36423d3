"""Judges `eval.gate`: whether the tuned model passes, which decides the exit status."""

from __future__ import annotations

from typing import Any

from eval.compare.verdicts import REGRESSED, TOO_FEW, UNKNOWN, Row, verdict
from sft.recipe.eval import Gate

DEFAULT, OVERALL = "default", "overall"


def _name(row: Row) -> str:
    return f"{row['task']} ({row['metric']})" if row.get("metric") else OVERALL


def _find(name: str, comparison: dict[str, Any]) -> Row | str:
    """The row that a name in the gate refers to, or why there is none."""
    if name == OVERALL:
        return comparison["overall"] or f"{OVERALL}: there is no mean over tasks. It takes two with scores from 0 to 1."
    task, _, wanted = name.partition("/")
    rows: list[Row] = [row for row in comparison["metrics"] if row["task"] == task]
    if not rows:
        return f"{task} has no score."
    if not wanted:  # of a part of a group no metric decides
        return next((row for row in rows if row["decides"]), rows[0])
    keys = [f"{row['metric']},{row['filter']}" for row in rows]
    for row, key in zip(rows, keys, strict=True):
        if wanted in (key, row["metric"]):
            return row
    return f"{task} has no metric {wanted}. It has: {', '.join(keys)}."


def _regression(row: Row, most: float, judge_by: str) -> str | None:
    """Why a drop is too large, if it is."""
    name, higher_is_better = _name(row), row.get("higher_is_better", True)
    if higher_is_better is None:
        return f"{name}: whether higher is better is not known, so no drop can be judged."
    worse = -row["difference"] if higher_is_better else row["difference"]
    # A metric that does not decide has no corrected verdict: it is judged alone.
    found = row["verdict"] or verdict(row)
    if judge_by == "evidence" and found in (TOO_FEW, UNKNOWN):
        return (
            f"{name}: the verdict is {found}, which shows no drop and no absence of one. Measure more documents, or set "
            "eval.gate.judge_by=score."
        )
    # 0.62 - 0.60 is more than 0.02 by rounding alone.
    if worse <= most + 1e-9 or (judge_by == "evidence" and found != REGRESSED):
        return None
    proven = ", which is more than chance" if judge_by == "evidence" else ""
    return (
        f"{name}: {row['base']:.4f} -> {row['tuned']:.4f}, worse by {worse:.4f}{proven}; at most {most:g} is allowed."
    )


def _shortfall(row: Row, least: float) -> str | None:
    """Why a required score is not reached, if it is not."""
    lower = row.get("higher_is_better") is False
    if row["tuned"] <= least + 1e-9 if lower else row["tuned"] >= least - 1e-9:
        return None
    return f"{_name(row)}: the tuned model has {row['tuned']:.4f}; at {'most' if lower else 'least'} {least:g} is required."


def judge_gate(gate: Gate | None, comparison: dict[str, Any]) -> dict[str, Any] | None:
    """Hold a comparison against a gate: `asked`, `passed`, and a sentence for each of `failures`; None without a gate."""
    if gate is None:
        return None
    failures = [f"{task} was not measured: {reason}" for task, reason in comparison["not_measured"].items()]
    named = {name.partition("/")[0] for name in gate.max_regression}
    rows = [row for row in comparison["metrics"] if row["decides"] and row["task"] not in named]
    found: list[str | None] = []
    for name, most in gate.max_regression.items():
        for row in rows if name == DEFAULT else [_find(name, comparison)]:
            found.append(row if isinstance(row, str) else _regression(row, most, gate.judge_by))
    for name, least in gate.require.items():
        required = _find(name, comparison)
        found.append(required if isinstance(required, str) else _shortfall(required, least))
    failures = list(dict.fromkeys([*failures, *filter(None, found)]))
    return {
        "asked": gate.model_dump(mode="json"),
        "passed": not failures and comparison["complete"],
        "failures": failures,
    }
