"""Judges `eval.gate`: whether the tuned model passes, which decides the exit status."""

from __future__ import annotations

from typing import Any

from sft.errors import did_you_mean
from sft.recipe.eval import Gate

DEFAULT, OVERALL = "default", "overall"
Row = dict[str, Any]


def _worse_by(row: Row) -> float:
    """How much worse the tuned model is, in the metric's own unit; negative where it is better."""
    return float(row["difference"] if row.get("higher_is_better") is False else -row["difference"])


def _called(row: Row) -> str:
    return f"{row['task']} ({row['metric']})" if row.get("metric") else "overall"


def _find(name: str, comparison: dict[str, Any]) -> Row | str:
    """The row that a name in the gate refers to, or why there is none."""
    if name == OVERALL:
        return (
            comparison["overall"]
            or "overall: there is no mean over tasks; it takes two whose metrics are shares from 0 to 1."
        )
    task, _, wanted = name.partition("/")
    metric, _, filter_name = wanted.partition(",")
    rows: list[Row] = [row for row in comparison["metrics"] if row["task"] == task]
    chosen = [
        row
        for row in rows
        if (row["metric"] == metric and row["filter"] == (filter_name or row["filter"]) if wanted else row["decides"])
    ]
    if chosen:
        return chosen[0]
    if not rows:
        return f"{task} has no score."
    if not wanted:  # a part of a group, none of whose metrics decides
        return rows[0]
    keys = [f"{row['metric']},{row['filter']}" for row in rows]
    return f"{task} has no metric {wanted}{did_you_mean(wanted, keys, '.')} It has: {', '.join(keys)}."


def _regressed(row: Row, most: float, judge_by: str) -> str | None:
    """Why a drop is too large, if it is."""
    worse, called = _worse_by(row), _called(row)
    if row.get("higher_is_better", True) is None:
        return f"{called}: whether higher is better is not known, so no drop can be judged."
    if judge_by == "evidence" and row["verdict"] in ("TOO FEW DOCUMENTS", "UNKNOWN"):
        return (
            f"{called}: the verdict is {row['verdict']}, which shows no drop and no absence of one. Measure more documents, or set "
            "eval.gate.judge_by=score."
        )
    # 0.62 - 0.60 is more than 0.02 by rounding alone.
    if worse <= most + 1e-9 or (judge_by == "evidence" and row["verdict"] != "REGRESSED"):
        return None
    proven = ", which is more than chance" if judge_by == "evidence" else ""
    return (
        f"{called}: {row['base']:.4f} -> {row['tuned']:.4f}, worse by {worse:.4f}{proven}; at most {most:g} is allowed."
    )


def _missed(row: Row, least: float) -> str | None:
    called, lower = _called(row), row.get("higher_is_better") is False
    if row["tuned"] <= least + 1e-9 if lower else row["tuned"] >= least - 1e-9:
        return None
    return f"{called}: the tuned model has {row['tuned']:.4f}; at {'most' if lower else 'least'} {least:g} is required."


def describe_gate(asked: object) -> str:
    """What a gate asks for, as it stands in comparison.json or a recipe.

    >>> describe_gate({"max_regression": {"ifeval": 0.02, "default": 0.05}, "require": {"gsm8k": 0.4}, "judge_by": "evidence"})
    'worse by at most 0.02 on ifeval, 0.05 on each other task; gsm8k must reach 0.4; a drop counts where its verdict is REGRESSED'
    """
    if not isinstance(asked, dict):
        return "nothing" if asked is None else str(asked)
    drops, least = ({} if not isinstance(asked.get(key), dict) else asked[key] for key in ("max_regression", "require"))
    others = "each other task" if len(drops) > 1 else "each task"
    told = [f"{most} on {others if name == DEFAULT else name}" for name, most in drops.items()]
    parts = [f"worse by at most {', '.join(told)}"] if told else []
    parts += [f"{name} must reach {score}" for name, score in least.items()]
    if told:
        by_evidence = asked.get("judge_by") == "evidence"
        parts.append("a drop counts where its verdict is REGRESSED" if by_evidence else "judged by the scores alone")
    return "; ".join(parts) or "nothing"


def judge_gate(gate: Gate | None, comparison: dict[str, Any]) -> dict[str, Any] | None:
    """Hold a comparison against a gate.

    Args:
        gate: The recipe's eval.gate.
        comparison: As in comparison.json.

    Returns:
        `asked`, `passed`, and a sentence for each of `failures`; None without a gate.
    """
    if gate is None:
        return None
    failures: list[str | None] = [
        f"{task} was not measured: {reason}" for task, reason in comparison["not_measured"].items()
    ]
    regressions = dict(gate.max_regression)
    default = regressions.pop(DEFAULT, None)
    if default is not None:
        named = {name.partition("/")[0] for name in regressions}
        rows = [row for row in comparison["metrics"] if row["decides"] and row["task"] not in named]
        failures += [_regressed(row, default, gate.judge_by) for row in rows]
    for name, most in regressions.items():
        row = _find(name, comparison)
        failures.append(row if isinstance(row, str) else _regressed(row, most, gate.judge_by))
    for name, least in gate.require.items():
        row = _find(name, comparison)
        failures.append(row if isinstance(row, str) else _missed(row, least))
    told = list(dict.fromkeys(failure for failure in failures if failure is not None))
    return {"asked": gate.model_dump(mode="json"), "passed": not told and comparison["complete"], "failures": told}
