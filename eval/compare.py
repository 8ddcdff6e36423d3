"""Base against tuned: what changed, and whether that is more than chance. Imports no torch and no lm_eval."""

from __future__ import annotations

from math import isclose, sqrt
from statistics import fmean, stdev
from typing import Any

from rich.table import Table

from eval.alike import check_alike

Results = dict[str, Any]
Samples = dict[str, list[dict[str, Any]]]

# 95 % of a normal distribution lie within this many standard errors.
Z95 = 1.959964
# Below this the normal distribution says nothing: two documents that both moved by 1 have a standard error of 0.
FEWEST_DOCUMENTS = 10


def _per_document(samples: list[dict[str, Any]], metric: str, filter_name: str, score: float) -> dict[int, float]:
    """A metric per document, where the score is its mean; a perplexity, say, is not. Empty where it is not."""
    found = {one["doc_id"]: one.get(metric) for one in samples if one["filter"] == filter_name}
    values = {document: float(value) for document, value in found.items() if isinstance(value, (bool, int, float))}
    mean_is_score = values and len(values) == len(found) and isclose(fmean(values.values()), score, abs_tol=1e-9)
    return values if mean_is_score else {}


def _number(value: object) -> float | None:
    """A score; lm_eval writes "N/A" where it has none."""
    return float(value) if isinstance(value, (int, float)) else None


def _difference_stderr(
    base: dict[int, float], tuned: dict[int, float], stderrs: tuple[float | None, float | None]
) -> tuple[float | None, str | None]:
    """The standard error of tuned - base, and how it was worked out."""
    if base.keys() == tuned.keys() and len(base) > 1:
        return stdev(tuned[document] - base[document] for document in base) / sqrt(len(base)), "paired"
    if stderrs[0] is not None and stderrs[1] is not None:
        return sqrt(stderrs[0] ** 2 + stderrs[1] ** 2), "independent"
    return None, None


def _verdict(interval: list[float] | None, higher_is_better: bool | None, documents: int) -> str:
    """What may be said of a difference.

    >>> _verdict([0.1, 0.3], True, 200), _verdict([0.1, 0.3], False, 200), _verdict([-0.1, 0.3], True, 200)
    ('better', 'worse', 'no clear difference')
    """
    if interval is None or higher_is_better is None:
        return "unknown"
    if documents < FEWEST_DOCUMENTS:
        return "too few documents"
    if interval[0] <= 0 <= interval[1]:
        return "no clear difference"
    return "better" if (interval[0] > 0) == higher_is_better else "worse"


def metric_keys(scores: dict[str, Any]) -> list[str]:
    """The metrics among a task's results, as lm_eval spells them: metric,filter.

    >>> metric_keys({"alias": "arc", "sample_len": 9, "acc,none": 0.5, "acc_stderr,none": 0.1})
    ['acc,none']
    """
    return [key for key in scores if "," in key and not key.partition(",")[0].endswith("_stderr")]


def _compare_metric(
    task: str, key: str, base: Results, tuned: Results, samples: tuple[list[dict[str, Any]], list[dict[str, Any]]]
) -> dict[str, Any] | None:
    metric, _, filter_name = key.partition(",")
    scores = [one["results"][task] for one in (base, tuned)]
    base_score, tuned_score = (_number(one.get(key)) for one in scores)
    if base_score is None or tuned_score is None:
        return None
    base_stderr, tuned_stderr = (_number(one.get(f"{metric}_stderr,{filter_name}")) for one in scores)
    stderr, method = _difference_stderr(
        _per_document(samples[0], metric, filter_name, base_score),
        _per_document(samples[1], metric, filter_name, tuned_score),
        (base_stderr, tuned_stderr),
    )
    difference = tuned_score - base_score
    interval = None if stderr is None else [difference - Z95 * stderr, difference + Z95 * stderr]
    higher_is_better = tuned["higher_is_better"].get(task, {}).get(metric)
    documents = scores[1].get("sample_len") or tuned["n-samples"].get(task, {}).get("effective", 0)
    return {
        "task": task,
        "metric": metric,
        "filter": filter_name,
        "higher_is_better": higher_is_better,
        "documents": documents,
        "base": base_score,
        "base_stderr": base_stderr,
        "tuned": tuned_score,
        "tuned_stderr": tuned_stderr,
        "difference": difference,
        "difference_stderr": stderr,
        "stderr_method": method,
        "interval_95": interval,
        "verdict": _verdict(interval, higher_is_better, documents),
    }


def compare(base: Results, tuned: Results, base_samples: Samples, tuned_samples: Samples) -> dict[str, Any]:
    """Compare two evaluations that were made under the same settings.

    Args:
        base: results.json of the base model.
        tuned: results.json of the tuned model.
        base_samples: Per task, the lines of its samples file.
        tuned_samples: The same of the tuned model.

    Returns:
        What comparison.json holds. `metrics` has an entry per task and metric: its difference is tuned - base; the
        standard error of that is "paired", of the differences per document, where the score is a mean over documents,
        and else "independent", from the standard errors of the two.

    Raises:
        EvaluationError: The settings, the documents or the prompts were not the same.
    """
    treatment = check_alike(base, tuned, base_samples, tuned_samples)
    metrics = [
        _compare_metric(task, key, base, tuned, (base_samples.get(task, []), tuned_samples.get(task, [])))
        for task, scores in tuned["results"].items()
        if task in base["results"]
        for key in metric_keys(scores)
    ]
    not_measured = base["failed"] | tuned["failed"]
    return {
        "complete": not not_measured,
        "not_measured": not_measured,
        "settings_hash": tuned["settings_hash"],
        "settings": tuned["settings"],
        "base_treatment": treatment,
        "base": base["measured_model"],
        "tuned": tuned["measured_model"],
        "versions": tuned["versions"],
        "num_fewshot": tuned["n-shot"],
        "prompts_cut": sorted({*base["prompts_cut"], *tuned["prompts_cut"]}),
        "metrics": [metric for metric in metrics if metric is not None],
    }


def _metric_name(metric: str, filter_name: str, higher_is_better: bool | None) -> str:
    name = metric if filter_name == "none" else f"{metric}, {filter_name}"
    return f"{name} (lower is better)" if higher_is_better is False else name


def _table(title: str, columns: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        words = column in ("task", "metric", "verdict")
        table.add_column(column, justify="left" if words else "right", overflow="fold", no_wrap=not words)
    return table


def comparison_table(comparison: dict[str, Any]) -> Table:
    """The comparison for a terminal."""
    title = "Base and tuned" + ("" if comparison["complete"] else " (incomplete)")
    table = _table(title, ("task", "metric", "base", "tuned", "difference ± 95 %", "verdict"))
    for row in comparison["metrics"]:
        stderr = row["difference_stderr"]
        within = "" if stderr is None else f" ± {Z95 * stderr:.3f}"
        table.add_row(
            row["task"],
            _metric_name(row["metric"], row["filter"], row["higher_is_better"]),
            f"{row['base']:.3f}",
            f"{row['tuned']:.3f}",
            f"{row['difference']:+.3f}{within}",
            row["verdict"],
        )
    return table


def scores_table(results: Results) -> Table:
    """One model's scores for a terminal."""
    table = _table(str(results["measured_model"]["model"]), ("task", "metric", "documents", "score"))
    for task, scores in results["results"].items():
        for key in metric_keys(scores):
            metric, _, filter_name = key.partition(",")
            score, stderr = _number(scores[key]), _number(scores.get(f"{metric}_stderr,{filter_name}"))
            if score is None:
                continue
            higher_is_better = results["higher_is_better"].get(task, {}).get(metric)
            shown = f"{score:.3f}" if stderr is None else f"{score:.3f} ± {stderr:.3f}"
            table.add_row(
                task, _metric_name(metric, filter_name, higher_is_better), str(scores.get("sample_len", "")), shown
            )
    return table
