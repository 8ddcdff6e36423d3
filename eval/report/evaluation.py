"""Collects what a report shows of comparison.json: the verdict, the scores, contamination, and the settings."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from eval.compare.gate import describe_gate
from eval.report.formats import code, counted, interval, is_number, kind_of, metric_name, number, score, table, words

Part = dict[str, Any]

MOST_NAMED = 5
"""Metrics that the verdict names."""


def _deciding(comparison: Part) -> list[Part]:
    metrics: list[Part] = comparison.get("metrics") or []
    return [entry for entry in metrics if entry.get("decides")] or metrics


def collect_verdict(comparison: Part) -> list[Part]:
    """What a reader wants first: whether the tuned model is better, and whether the gate passed."""
    metrics, overall, gate = _deciding(comparison), comparison.get("overall"), comparison.get("gate")
    verdicts = Counter(words(entry.get("verdict")) for entry in metrics)
    order = sorted(verdicts, key=lambda verdict: ("bad", "good", "plain").index(kind_of(verdict)))
    counts = f"Of {counted(len(metrics), 'metric')}: {', '.join(f'{verdicts[verdict]} {verdict}' for verdict in order)}"
    kinds = [kind_of(verdict) for verdict in order]
    kind = kinds[0] if kinds else "plain"
    lines: list[str] = []
    if overall:
        kind = kind_of(overall["verdict"])
        title = (
            f"{overall['verdict']}: {score(overall['difference'], '+')} over {counted(len(overall['tasks']), 'task')}, "
        )
        title += f"95% interval {interval(overall['interval_95'])}"
        lines = [f"{counts}."]
    elif len(metrics) == 1:
        title = f"{words(metrics[0].get('verdict'))}: {score(metrics[0].get('difference'), '+')} on {words(metrics[0].get('task'))}"
    else:
        title = counts if metrics else "No task was measured on both models"
    named = [entry for entry in metrics if len(metrics) <= 3 or kind_of(entry.get("verdict")) == "bad"]
    lines += [
        (f"{words(entry.get('verdict'))}: " if len(metrics) > 1 else "") + _sentence(entry)
        for entry in named[:MOST_NAMED]
    ]
    if len(named) > MOST_NAMED:
        lines.append(f"and {len(named) - MOST_NAMED} more")
    notices = [{"kind": kind, "title": title, "lines": lines}]
    if gate:
        passed = gate["passed"] is True
        asked = f"Required: {describe_gate(gate['asked'])}."
        notices.append(
            {
                "kind": "good" if passed else "bad",
                "title": f"The gate {'passed' if passed else 'failed'}",
                "lines": [*map(words, gate["failures"]), asked],
            }
        )
    return notices


def _sentence(entry: Part) -> str:
    scores = f"{score(entry.get('base'))} → {score(entry.get('tuned'))}"
    difference = f"{score(entry.get('difference'), '+')}, 95% interval {interval(entry.get('interval_95'))}"
    return f"{words(entry.get('task'))}, {metric_name(entry)}: {scores} ({difference}; {number(entry.get('documents'))} documents)"


def collect_evaluation(comparison: Part) -> Part:
    """The scores, drawn and in numbers, and what limits them."""
    metrics: list[Part] = comparison.get("metrics") or []
    deciding = _deciding(comparison)
    widest = max((_reach(entry) for entry in deciding if _is_share(entry)), default=0.0)
    not_measured = [f"{task}: {reason}" for task, reason in (comparison.get("not_measured") or {}).items()]
    return {
        "scores": [_score_row(entry, widest) for entry in deciding],
        "widest": f"{widest:.3f}" if widest else "",
        "numbers": _numbers(metrics) if metrics else None,
        "note": words(comparison["note"]) if comparison.get("note") else "",
        "not_measured": not_measured or ([] if comparison.get("complete") else [words(None)]),
        "asked": _asked(comparison),
        "settings_hash": code(str(comparison.get("settings_hash", ""))[:12] or None),
    }


def _numbers(metrics: list[Part]) -> Part:
    rows = [
        [
            words(entry.get("task")),
            metric_name(entry),
            number(entry.get("documents")),
            *(_with_stderr(entry, side) for side in ("base", "tuned")),
            score(entry.get("difference"), "+"),
            score(entry.get("difference_stderr")),
            interval(entry.get("interval_95")),
            number(entry.get("p_value"), ".2g"),
            number(entry.get("p_adjusted"), ".2g"),
            words(entry.get("test")),
            "does not decide" if entry.get("decides") is False else words(entry.get("verdict")),
        ]
        for entry in metrics
    ]
    head = [
        "Task",
        "Metric",
        "Documents",
        "Base",
        "Tuned",
        "Difference",
        "Standard error",
        "95% interval",
        "p",
        "p (Holm)",
        "Test",
        "Verdict",
    ]
    return table(head, rows, range(2, 10))


def _with_stderr(entry: Part, side: str) -> str:
    stderr = entry.get(f"{side}_stderr")
    return score(entry.get(side)) + (f" ± {score(stderr)}" if is_number(stderr) else "")


def _is_share(entry: Part) -> bool:
    return all(is_number(entry.get(side)) and 0 <= entry[side] <= 1 for side in ("base", "tuned"))


def _reach(entry: Part) -> float:
    return max(map(abs, filter(is_number, [entry.get("difference"), *(entry.get("interval_95") or [])])), default=0.0)


def _score_row(entry: Part, widest: float) -> Part:
    """One metric on both models; `value`, `low` and `high` place the difference between -100 and 100."""
    scale = widest if _is_share(entry) else _reach(entry)
    low, high = entry.get("interval_95") or (None, None)
    ends = {"value": entry.get("difference"), "low": low, "high": high}
    return {
        "task": words(entry.get("task")),
        "metric": f"{metric_name(entry)}; {number(entry.get('documents'))} documents"
        + ("" if _is_share(entry) else "; on its own scale"),
        "verdict": words(entry.get("verdict")),
        "kind": kind_of(entry.get("verdict")),
        "base": score(entry.get("base")),
        "tuned": score(entry.get("tuned")),
        "difference": score(entry.get("difference"), "+"),
        "interval": interval(entry.get("interval_95")),
        **{name: f"{100 * end / scale:.2f}" if is_number(end) and scale else None for name, end in ends.items()},
    }


def collect_contamination(comparison: Part) -> Part:
    """Documents of the evaluation that the training data holds: a sentence, and the tasks where some were found."""
    searched = comparison.get("contamination")
    if not searched:
        return {"text": "Nobody searched the training data for documents of the tasks.", "tasks": None}
    if searched.get("reason"):
        return {
            "text": f"The training data could not be searched for documents of the tasks: {searched['reason']}",
            "tasks": None,
        }
    rows = []
    for task, counts in searched["tasks"].items():
        found, documents, short = counts["found"], counts["documents"], counts.get("too_short")
        if found or short:
            share = f"{found / documents:.1%}" if documents else words(None)
            without = score(counts.get("difference_without"), "+") if found else "-"
            rows.append([task, number(documents), number(found), share, number(short), without])
    clean = len(searched["tasks"]) - len(rows)
    ngram = f"{searched['ngram']}-gram"
    if not rows:
        return {"text": f"No document of the tasks shares a {ngram} with the training data.", "tasks": None}
    others = f" (none of {counted(clean, 'more task')} does)" if clean else ""
    head = ["Task", "Documents", "Found", "Share", "Too short to tell", "Difference without those found"]
    return {
        "text": f"Documents of the tasks that share a {ngram} with the training data{others}:",
        "tasks": table(head, rows, range(1, 6)),
    }


def _asked(comparison: Part) -> str:
    settings = comparison.get("settings") or {}
    limit = settings.get("limit")
    documents = f"at most {limit} documents per task" if limit else "all documents of each task"
    template = "with the chat template" if settings.get("apply_chat_template") else "without a chat template"
    cut = ", ".join(comparison.get("prompts_cut") or [])
    lost = f" Prompts longer than the context lost their beginning: {cut}." if cut else ""
    # Comparisons of older versions have base_treatment and told.
    prompting = comparison.get("prompting") or comparison.get("base_treatment") or {}
    prompting = prompting.get("note") or prompting.get("told")
    return f"Both models: {documents}, {template}, in {words(settings.get('dtype'))}.{lost}{f' {prompting}' if prompting else ''}"


def collect_settings(comparison: Part) -> Part:
    """Everything that could move a score, by dotted key."""
    facts = {
        key: "not set" if value is None else words(value)
        for key, value in flattened(comparison.get("settings") or {}).items()
    }
    facts |= {f"version of {task}": words(one) for task, one in (comparison.get("versions") or {}).items()}
    facts |= {f"examples of {task}": words(one) for task, one in (comparison.get("num_fewshot") or {}).items()}
    return {"hash": code(comparison.get("settings_hash")), "facts": facts}


def flattened(values: Part, before: str = "") -> Part:
    """Nested settings by dotted key.

    >>> flattened({"a": {"b": 1}, "c": [1, "x"]})
    {'a.b': 1, 'c': '[1, "x"]'}
    """
    flat: Part = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            flat |= flattened(value, f"{before}{key}.")
        else:
            flat[f"{before}{key}"] = json.dumps(value, ensure_ascii=False) if isinstance(value, list) else value
    return flat
