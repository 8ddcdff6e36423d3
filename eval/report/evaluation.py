"""The report's sections on base against tuned: the verdict, the scores, and the settings they were measured under."""

from __future__ import annotations

import json
import shlex
from typing import Any

from eval.compare.gate import gate_in_words
from eval.report.blocks import (
    MISSING,
    Block,
    Code,
    Fold,
    Line,
    Notice,
    Paragraph,
    Strong,
    Table,
    code,
    facts,
    number,
    score,
    words,
)
from eval.report.results import Recorded, entries, get, is_number, listed, mapping
from eval.report.scores import drawn_scores, interval_of, kind_of, metric_name, scores_table, shown_interval

MOST_NAMED = 5
"""Metrics that got worse, in the verdict."""


def deciding(comparison: dict[str, Any]) -> list[dict[str, Any]]:
    """The metrics that decide, one for each task; all, where the comparison does not say which."""
    metrics = entries(comparison, "metrics")
    return [entry for entry in metrics if entry.get("decides") is True] or metrics


def verdict_head(of: Recorded) -> list[Block]:
    """What a reader wants first: is the tuned model better."""
    comparison = of.comparison
    if not comparison:
        return [Notice("plain", "Not compared with the base model", [no_evaluation(of)])]
    metrics = deciding(comparison)
    counts = [f"{count} {verdict}" for verdict, count in _verdicts(metrics).items()]
    overall = mapping(comparison, "overall")
    if overall:
        title, kind = _overall(overall), kind_of(overall.get("verdict"))
    else:
        kinds = {kind_of(entry.get("verdict")) for entry in metrics}
        kind = next((one for one in ("bad", "good") if one in kinds), "plain")
        title = f"Of {len(metrics)} metrics: {', '.join(counts)}" if counts else "No task was measured on both models"
    if len(metrics) == 1 and not overall:
        title = f"{words(metrics[0].get('verdict'))}: {score(metrics[0].get('difference'), '+')} on {words(metrics[0].get('task'))}"
    lines: list[Line] = [f"Of {len(metrics)} metrics: {', '.join(counts)}."] if overall and len(metrics) > 1 else []
    decided = [entry for entry in metrics if kind_of(entry.get("verdict")) == "bad"] if len(metrics) > 3 else metrics
    named = [f"{words(entry.get('verdict'))}: {_sentence(entry)}" for entry in decided[:MOST_NAMED]]
    lines += named if len(metrics) > 1 else [_sentence(entry) for entry in decided]
    if len(decided) > MOST_NAMED:
        lines.append(f"and {len(decided) - MOST_NAMED} more that {words(decided[0].get('verdict'))}")
    return [Notice(kind, title, lines), *_gate(comparison)]


def _overall(overall: dict[str, Any]) -> str:
    tasks = overall.get("tasks")
    over = f" over {len(tasks)} task{'s' if len(tasks) != 1 else ''}" if isinstance(tasks, list) else ""
    difference = f"{score(overall.get('difference'), '+')}{over}"
    return f"{words(overall.get('verdict'))}: {difference}, 95% interval {shown_interval(interval_of(overall))}"


def _verdicts(metrics: list[dict[str, Any]]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for entry in metrics:
        verdict = words(entry.get("verdict"))
        counts[verdict] = counts.get(verdict, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: ("bad", "good", "plain").index(kind_of(item[0]))))


def _sentence(entry: dict[str, Any]) -> str:
    scores = f"{score(entry.get('base'))} → {score(entry.get('tuned'))}"
    difference = f"{score(entry.get('difference'), '+')}, 95% interval {shown_interval(interval_of(entry))}"
    return f"{words(entry.get('task'))}, {metric_name(entry)}: {scores} ({difference}; {number(entry.get('documents'))} documents)"


def _gate(comparison: dict[str, Any]) -> list[Block]:
    gate = mapping(comparison, "gate")
    if not gate:
        return []
    failures: list[Line] = [words(one) for one in listed(gate, "failures")]
    asked = f"Asked: {gate_in_words(gate.get('asked'))}."
    passed = gate.get("passed") is True
    return [Notice("good" if passed else "bad", f"The gate {'passed' if passed else 'failed'}", [*failures, asked])]


def no_evaluation(of: Recorded) -> Line:
    """Why there is no comparison, and what to do."""
    if of.recipe is not None and not of.recipe.eval.tasks and of.recipe.eval.suite is None:
        return ("The recipe asks for no evaluation: ", Code("eval.tasks"), " is empty.")
    script, told = "sft", " There is no tuned model yet. To go on with the training: "
    if (of.run.final / "config.json").is_file():
        done = [name for name in ("base", "tuned") if (of.run.path / "eval" / name / "results.json").is_file()]
        measured = f"Measured so far: {' and '.join(done)}." if done else "Nothing has been measured."
        script, told = "eval", f" {measured} To measure what is missing: "
    command = shlex.join(["bash", f"scripts/{script}.sh", str(of.run.path)])
    return (
        Strong("There is no comparison of base and tuned."),
        told,
        Code(command),
        ".",
    )


def evaluation_section(of: Recorded) -> list[Block]:
    """The scores, drawn and in numbers, and what limits what they say."""
    comparison = of.comparison
    if not comparison:
        return [Paragraph(no_evaluation(of))]
    metrics = entries(comparison, "metrics")
    blocks: list[Block] = [Paragraph("No task was measured on both models.")]
    if metrics:
        blocks = [drawn_scores(deciding(comparison)), Fold("All numbers", [scores_table(metrics)])]
    blocks.append(Paragraph("Difference is tuned - base; ± and standard errors are of the documents that were asked."))
    if comparison.get("note"):
        blocks.append(Paragraph(words(comparison["note"])))
    not_measured = mapping(comparison, "not_measured")
    if not_measured or not comparison.get("complete"):
        reasons: list[Line] = [f"{task}: {words(reason)}" for task, reason in not_measured.items()] or ["not recorded"]
        blocks += [Notice("warning", "The evaluation is incomplete. Not measured:", reasons)]
    return [*blocks, *_contamination(comparison), _asked(comparison)]


def contaminated(comparison: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Documents of each task that are in the training data: found, and looked for."""
    found = {}
    for task, counts in mapping(comparison, "contamination", "tasks").items():
        if is_number(get(counts, "found")) and is_number(get(counts, "documents")):
            found[task] = (counts["found"], counts["documents"])
    return found


def _contamination(comparison: dict[str, Any]) -> list[Block]:
    looked = mapping(comparison, "contamination")
    if not looked:
        return [Paragraph("Whether documents of the tasks are in the training data was not looked for.")]
    if looked.get("reason"):
        return [
            Paragraph(f"Documents of the tasks in the training data could not be looked for: {words(looked['reason'])}")
        ]
    rows: list[list[Line]] = []
    for task, (found, documents) in contaminated(comparison).items():
        counts = mapping(looked, "tasks", task)
        share = f"{found / documents:.1%}" if documents else MISSING
        short, without = counts.get("too_short"), score(counts.get("difference_without"), "+")
        if found or short:
            rows.append(
                [words(task), number(documents), number(found), share, number(short), without if found else "-"]
            )
    searched = contaminated(comparison)
    row, clean = f"{number(looked.get('ngram'))} words in a row", len(searched) - len(rows)
    if not rows:
        return [Paragraph(f"No document of the tasks shares {row} with the training data.")] if searched else []
    others = f" (of {clean} more task{'s' if clean > 1 else ''} none does)" if clean else ""
    told = f"Documents of the tasks that share {row} with the training data{others}:"
    head = ["Task", "Documents", "Found", "Share", "Too short to tell", "Difference without those found"]
    return [Paragraph(told), Table(head, rows, numbers=range(1, 6))]


def _asked(comparison: dict[str, Any]) -> Paragraph:
    limit = get(comparison, "settings", "limit")
    asked = f"at most {limit} documents a task" if limit else "all documents of each task"
    template = (
        "through the chat template" if get(comparison, "settings", "apply_chat_template") else "without a chat template"
    )
    settings = code(str(comparison.get("settings_hash", ""))[:12] or None)
    dtype = words(get(comparison, "settings", "dtype"))
    cut = ", ".join(map(words, listed(comparison, "prompts_cut")))
    lost = f" Prompts longer than the context lost their beginning: {cut}." if cut else ""
    treated = get(comparison, "base_treatment", "told")
    treatment = f" {words(treated)}" if treated else ""
    return Paragraph((f"Both models: {asked}, {template}, in {dtype}; settings ", settings, f".{lost}{treatment}"))


def settings_section(of: Recorded) -> list[Block]:
    """Everything that could move a score, by dotted key."""
    comparison = of.comparison
    if not comparison:
        return []
    flat = flattened(mapping(comparison, "settings"))
    rows: dict[str, Line] = {key: words(value) if value is not None else "not set" for key, value in flat.items()}
    versions = {f"version of {task}": words(one) for task, one in mapping(comparison, "versions").items()}
    fewshot = {f"examples of {task}": words(one) for task, one in mapping(comparison, "num_fewshot").items()}
    hashed = code(comparison.get("settings_hash"))
    return [
        Paragraph(("Base and tuned were asked alike: one hash of all settings, ", hashed, ".")),
        Fold("All settings", [facts({**rows, **versions, **fewshot})]),
    ]


def flattened(values: dict[str, Any], before: str = "") -> dict[str, Any]:
    """Nested settings by dotted key.

    >>> flattened({"a": {"b": 1}, "c": [1, "x"]})
    {'a.b': 1, 'c': '[1, "x"]'}
    """
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            flat |= flattened(value, f"{before}{key}.")
        else:
            flat[f"{before}{key}"] = json.dumps(value, ensure_ascii=False) if isinstance(value, list) else value
    return flat
