"""Scores are paired by document wherever they can be computed from the documents."""

import math
from typing import Any

import numpy as np
import pytest

from eval.compare.comparison import compare
from eval.compare.pairs import pair, pair_task
from tests.eval.compare.lm_eval_files import Rows, results, sampled

Side = tuple[dict[str, Any], dict[str, Rows]]


def two_tasks(first: list[int], second: list[int], by_size: bool) -> Side:
    """A group of two tasks as lm_eval reports it."""
    means = [float(np.mean(values)) for values in (first, second)]
    scores = {
        "both": {"acc,none": float(np.mean([*first, *second] if by_size else means)), "sample_len": 0},
        "one": {"acc,none": means[0], "sample_len": len(first)},
        "two": {"acc,none": means[1], "sample_len": len(second)},
    }
    return results(scores, group_subtasks={"both": ["one", "two"]}), {
        "one": sampled([*first]),
        "two": sampled([*second]),
    }


def compared(base: Side, tuned: Side) -> dict[str, Any]:
    return compare(base[0], tuned[0], base[1], tuned[1]).record


def test_a_prompt_with_several_values_counts_by_how_many_it_has() -> None:
    # IFEval: three instructions followed of four, over two prompts.
    pairs = pair(sampled([[True, False, True], [True]]), sampled([[True, True, True], [False]]), "acc,none", [0.75] * 2)
    assert pairs is not None
    assert pairs.scores().tolist() == [0.75, 0.75]
    assert pairs.sample().values.tolist() == [0.5, -0.5]
    assert not pairs.right_or_wrong


def test_a_score_that_its_documents_do_not_give_has_no_pairs() -> None:
    rows = sampled([0.0, 1.0])
    assert pair(rows, rows, "acc,none", [0.5, 0.5]) is not None
    assert pair(rows, rows, "acc,none", [0.5, 0.6]) is None
    assert pair(rows, rows[:1], "acc,none", [0.5, 0.0]) is None
    assert pair(sampled([None, 1.0]), rows, "acc,none", [1.0, 0.5]) is None


def test_values_that_are_not_a_number_are_left_out_where_the_score_leaves_them_out() -> None:
    rows = sampled([0.5, math.nan, 1.0])
    assert pair(rows, rows, "acc,none", [math.nan] * 2) is None
    pairs = pair(rows, rows, "acc,none", [0.75] * 2)
    assert pairs is not None
    assert pairs.documents == (0, 2)


@pytest.mark.parametrize(("by_size", "weights"), [(True, (0.8, 0.2)), (False, (0.5, 0.5))])
def test_a_group_is_paired_with_the_weights_that_give_its_score(by_size: bool, weights: tuple[float, float]) -> None:
    base, tuned = (two_tasks([0, 1, 0, 1] * 4, second, by_size) for second in ([0, 0, 0, 1], [0, 1, 1, 1]))
    paired = pair_task("both", "acc,none", base[0], tuned[0], (base[1], tuned[1]))
    assert paired is not None
    assert paired.weights == pytest.approx(weights)
    assert len(paired.samples) == (1 if by_size else 2)


@pytest.mark.parametrize("by_size", [True, False])
def test_a_group_decides_and_its_parts_do_not(by_size: bool) -> None:
    base, tuned = (two_tasks([0, 0, 1, 1] * 20, [*second] * 10, by_size) for second in ([0, 0, 0, 1], [1, 1, 1, 1]))
    record = compared(base, tuned)
    rows = {row["task"]: row for row in record["metrics"]}
    assert [row["verdict"] for row in rows.values()] == ["IMPROVED", None, None]
    assert rows["both"]["test"] == "paired t"
    assert rows["both"]["p_adjusted"] == rows["both"]["p_value"]
    assert record["overall"] is None  # of one task


def test_a_group_without_a_score_leaves_the_decision_to_its_parts() -> None:
    sides = [two_tasks([0, 1] * 30, second, True) for second in ([0, 1] * 30, [1, 1] * 30)]
    for found, _ in sides:
        found["results"]["both"] = {"alias": "both"}
    record = compared(*sides)
    assert [(row["task"], row["decides"]) for row in record["metrics"]] == [("one", True), ("two", True)]
    overall = record["overall"]
    assert overall["tasks"] == ["one", "two"]
    assert (overall["base"], overall["tuned"], overall["difference"]) == (0.5, 0.75, 0.25)
    assert (overall["documents"], overall["verdict"]) == (120, "IMPROVED")


def rolling(log_likelihoods: list[float], words: list[int]) -> Side:
    """What lm_eval leaves of a perplexity over documents of so many words."""
    total, count = sum(log_likelihoods), sum(words)
    scores = {"word_perplexity,none": math.exp(-total / count), "bits_per_byte,none": -total / count / math.log(2)}
    values = [[value, length] for value, length in zip(log_likelihoods, words, strict=True)]
    rows = [row | {"bits_per_byte": row["word_perplexity"]} for row in sampled([*values], "word_perplexity")]
    return results({"wiki": scores}, higher=False), {"wiki": rows}


def test_a_perplexity_is_paired_by_its_log_likelihoods() -> None:
    generator, words = np.random.default_rng(0), np.random.default_rng(1).integers(50, 4000, 60).tolist()
    before = [-length * generator.uniform(2, 6) for length in words]
    after = [value + length * generator.uniform(0.01, 0.1) for value, length in zip(before, words, strict=True)]
    rows = {row["metric"]: row for row in compared(rolling(before, words), rolling(after, words))["metrics"]}
    assert {row["test"] for row in rows.values()} == {"paired t"}
    row = rows["word_perplexity"]
    assert row["verdict"] == "IMPROVED"
    low, high = row["interval_95"]
    assert low < row["difference"] < high < 0 < row["base"] + low
    # lambada: one number a document.
    pairs = pair(*[sampled([-2.0, -0.5], "ppl")] * 2, "ppl,none", [math.exp(1.25)] * 2)
    assert pairs is not None
    assert pairs.perplexity


@pytest.mark.parametrize(
    ("texts", "passages"),
    [
        ([f"{n // 5} " + "a passage " * 20 for n in range(100)], 20),
        ([f"{n} " + "a passage " * 20 for n in range(100)], None),
        ([f"{n % 5} " + "an instruction " * 20 for n in range(100)], None),
        (["short"] * 50 + [""] * 50, None),
        ([f"{n // 5} " + "a passage " * 20 if n < 50 else "" for n in range(100)], 60),
    ],
    ids=["passages of five questions", "a passage each", "instructions", "short texts", "half have passages"],
)
def test_documents_that_share_a_passage_count_as_one(texts: list[str], passages: int | None) -> None:
    values = np.repeat(np.random.default_rng(0).integers(0, 2, 20), 5)
    pairs = zip(sampled([*values.tolist()]), texts, strict=True)
    rows = [row | {"doc": {"passage": text, "id": row["doc_id"]}} for row, text in pairs]
    side = results({"arc": {"acc,none": float(values.mean()), "sample_len": 100}}), {"arc": rows}
    paired = pair_task("arc", "acc,none", side[0], side[0], (side[1], side[1]))
    assert paired is not None
    assert len(paired.samples[0].values) == (passages or 100)
