"""Compares the base model with the tuned one: what changed, and whether that is more than chance. Imports no torch and no lm_eval.

docs/comparison.md says what each word of the outcome means.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.compare.contamination import check_contamination
from eval.compare.flips import find_flips, write_flips
from eval.compare.gate import judge_gate
from eval.compare.pairs import pair_task
from eval.compare.results import Results, Samples, finite, metric_keys, number, read_samples, top_level
from eval.compare.settings_match import check_settings_match
from eval.compare.statistics import independent, paired
from eval.compare.tables import comparison_lines
from eval.compare.verdicts import Metric, decide, evidence_row, judge, note, overall
from sft.files import read_json, write_json
from sft.recipe.schema import Evaluation
from sft.run.directory import Run
from sft.terminal import visible_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Comparison:
    """What comparison.json holds, and the metrics with their documents."""

    record: dict[str, Any]
    metrics: list[Metric]


def _compare_metric(
    task: str, key: str, base: Results, tuned: Results, samples: tuple[Samples, Samples]
) -> Metric | None:
    metric, _, filter_name = key.partition(",")
    scores = [one["results"][task] for one in (base, tuned)]
    base_score, tuned_score = (number(one.get(key)) for one in scores)
    if base_score is None or tuned_score is None:
        return None
    base_stderr, tuned_stderr = (number(one.get(f"{metric}_stderr,{filter_name}")) for one in scores)
    difference = tuned_score - base_score
    counted = scores[1].get("sample_len") or tuned["n-samples"].get(task, {}).get("effective", 0)
    documents = pair_task(task, key, base, tuned, samples)
    evidence = None
    if documents is not None:
        evidence = paired(documents.samples)
        if any(part.perplexity for part in documents.parts.values()):
            low, high = (base_score * (exp(min(end, 700.0)) - 1) for end in evidence.interval)  # of tuned / base
            evidence = replace(evidence, interval=(low, high), stderr=tuned_score * evidence.stderr)
    # A perplexity that is infinite or not a number says nothing by its size.
    elif base_stderr is not None and tuned_stderr is not None and isfinite(difference + base_stderr + tuned_stderr):
        evidence = independent(difference, base_stderr, tuned_stderr, counted)
    row = {
        "task": task,
        "metric": metric,
        "filter": filter_name,
        "decides": False,
        "higher_is_better": tuned["higher_is_better"].get(task, {}).get(metric),
        "documents": counted,
        "base": base_score,
        "base_stderr": base_stderr,
        "tuned": tuned_score,
        "tuned_stderr": tuned_stderr,
        "difference": difference,
        **evidence_row(evidence),
    }
    return Metric(row, documents)


def compare(base: Results, tuned: Results, base_samples: Samples, tuned_samples: Samples) -> Comparison:
    """Compare two evaluations that were made under the same settings; `flips`, `contamination` and `gate` are left empty.

    Raises:
        EvaluationError: The settings, the documents or the prompts were not the same.
    """
    prompting = check_settings_match(base, tuned, base_samples, tuned_samples)
    compared = [
        _compare_metric(task, key, base, tuned, (base_samples, tuned_samples))
        for task, scores in tuned["results"].items()
        if task in base["results"]
        for key in metric_keys(scores)
    ]
    metrics = [metric for metric in compared if metric is not None]
    decide(metrics, tuned)
    rows, mean = [metric.row for metric in metrics], overall(metrics)
    judge([*rows, *([mean] if mean else [])])
    scored = {row["task"] for row in rows}
    unscored = [task for task in top_level(tuned) if metric_keys(tuned["results"].get(task, {})) and task not in scored]
    not_measured = dict.fromkeys(unscored, "none of its scores is a number") | base["failed"] | tuned["failed"]
    record = {
        "complete": not not_measured,
        "not_measured": not_measured,
        "settings_hash": tuned["settings_hash"],
        "settings": tuned["settings"],
        "prompting": prompting,
        "base": base["measured_model"],
        "tuned": tuned["measured_model"],
        "prompts_cut": sorted({*base["prompts_cut"], *tuned["prompts_cut"]}),
        "metrics": rows,
        "overall": mean,
        "note": note([row for row in rows if row["decides"]], mean),
        "flips": {},
        "contamination": None,
        "gate": None,
    }
    return Comparison(record, metrics)


def write_comparison(
    run: Run, folder: Path, evaluation: Evaluation, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """Compare the evaluations in base/ and tuned/ of a folder; write comparison.json and flips.jsonl there, and print the comparison.

    Raises:
        EvaluationError: The two were not measured under the same settings.
    """
    base, tuned = (read_json(folder / side / "results.json") for side in ("base", "tuned"))
    samples = read_samples(folder / "base"), read_samples(folder / "tuned")
    compared = compare(base, tuned, *samples)
    record = compared.record
    flips, record["flips"] = find_flips(compared.metrics, samples)
    record["contamination"] = check_contamination(
        evaluation.contamination, run, tokenizer, compared.metrics, tuned, samples[1]
    )
    record["gate"] = judge_gate(evaluation.gate, record)
    write_flips(flips, folder / "flips.jsonl")
    write_json(folder / run.comparison_file.name, finite(record))
    for line in comparison_lines(record):
        print(visible_line(line))
    return record
