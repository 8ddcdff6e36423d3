"""What comparison.json and the terminal say of two evaluations."""

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
from tests.eval.compare.lm_eval_files import results, sampled, scored


def record(base: dict[str, Any], tuned: dict[str, Any], *samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare results of `arc`."""
    return compare(base, tuned, *({"arc": one} for one in samples or ([], []))).record


def test_a_difference_is_paired_by_document() -> None:
    (row,) = record(scored(0.25, n=4), scored(0.75, n=4), sampled([0, 0, 0, 1]), sampled([1, 1, 0, 1]))["metrics"]
    assert (row["base"], row["tuned"], row["difference"]) == (0.25, 0.75, 0.5)
    # Differences 1, 1, 0, 0, and one more of 1 and of -1: variance 2/3, over 6.
    assert isclose(row["difference_stderr"], 1 / 3)
    assert (row["test"], row["documents"]) == ("paired t", 4)


def test_a_score_that_is_no_mean_is_not_paired() -> None:
    base, tuned = scored(12.0, "f1", 3.0), scored(9.0, "f1", 4.0)
    (row,) = record(base, tuned, sampled([-1.0, -2.0], "f1"), sampled([-3.0, -1.0], "f1"))["metrics"]
    assert (row["test"], row["difference_stderr"]) == ("independent", 5.0)


@pytest.mark.parametrize("score", [math.nan, math.inf])
def test_a_perplexity_that_is_not_finite_is_no_improvement(score: float) -> None:
    found = record(scored(3.0, "ppl", higher=False), scored(score, "ppl", higher=False))
    (row,) = found["metrics"]
    assert (row["verdict"], row["p_value"], row["interval_95"]) == ("UNKNOWN", None, None)
    judged = judge_gate(Gate(max_regression={"arc": 0.1}, judge_by="evidence"), found)
    assert judged is not None
    assert not judged["passed"]
    assert f"ppl is not finite (base 3.0, tuned {score})" in found["note"]
    assert json.loads(json.dumps(finite(found), allow_nan=False))["metrics"][0]["tuned"] is None


@pytest.mark.parametrize(
    ("stderr", "higher", "reason"), [("N/A", True, "no standard error"), (0.1, None, "higher_is_better")]
)
def test_what_cannot_be_judged_is_said_with_the_reason(stderr: object, higher: bool | None, reason: str) -> None:
    found = record(*(scored(score, stderr=stderr, higher=higher) for score in (0.5, 0.6)))
    assert found["metrics"][0]["verdict"] == "UNKNOWN"
    assert reason in found["note"]


@pytest.mark.parametrize(
    ("higher", "tuned", "n", "verdict"),
    [
        (True, 0.9, 100, "IMPROVED"),
        (False, 0.9, 100, "REGRESSED"),
        (True, 0.55, 100, "NO SIGNIFICANT CHANGE"),
        (True, 0.9, 49, "TOO FEW DOCUMENTS"),
        (None, 0.9, 100, "UNKNOWN"),
    ],
)
def test_a_verdict_needs_more_than_chance(higher: bool | None, tuned: float, n: int, verdict: str) -> None:
    (row,) = record(*(scored(score, stderr=0.05, higher=higher, n=n) for score in (0.5, tuned)))["metrics"]
    assert row["verdict"] == verdict


def test_a_verdict_among_many_takes_more_than_one_alone() -> None:
    def side(gained: int) -> tuple[dict[str, Any], dict[str, Any]]:
        values = {"arc": [1] * gained + [0] * (100 - gained)} | {f"task{n}": [0, 1] * 50 for n in range(9)}
        scores = {task: {"acc,none": float(np.mean(one)), "sample_len": 100} for task, one in values.items()}
        return results(scores), {task: sampled([*one]) for task, one in values.items()}

    base, tuned = side(0), side(7)
    only = [found | {"results": {"arc": found["results"]["arc"]}} for found, _ in (base, tuned)]
    (alone,) = record(*only, base[1]["arc"], tuned[1]["arc"])["metrics"]
    assert alone["verdict"] == "IMPROVED"
    among = compare(base[0], tuned[0], base[1], tuned[1]).record
    row = among["metrics"][0]
    assert row["p_adjusted"] == pytest.approx(11 * row["p_value"])  # with the mean over tasks
    assert row["verdict"] == "NO SIGNIFICANT CHANGE"
    assert row["interval_95"][0] > 0
    assert "Significant alone, but not after the correction: arc" in among["note"]


def test_how_an_answer_is_written_is_no_verdict_on_whether_it_is_right() -> None:
    # A chat model that writes the right numbers and drops the `####` before them.
    def side(strict: int, flexible: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        filters = {"strict-match": strict, "flexible-extract": flexible}
        scores = {f"exact_match,{name}": right / 100 for name, right in filters.items()} | {"sample_len": 100}
        rows = [sampled([1] * right + [0] * (100 - right), "exact_match", name) for name, right in filters.items()]
        return results({"arc": scores}), [row for some in rows for row in some]

    base, tuned = side(60, 62), side(5, 64)
    rows = {row["filter"]: row for row in record(base[0], tuned[0], base[1], tuned[1])["metrics"]}
    assert {name: (row["decides"], row["verdict"]) for name, row in rows.items()} == {
        "strict-match": (False, None),
        "flexible-extract": (True, "NO SIGNIFICANT CHANGE"),
    }
    # Each filter is paired with its own documents.
    assert rows["strict-match"]["interval_95"][1] < 0


def test_what_was_not_measured_makes_the_comparison_incomplete() -> None:
    complete = record(scored(0.5), scored(0.6))
    assert (complete["complete"], complete["not_measured"], complete["settings_hash"]) == (True, {}, "a")
    lost = record(scored(0.5), scored(0.6, failed={"gsm8k": "no network"}))
    assert (lost["complete"], lost["not_measured"]) == (False, {"gsm8k": "no network"})
    text = record(scored(0.5), scored("0.25"))
    assert (text["complete"], text["not_measured"]) == (False, {"arc": "none of its scores is a number"})


def test_the_terminal_shows_the_scores_and_hides_only_what_it_counts() -> None:
    found = record(scored(0.5, n=4), scored(0.6, n=4))
    (row,) = found["metrics"]
    parts = [row | {"task": f"part_{number}", "decides": False, "verdict": None} for number in range(20)]
    found["metrics"] = [row, *parts]
    found["flips"] = {"arc": {"metric": "acc", "gained": 3, "lost": 1}}
    found["contamination"] = {"ngram": 13, "tasks": {"arc": {"documents": 9, "found": 0, "too_short": 2}}}
    lines = comparison_lines(found)
    assert "    0.5000 -> 0.6000  +0.1000 [-0.1772, +0.3772]  TOO FEW DOCUMENTS" in lines
    assert not [line for line in lines if "part_" in line]
    assert lines[-3:] == [
        "20 more metrics, which do not decide, are in comparison.json.",
        "arc: 3 documents gained, 1 lost (acc).",
        "arc: 0 of 9 documents share a 13-gram with the training data (2 are too short to search for).",
    ]
    assert score_lines(scored(3.25, "ppl", "N/A", 4, False)) == [
        "m",
        "arc: ppl (lower is better), 4 documents",
        "    3.2500",
    ]
