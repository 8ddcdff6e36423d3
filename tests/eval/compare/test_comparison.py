import json
import math
from math import isclose
from typing import Any

import numpy as np
import pytest

from eval.compare.comparison import compare
from eval.compare.gate import judge_gate
from eval.compare.results import finite
from eval.compare.tables import comparison_lines, score_lines
from sft.recipe.eval import Gate

HASH = {"settings_hash": "a", "settings": {"limit": 4, "batch_size": 8, "versions": {"lm_eval": "1"}}}


def results(
    score: float, metric: str = "acc", stderr: object = 0.1, higher: bool | None = True, n: int = 4, **more: object
) -> dict[str, Any]:
    return (
        HASH
        | {
            "results": {
                "arc": {"alias": "arc", "sample_len": n, f"{metric},none": score, f"{metric}_stderr,none": stderr}
            },
            "higher_is_better": {"arc": {metric: higher}},
            "n-samples": {"arc": {"original": 100, "effective": n}},
            "n-shot": {"arc": 0},
            "versions": {"arc": 1.0},
            "failed": {},
            "prompts_cut": [],
            "measured_model": {"model": "m", "revision": None},
            "config": {"model_dtype": "torch.float32"},
        }
        | more
    )


def samples(*values: object, metric: str = "acc", filter_name: str = "none") -> dict[str, list[dict[str, Any]]]:
    return {
        "arc": [
            {"doc_id": n, "filter": filter_name, metric: value, "doc_hash": str(n), "prompt_hash": str(n)}
            for n, value in enumerate(values)
        ]
    }


def one(*arguments: dict[str, Any]) -> dict[str, Any]:
    (metric,) = compare(*arguments)["metrics"]
    return dict(metric)


def test_a_difference_is_paired_by_document() -> None:
    row = one(results(0.25), results(0.75), samples(0, 0, 0, 1), samples(1, 1, 0, 1))
    assert (row["base"], row["tuned"], row["difference"]) == (0.25, 0.75, 0.5)
    # Differences 1, 1, 0, 0, and one more of 1 and of -1: variance 2/3, over 6.
    assert row["stderr_method"] == "paired"
    assert isclose(row["difference_stderr"], 1 / 3)
    assert row["test"] == "paired t"
    assert row["documents"] == 4


def test_a_score_that_is_no_mean_is_not_paired() -> None:
    base, tuned = results(12.0, "ppl", 3.0, False), results(9.0, "ppl", 4.0, False)
    row = one(base, tuned, samples(-1.0, -2.0, metric="ppl"), samples(-3.0, -1.0, metric="ppl"))
    assert (row["stderr_method"], row["difference_stderr"], row["higher_is_better"]) == ("independent", 5.0, False)


@pytest.mark.parametrize("score", [math.nan, math.inf])
def test_a_perplexity_that_is_not_finite_is_no_improvement(score: float) -> None:
    base, tuned = (results(value, "ppl", 0.1, False, n=100) for value in (3.0, score))
    row = one(base, tuned, {}, {})
    assert (row["verdict"], row["p_value"], row["interval_95"]) == ("UNKNOWN", None, None)
    gate = Gate(max_regression={"arc": 0.1}, judge_by="evidence")
    told = judge_gate(gate, compare(base, tuned, {}, {}))
    assert told is not None
    assert not told["passed"]
    compared = compare(base, tuned, {}, {})
    assert f"ppl is not finite (base 3.0, tuned {score})" in compared["note"]
    assert json.loads(json.dumps(finite(compared), allow_nan=False))["metrics"][0]["tuned"] is None


@pytest.mark.parametrize(
    ("stderr", "higher", "told"), [("N/A", True, "no standard error"), (0.1, None, "higher_is_better")]
)
def test_what_cannot_be_judged_is_said_with_the_reason(stderr: object, higher: bool | None, told: str) -> None:
    sides = [results(score, stderr=stderr, higher=higher, n=100) for score in (0.5, 0.6)]
    compared = compare(*sides, {}, {})
    (row,) = compared["metrics"]
    assert row["verdict"] == "UNKNOWN"
    assert (row["interval_95"] is None) == (stderr == "N/A")
    assert told in compared["note"]


@pytest.mark.parametrize(
    ("higher", "tuned", "n", "verdict"),
    [
        (True, 0.9, 100, "IMPROVED"),
        (False, 0.9, 100, "REGRESSED"),
        (True, 0.1, 100, "REGRESSED"),
        (False, 0.1, 100, "IMPROVED"),
        (True, 0.55, 100, "NO SIGNIFICANT CHANGE"),
        (True, 0.9, 49, "TOO FEW DOCUMENTS"),
        (None, 0.9, 100, "UNKNOWN"),
    ],
)
def test_a_verdict_needs_more_than_chance(higher: bool | None, tuned: float, n: int, verdict: str) -> None:
    base, better = results(0.5, stderr=0.05, higher=higher, n=n), results(tuned, stderr=0.05, higher=higher, n=n)
    assert one(base, better, {}, {})["verdict"] == verdict


def test_what_was_not_measured_makes_the_comparison_incomplete() -> None:
    complete = compare(results(0.5), results(0.6), {}, {})
    assert (complete["complete"], complete["not_measured"]) == (True, {})
    lost = compare(results(0.5), results(0.6, failed={"gsm8k": "no network"}), {}, {})
    assert (lost["complete"], lost["not_measured"]) == (False, {"gsm8k": "no network"})
    assert lost["settings_hash"] == "a"


def test_a_task_whose_scores_are_no_numbers_is_not_left_out_without_a_word() -> None:
    compared = compare(results(0.5), results("0.25"), samples(0, 0, 1, 1), samples(0, 0, 0, 1))  # type: ignore[arg-type]
    assert not compared["complete"]
    assert compared["not_measured"] == {"arc": "none of its scores is a number"}


def test_a_filter_is_paired_with_its_own_documents() -> None:
    def two_filters(score: float) -> dict[str, Any]:
        both = {"acc,strict": score, "acc_stderr,strict": 0.1, "acc,flexible": 1.0, "acc_stderr,flexible": 0.0}
        return results(0.0, results={"arc": both})

    def two_samples(*strict: int) -> dict[str, list[dict[str, Any]]]:
        flexible = samples(*(1 for _ in strict), filter_name="flexible")["arc"]
        return {"arc": [*samples(*strict, filter_name="strict")["arc"], *flexible]}

    compared = compare(two_filters(0.5), two_filters(1.0), two_samples(0, 1), two_samples(1, 1))
    rows = {row["filter"]: row for row in compared["metrics"]}
    # Differences 1 and 0, or 0 and 0, and one more of 1 and of -1: over 4.
    assert rows["strict"]["difference_stderr"] == pytest.approx(np.std([1, 0, 1, -1], ddof=1) / 2)
    assert rows["flexible"]["difference_stderr"] == pytest.approx(np.std([0, 0, 1, -1], ddof=1) / 2)
    assert {row["stderr_method"] for row in rows.values()} == {"paired"}


def test_the_terminal_shows_the_scores_and_hides_only_what_it_counts() -> None:
    comparison = compare(results(0.5), results(0.6), {}, {})
    (row,) = comparison["metrics"]
    parts = [row | {"task": f"part_{number}", "decides": False} for number in range(20)]
    comparison["metrics"] = [row, *parts, parts[0] | {"task": "worse", "verdict": "REGRESSED"}]
    comparison["flips"] = {"arc": {"metric": "acc", "gained": 3, "lost": 1}}
    comparison["contamination"] = {"ngram": 13, "tasks": {"arc": {"documents": 9, "found": 0, "too_short": 2}}}
    lines = comparison_lines(comparison)
    assert "    0.5000 -> 0.6000  +0.1000 [-0.1772, +0.3772]  TOO FEW DOCUMENTS" in lines
    assert [line for line in lines if "part_" in line or "worse" in line] == ["worse: acc (does not decide)"]
    assert lines[-4:] == [
        "20 more metrics, which do not decide, are in comparison.json.",
        "arc: 3 documents gained, 1 lost (acc).",
        "No document of the tasks shares a 13-gram with the training data.",
        "2 of 9 documents are too short to search for.",
    ]
    assert score_lines(results(3.25, "ppl", "N/A", False)) == [
        "m",
        "arc: ppl (lower is better), 4 documents",
        "    3.2500",
    ]
