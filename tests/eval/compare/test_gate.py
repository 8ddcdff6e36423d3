from typing import Any

import pytest

from eval.compare.gate import judge_gate
from eval.tasks.suites import check_gate
from sft.errors import EvaluationError
from sft.recipe.eval import Gate


def row(task: str, base: float, tuned: float, verdict: str = "NO SIGNIFICANT CHANGE", **more: Any) -> dict[str, Any]:
    return {
        "task": task,
        "metric": "acc",
        "filter": "none",
        "decides": True,
        "higher_is_better": True,
        "base": base,
        "tuned": tuned,
        "difference": tuned - base,
        "verdict": verdict,
    } | more


def judged(gate: dict[str, Any], *rows: dict[str, Any], **more: object) -> dict[str, Any]:
    comparison = {"complete": True, "not_measured": {}, "metrics": list(rows), "overall": None} | more
    outcome = judge_gate(Gate.model_validate(gate), comparison)
    assert outcome is not None
    return outcome


def test_a_drop_may_be_as_large_as_allowed_and_no_larger() -> None:
    # 0.62 - 0.60 is 0.020000000000000018.
    assert judged({"max_regression": {"arc": 0.02}}, row("arc", 0.62, 0.60))["passed"]
    failed = judged({"max_regression": {"arc": 0.02}}, row("arc", 0.62, 0.59))
    assert failed["failures"] == ["arc (acc): 0.6200 -> 0.5900, worse by 0.0300; at most 0.02 is allowed."]
    assert not failed["passed"]
    assert failed["asked"] == {"max_regression": {"arc": 0.02}, "require": {}, "judge_by": "score"}


def test_for_a_metric_that_should_be_low_a_rise_is_the_drop() -> None:
    rose = row("wiki", 9.0, 9.5, higher_is_better=False)
    assert not judged({"max_regression": {"wiki": 0.1}}, rose)["passed"]
    assert not judged({"require": {"wiki": 9}}, rose)["passed"]
    assert judged({"max_regression": {"wiki": 0}}, row("wiki", 9.5, 9.0, higher_is_better=False))["passed"]


def test_default_is_for_each_task_that_is_not_named() -> None:
    rows = row("ifeval", 0.5, 0.4), row("arc", 0.5, 0.4), row("part", 0.5, 0.1, decides=False)
    failures = judged({"max_regression": {"ifeval": 0.2, "default": 0.05}}, *rows)["failures"]
    assert [failure.split()[0] for failure in failures] == ["arc"]


@pytest.mark.parametrize(
    ("verdict", "passed"),
    [
        ("REGRESSED", False),
        ("NO SIGNIFICANT CHANGE", True),
        ("TOO FEW DOCUMENTS", False),
    ],
)
def test_by_evidence_only_what_is_shown_fails_and_what_cannot_be_shown(verdict: str, passed: bool) -> None:
    gate = {"max_regression": {"default": 0.0}, "judge_by": "evidence"}
    assert judged(gate, row("arc", 0.5, 0.4, verdict))["passed"] is passed


def test_a_metric_that_does_not_decide_can_be_named_and_is_judged_alone() -> None:
    strict = row("gsm8k", 0.5, 0.5, metric="exact_match", filter="strict")
    alone = {"verdict": None, "decides": False, "interval_95": [-0.4, -0.2], "too_few": False}
    flexible = row("gsm8k", 0.6, 0.3, metric="exact_match", filter="flexible", p_value=0.01, **alone)
    gate: dict[str, Any] = {"max_regression": {"gsm8k/exact_match,flexible": 0.1}}
    assert "worse by 0.3" in judged(gate, strict, flexible)["failures"][0]
    assert not judged(gate | {"judge_by": "evidence"}, strict, flexible)["passed"]
    assert judged(gate | {"judge_by": "evidence"}, strict, flexible | {"p_value": 0.2})["passed"]
    failed = judged({"require": {"gsm8k/exact_mach": 0.1}}, strict, flexible)
    assert "gsm8k has no metric exact_mach. It has: exact_match," in failed["failures"][0]


def test_the_mean_over_tasks_can_be_gated_where_there_is_one() -> None:
    overall = {"base": 0.5, "tuned": 0.45, "difference": -0.05, "verdict": "NO SIGNIFICANT CHANGE"}
    gate = {"max_regression": {"overall": 0.02}}
    assert judged(gate, overall=overall)["failures"] == [
        "overall: 0.5000 -> 0.4500, worse by 0.0500; at most 0.02 is allowed."
    ]
    assert "there is no mean over tasks" in judged(gate)["failures"][0]


def test_what_is_incomplete_never_passes() -> None:
    lost = {"complete": False, "not_measured": {"gsm8k": "no network"}}
    outcome = judged({"max_regression": {"default": 0.5}}, row("arc", 0.5, 0.5), **lost)
    assert not outcome["passed"]
    assert outcome["failures"] == ["gsm8k was not measured: no network"]
    assert judged({"require": {"gsm8k": 0.1}})["failures"] == ["gsm8k has no score."]


def test_a_gate_over_what_is_not_measured_is_refused() -> None:
    with pytest.raises(EvaluationError) as error:
        check_gate(Gate(max_regression={"ifevall": 0.1, "default": 0.1}, require={"arc": 1}), ["ifeval", "mine"], ())
    assert "`ifevall` is not measured; did you mean `ifeval`? Measured: ifeval, mine." in str(error.value)
    assert "`arc` is not measured. Measured: ifeval, mine." in str(error.value)
    check_gate(Gate(max_regression={"ifeval/acc": 0.1, "overall": 0.1}), ["ifeval"], ())
