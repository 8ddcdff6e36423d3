import math
from typing import Any

import numpy as np
import pytest

from eval.compare.comparison import compare
from eval.compare.pairs import pair, pair_task
from eval.compare.results import leaves
from eval.compare.statistics import holm

Rows = list[dict[str, Any]]


def sampled(values: list[object], metric: str = "acc", filter_name: str = "none") -> Rows:
    return [
        {"doc_id": n, "filter": filter_name, metric: value, "doc_hash": str(n), "prompt_hash": str(n)}
        for n, value in enumerate(values)
    ]


def results(scores: dict[str, dict[str, float]], subtasks: dict[str, list[str]] | None = None) -> dict[str, Any]:
    metrics = {key.split(",")[0] for task in scores.values() for key in task if "," in key}
    return {
        "settings_hash": "a",
        "settings": {},
        "results": scores,
        "group_subtasks": subtasks or {},
        "higher_is_better": {task: dict.fromkeys(metrics, True) for task in scores},
        "n-samples": {},
        "n-shot": {},
        "versions": {},
        "failed": {},
        "prompts_cut": [],
        "measured_model": {"model": "m", "revision": None},
        "config": {"model_dtype": "torch.float32"},
    }


def two_tasks(first: list[int], second: list[int], by_size: bool) -> tuple[dict[str, Any], dict[str, Rows]]:
    """A group of two tasks as lm_eval reports it."""
    means = [float(np.mean(values)) for values in (first, second)]
    score = float(np.mean([*first, *second])) if by_size else float(np.mean(means))
    scores = {
        "both": {"acc,none": score, "sample_len": len(first) + len(second)},
        "one": {"acc,none": means[0], "sample_len": len(first)},
        "two": {"acc,none": means[1], "sample_len": len(second)},
    }
    return results(scores, {"both": ["one", "two"]}), {"one": sampled([*first]), "two": sampled([*second])}


def test_a_prompt_with_several_values_counts_by_how_many_it_has() -> None:
    # IFEval: three instructions followed of four, over two prompts.
    base, tuned = sampled([[True, False, True], [True]]), sampled([[True, True, True], [False]])
    pairs = pair(base, tuned, "acc,none", ({"acc,none": 0.75}, {"acc,none": 0.75}))
    assert pairs is not None
    assert pairs.score(pairs.base) == pairs.score(pairs.tuned) == 0.75
    assert pairs.sample().values.tolist() == [0.5, -0.5]
    assert not pairs.right_or_wrong


def test_a_score_that_is_no_mean_of_its_documents_has_no_pairs() -> None:
    rows = sampled([0.0, 1.0])
    assert pair(rows, rows, "acc,none", ({"acc,none": 0.5}, {"acc,none": 0.5})) is not None
    assert pair(rows, rows, "acc,none", ({"acc,none": 0.5}, {"acc,none": 0.6})) is None
    assert pair(rows, rows[:1], "acc,none", ({"acc,none": 0.5}, {"acc,none": 0.0})) is None
    assert pair(sampled([None, 1.0]), rows, "acc,none", ({"acc,none": 1.0}, {"acc,none": 0.5})) is None


@pytest.mark.parametrize(("by_size", "weights"), [(True, (0.8, 0.2)), (False, (0.5, 0.5))])
def test_a_group_is_paired_with_the_weights_that_give_its_score(by_size: bool, weights: tuple[float, float]) -> None:
    (base, base_samples), (tuned, tuned_samples) = (
        two_tasks([0, 1, 0, 1] * 4, second, by_size) for second in ([0, 0, 0, 1], [0, 1, 1, 1])
    )
    paired = pair_task("both", "acc,none", base, tuned, (base_samples, tuned_samples))
    assert paired is not None
    assert paired.weights == pytest.approx(weights)
    assert leaves(tuned, "both") == ["one", "two"]


@pytest.mark.parametrize("by_size", [True, False])
def test_a_group_decides_and_its_parts_do_not(by_size: bool) -> None:
    (base, base_samples), (tuned, tuned_samples) = (
        two_tasks([0, 0, 1, 1] * 20, second, by_size) for second in ([0, 0, 0, 1] * 10, [1, 1, 1, 1] * 10)
    )
    compared = compare(base, tuned, base_samples, tuned_samples)
    rows = {row["task"]: row for row in compared["metrics"]}
    assert [row["decides"] for row in rows.values()] == [True, False, False]
    assert rows["both"]["test"] == "paired t"
    assert rows["both"]["verdict"] == "IMPROVED"
    assert rows["both"]["subtasks"] == ["one", "two"]
    # One family, in which the two parts together weigh a quarter of what decides.
    weights = {"both": 1.0, "one": 0.125, "two": 0.125}
    adjusted = holm([row["p_value"] for row in rows.values()], list(weights.values()))
    assert [row["p_adjusted"] for row in rows.values()] == adjusted
    assert rows["both"]["p_adjusted"] <= 1.25 * rows["both"]["p_value"]
    assert compared["overall"] is None  # of one task


def test_a_group_without_a_score_leaves_the_decision_to_its_parts() -> None:
    (base, base_samples), (tuned, tuned_samples) = (
        two_tasks([0, 1] * 30, second, True) for second in ([0, 1] * 30, [1, 1] * 30)
    )
    for one in (base, tuned):
        one["results"]["both"] = {"alias": "both"}
    compared = compare(base, tuned, base_samples, tuned_samples)
    assert [(row["task"], row["decides"]) for row in compared["metrics"]] == [("one", True), ("two", True)]
    overall = compared["overall"]
    assert overall["tasks"] == ["one", "two"]
    assert (overall["base"], overall["tuned"], overall["difference"]) == (0.5, 0.75, 0.25)
    assert overall["documents"] == 120
    assert overall["verdict"] == "IMPROVED"


def test_the_note_names_the_task_that_is_judged_and_those_with_too_few_documents() -> None:
    (base, base_samples), (tuned, tuned_samples) = (two_tasks([right] * 20, [right] * 3, True) for right in (0, 1))
    for one in (base, tuned):
        one["results"]["both"] = {"alias": "both"}
    compared = compare(base, tuned, base_samples, tuned_samples)
    assert compared["note"].startswith("One metric is judged and needs no correction")
    assert compared["note"].endswith("Too few documents for a verdict: two.")
    assert compared["overall"]["verdict"] == "TOO FEW DOCUMENTS"


def test_a_verdict_among_many_takes_more_than_one_alone() -> None:
    def side(gained: int) -> tuple[dict[str, Any], dict[str, Rows]]:
        values = {"arc": [1] * gained + [0] * (100 - gained)} | {f"task{n}": [0, 1] * 50 for n in range(9)}
        return results({task: {"acc,none": float(np.mean(one))} for task, one in values.items()}), {
            task: sampled([*one]) for task, one in values.items()
        }

    (base, base_samples), (tuned, tuned_samples) = side(0), side(7)
    for one in (base, tuned):
        for score in one["results"].values():
            score["sample_len"] = 100
    alone = compare(
        base | {"results": {"arc": base["results"]["arc"]}},
        tuned | {"results": {"arc": tuned["results"]["arc"]}},
        {"arc": base_samples["arc"]},
        {"arc": tuned_samples["arc"]},
    )
    assert alone["metrics"][0]["verdict"] == "IMPROVED"
    among = compare(base, tuned, base_samples, tuned_samples)
    row = among["metrics"][0]
    assert row["p_adjusted"] == pytest.approx(11 * row["p_value"])  # with the mean over tasks
    assert among["overall"]["p_adjusted"] >= among["overall"]["p_value"]
    assert row["verdict"] == "NO SIGNIFICANT CHANGE"
    assert row["interval_95"][0] > 0
    assert "Significant alone, but not among so many verdicts: arc" in among["note"]


def rolling(log_likelihoods: list[float], words: list[int]) -> tuple[dict[str, Any], dict[str, Rows]]:
    """What lm_eval leaves of a perplexity over documents of so many words."""
    total, count = sum(log_likelihoods), sum(words)
    scores = {"word_perplexity,none": math.exp(-total / count), "bits_per_byte,none": -total / count / math.log(2)}
    found = results({"wiki": scores | {f"{key.replace(',', '_stderr,')}": "N/A" for key in scores}})
    found["higher_is_better"]["wiki"] = {"word_perplexity": False, "bits_per_byte": False}
    values = [[value, length] for value, length in zip(log_likelihoods, words, strict=True)]
    return found, {
        "wiki": [row | {"bits_per_byte": row["word_perplexity"]} for row in sampled([*values], "word_perplexity")]
    }


def test_a_perplexity_is_paired_by_its_log_likelihoods() -> None:
    generator, words = np.random.default_rng(0), np.random.default_rng(1).integers(50, 4000, 60).tolist()
    before = [-length * generator.uniform(2, 6) for length in words]
    after = [value + length * generator.uniform(0.01, 0.1) for value, length in zip(before, words, strict=True)]
    base, tuned = rolling(before, words), rolling(after, words)
    rows = {row["metric"]: row for row in compare(base[0], tuned[0], base[1], tuned[1])["metrics"]}
    assert {row["verdict"] for row in rows.values()} == {"IMPROVED"}
    row = rows["word_perplexity"]
    low, high = row["interval_95"]
    assert low < row["difference"] < high < 0
    assert row["base"] + low > 0
    ratio = row["ratio_interval_95"]
    assert ratio[0] < row["tuned"] / row["base"] < ratio[1] < 1
    assert [row["base"] * (end - 1) for end in ratio] == [low, high]
    # lambada: one number a document.
    short = [-2.0, -0.5]
    pairs = pair(*[sampled([*short], "ppl")] * 2, "ppl,none", ({"ppl,none": math.exp(1.25)},) * 2)
    assert pairs is not None
    assert pairs.perplexity


def test_values_that_are_not_a_number_are_left_out_where_the_score_leaves_them_out() -> None:
    rows = sampled([0.5, math.nan, 1.0])
    assert pair(rows, rows, "acc,none", ({"acc,none": math.nan},) * 2) is None
    pairs = pair(rows, rows, "acc,none", ({"acc,none": 0.75},) * 2)
    assert pairs is not None
    assert pairs.documents == (0, 2)


@pytest.mark.parametrize(
    ("texts", "passages"),
    [
        ([f"{n // 5} " + "a passage " * 20 for n in range(100)], 20),
        ([f"{n} " + "a passage " * 20 for n in range(100)], None),
        (["an instruction " * 20 for _ in range(100)], None),
        ([f"{max(n - 85, 0)} " + "an instruction " * 20 for n in range(100)], None),
        ([f"{n % 5} " + "an instruction " * 20 for n in range(100)], None),
        (["short"] * 50 + [""] * 50, None),
        ([f"{n // 5} " + "a passage " * 20 if n < 50 else "" for n in range(100)], 60),
    ],
)
def test_documents_that_share_a_passage_count_as_one(texts: list[str], passages: int | None) -> None:
    values = np.repeat(np.random.default_rng(0).integers(0, 2, 20), 5)
    rows = [
        row | {"doc": {"passage": text, "id": row["doc_id"]}}
        for row, text in zip(sampled([*values.tolist()]), texts, strict=True)
    ]
    scores = results({"arc": {"acc,none": float(values.mean()), "sample_len": 100}})
    (row,) = compare(scores, scores, {"arc": rows}, {"arc": rows})["metrics"]
    assert row["passages"] == passages


def test_how_an_answer_is_written_is_no_verdict_on_whether_it_is_right() -> None:
    # A chat model that writes the right numbers and drops the `####` before them.
    def side(strict: int, flexible: int) -> tuple[dict[str, Any], dict[str, Rows]]:
        scores = {
            "exact_match,strict-match": strict / 100,
            "exact_match,flexible-extract": flexible / 100,
            "sample_len": 100,
        }
        rows = [
            row
            for name, right in (("strict-match", strict), ("flexible-extract", flexible))
            for row in sampled([1] * right + [0] * (100 - right), "exact_match", name)
        ]
        return results({"gsm8k": scores}), {"gsm8k": rows}

    base, tuned = side(60, 62), side(5, 64)
    compared = compare(base[0], tuned[0], base[1], tuned[1])
    rows = {row["filter"]: (row["decides"], row["verdict"]) for row in compared["metrics"]}
    assert rows == {"strict-match": (False, "REGRESSED"), "flexible-extract": (True, "NO SIGNIFICANT CHANGE")}
    assert "gsm8k: REGRESSED by strict-match, NO SIGNIFICANT CHANGE by flexible-extract" in compared["note"]
