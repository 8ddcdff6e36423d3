"""The report's sections on base against tuned: the verdict, the scores, and the settings they were measured under."""

from __future__ import annotations

import json
import shlex
from statistics import NormalDist
from typing import Any

from eval.blocks import (
    MISSING,
    Bar,
    Block,
    Code,
    Fold,
    Line,
    Notice,
    Paragraph,
    Score,
    Scores,
    Strong,
    Table,
    code,
    facts,
    joined,
    number,
    words,
)
from eval.recorded import Recorded, entries, get, is_number, mapping

Z95 = NormalDist().inv_cdf(0.975)
"""95 % of a normal distribution lie within this many standard errors."""

KINDS = {"IMPROVED": "good", "better": "good", "REGRESSED": "bad", "worse": "bad"}
"""Of a verdict; the lower case is how earlier versions of the comparison say it."""


MOST_NAMED = 5
"""Metrics that got worse, in the verdict."""


def kind_of(verdict: object) -> str:
    """good, bad or plain."""
    return KINDS.get(str(verdict), "plain")


def metric_name(entry: dict[str, Any]) -> str:
    """A metric, its filter, and which way is better where that is down."""
    name = words(entry.get("metric"))
    name += f", {words(entry['filter'])}" if entry.get("filter") not in (None, "none") else ""
    return name + (" (lower is better)" if entry.get("higher_is_better") is False else "")


def interval_of(entry: object, key: str = "interval_95") -> tuple[float, float] | None:
    """The interval of an entry, where it is recorded."""
    found = get(entry, key)
    both = isinstance(found, list) and len(found) == 2 and all(map(is_number, found))
    return (float(found[0]), float(found[1])) if both else None


def shown_interval(interval: tuple[float, float] | None) -> str:
    """An interval of a difference."""
    return "[{:+.4f}, {:+.4f}]".format(*interval) if interval else MISSING


def score_of(entry: dict[str, Any], side: str) -> str:
    """One model's score with its standard error."""
    stderr = entry.get(f"{side}_stderr")
    return number(entry.get(side), ".4f") + (f" ± {stderr:.4f}" if is_number(stderr) else "")


def verdict_head(of: Recorded) -> list[Block]:
    """What a reader wants first: is the tuned model better."""
    comparison = of.comparison
    if not comparison:
        return [Notice("plain", "Not compared with the base model", [no_evaluation(of)])]
    metrics = entries(comparison, "metrics")
    counts = [f"{count} {verdict}" for verdict, count in _verdicts(metrics).items()]
    overall = mapping(comparison, "overall")
    if overall:
        title, kind = _overall(overall), kind_of(overall.get("verdict"))
    else:
        kinds = {kind_of(entry.get("verdict")) for entry in metrics}
        kind = next((one for one in ("bad", "good") if one in kinds), "plain")
        title = f"Of {len(metrics)} metrics: {', '.join(counts)}" if counts else "No task was measured on both models"
    if len(metrics) == 1 and not overall:
        title = f"{words(metrics[0].get('verdict'))}: {number(metrics[0].get('difference'), '+.4f')} on {words(metrics[0].get('task'))}"
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
    difference = f"{number(overall.get('difference'), '+.4f')}{over}"
    return f"{words(overall.get('verdict'))}: {difference}, 95% interval {shown_interval(interval_of(overall))}"


def _verdicts(metrics: list[dict[str, Any]]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for entry in metrics:
        verdict = words(entry.get("verdict"))
        counts[verdict] = counts.get(verdict, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: ("bad", "good", "plain").index(kind_of(item[0]))))


def _sentence(entry: dict[str, Any]) -> str:
    scores = f"{number(entry.get('base'), '.4f')} → {number(entry.get('tuned'), '.4f')}"
    difference = f"{number(entry.get('difference'), '+.4f')}, 95% interval {shown_interval(interval_of(entry))}"
    return f"{words(entry.get('task'))}, {metric_name(entry)}: {scores} ({difference}; {number(entry.get('documents'))} documents)"


def _gate(comparison: dict[str, Any]) -> list[Block]:
    gate = mapping(comparison, "gate")
    if not gate:
        return []
    failures: list[Line] = [words(one) for one in gate.get("failures") or []]
    asked: Line = joined([("asked: ", code(json.dumps(gate.get("asked"), ensure_ascii=False)))])
    passed = gate.get("passed") is True
    return [Notice("good" if passed else "bad", f"The gate {'passed' if passed else 'failed'}", [*failures, asked])]


def no_evaluation(of: Recorded) -> Line:
    """Why there is no comparison, and what to do."""
    if of.recipe is not None and not of.recipe.eval.tasks and of.recipe.eval.suite is None:
        return ("The recipe asks for no evaluation: ", Code("eval.tasks"), " is empty.")
    done = [name for name in ("base", "tuned") if (of.run.path / "eval" / name / "results.json").is_file()]
    measured = f" Measured so far: {' and '.join(done)}." if done else " Nothing has been measured."
    command = shlex.join(["python", "-m", "eval.run", str(of.run.path)])
    return (
        Strong("There is no comparison of base and tuned."),
        f"{measured} To measure what is missing: ",
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
        table = _table(metrics)
        blocks = [_drawn(metrics), Fold("All numbers", [table]) if len(metrics) > 3 else table]
    blocks.append(Paragraph("Difference is tuned - base; ± and standard errors are of the documents that were asked."))
    if comparison.get("note"):
        blocks.append(Paragraph(words(comparison["note"])))
    not_measured = mapping(comparison, "not_measured")
    if not_measured or not comparison.get("complete"):
        reasons: list[Line] = [f"{task}: {words(reason)}" for task, reason in not_measured.items()] or ["not recorded"]
        blocks += [Notice("warning", "The evaluation is incomplete. Not measured:", reasons)]
    return [*blocks, *_contamination(comparison), _asked(comparison)]


def _table(metrics: list[dict[str, Any]]) -> Table:
    tested = any(is_number(entry.get("p_value")) for entry in metrics)
    rows: list[list[Line]] = []
    for entry in metrics:
        probabilities = [
            number(entry.get("p_value"), ".2g"),
            number(entry.get("p_adjusted"), ".2g"),
            words(entry.get("test")),
        ]
        rows.append(
            [
                words(entry.get("task")),
                metric_name(entry),
                number(entry.get("documents")),
                score_of(entry, "base"),
                score_of(entry, "tuned"),
                number(entry.get("difference"), "+.4f"),
                number(entry.get("difference_stderr"), ".4f"),
                shown_interval(interval_of(entry)),
                *(probabilities if tested else []),
                words(entry.get("verdict")),
            ]
        )
    head = ["Task", "Metric", "Documents", "Base", "Tuned", "Difference", "Standard error", "95% interval"]
    head += ["p", "p (Holm)", "Test"] if tested else []
    return Table([*head, "Verdict"], rows, numbers=range(2, 10 if tested else 8))


def _drawn(metrics: list[dict[str, Any]]) -> Scores:
    shares = [entry for entry in metrics if _is_share(entry)]
    widest = max((_reach(entry) for entry in shares), default=0.0)
    rows = []
    for entry in metrics:
        ends = [end for side in ("base", "tuned") for end in _ends(entry, side) if end is not None]
        full = 1.0 if entry in shares else max(map(abs, ends), default=0.0)
        reach = widest if entry in shares else _reach(entry)
        rows.append(
            Score(
                task=words(entry.get("task")),
                metric=f"{metric_name(entry)}; {number(entry.get('documents'))} documents"
                + ("" if entry in shares else "; on a scale of its own"),
                verdict=words(entry.get("verdict")),
                kind=kind_of(entry.get("verdict")),
                base=_bar(entry, "base", full),
                tuned=_bar(entry, "tuned", full),
                difference=number(entry.get("difference"), "+.4f"),
                interval=shown_interval(interval_of(entry)),
                span=_span(entry, reach),
            )
        )
    return Scores(rows, f"{widest:.3f}" if shares else "")


def _is_share(entry: dict[str, Any]) -> bool:
    scores = [entry.get(side) for side in ("base", "tuned")]
    return all(is_number(score) and 0 <= score <= 1 for score in scores)


def _reach(entry: dict[str, Any]) -> float:
    values = [entry.get("difference"), *(interval_of(entry) or ())]
    return max((abs(value) for value in values if is_number(value)), default=0.0)


def _ends(entry: dict[str, Any], side: str) -> tuple[float | None, float | None, float | None]:
    score, stderr = entry.get(side), entry.get(f"{side}_stderr")
    if not is_number(score):
        return None, None, None
    return (score, score - Z95 * stderr, score + Z95 * stderr) if is_number(stderr) else (score, None, None)


def _within(value: float | None, full: float, low: float = 0.0) -> float | None:
    return None if value is None or not full else min(max(value / full, low), 1.0)


def _bar(entry: dict[str, Any], side: str, full: float) -> Bar:
    value, low, high = _ends(entry, side)
    return Bar(number(value, ".4f"), _within(value, full), _within(low, full), _within(high, full))


def _span(entry: dict[str, Any], reach: float) -> Bar | None:
    difference, (low, high) = entry.get("difference"), interval_of(entry) or (None, None)
    if not is_number(difference) or not reach:
        return None
    return Bar("", _within(difference, reach, -1), _within(low, reach, -1), _within(high, reach, -1))


def contaminated(comparison: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Documents of each task that are in the training data: found, and looked for."""
    found = {}
    for task, counts in mapping(comparison, "contamination", "tasks").items():
        if is_number(get(counts, "found")) and is_number(get(counts, "documents")):
            found[task] = (counts["found"], counts["documents"])
    return found


def _contamination(comparison: dict[str, Any]) -> list[Block]:
    if not mapping(comparison, "contamination"):
        return [Paragraph("Whether documents of the tasks are in the training data was not looked for.")]
    ngram = number(get(comparison, "contamination", "ngram"))
    rows = [
        [words(task), number(documents), number(found), f"{found / documents:.1%}" if documents else MISSING]
        for task, (found, documents) in contaminated(comparison).items()
    ]
    told = f"Documents of the tasks that share {ngram} words in a row with the training data:"
    return [Paragraph(told), Table(["Task", "Documents", "Found", "Share"], rows, numbers=(1, 2, 3))]


def _asked(comparison: dict[str, Any]) -> Paragraph:
    limit = get(comparison, "settings", "limit")
    asked = f"at most {limit} documents a task" if limit else "all documents of each task"
    template = (
        "through the chat template" if get(comparison, "settings", "apply_chat_template") else "without a chat template"
    )
    settings = code(str(comparison.get("settings_hash", ""))[:12] or None)
    dtype = words(get(comparison, "settings", "dtype"))
    cut = comparison.get("prompts_cut")
    lost = (
        f" Prompts longer than the context lost their beginning: {', '.join(map(words, cut))}."
        if isinstance(cut, list) and cut
        else ""
    )
    return Paragraph((f"Both models: {asked}, {template}, in {dtype}; settings ", settings, f".{lost}"))


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
    {'a.b': 1, 'c': '1, x'}
    """
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            flat |= flattened(value, f"{before}{key}.")
        else:
            flat[f"{before}{key}"] = ", ".join(map(str, value)) if isinstance(value, list) else value
    return flat
