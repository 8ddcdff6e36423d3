"""Collects what a report shows of the evaluation: verdict, scores, contamination, settings, chat samples and flipped documents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from eval.report.blocks import Block, notice, table, text
from eval.report.formats import code, counted, interval, is_number, kind_of, name_of, number, score, verdict_of, words
from eval.report.run_files import RunFiles
from sft.recipe.schema import Recipe

Part = dict[str, Any]

MOST_SCORES = 24
"""Metrics that are drawn; the table has all."""

MOST_PROMPTS = 16
MOST_FLIPS = 10
"""Shown of each task in each direction."""


def _deciding(comparison: Part) -> list[Part]:
    metrics: list[Part] = comparison.get("metrics") or []
    return [entry for entry in metrics if entry.get("decides")] or metrics


def verdict_notices(comparison: Part) -> list[Block]:
    """What a reader wants first: whether the tuned model is better, and whether the gate passed."""
    metrics, overall, gate = _deciding(comparison), comparison.get("overall"), comparison.get("gate")
    verdicts = Counter(words(entry.get("verdict")) for entry in metrics)
    counts = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
    title, lines = f"Of {counted(len(metrics), 'metric')}: {counts or 'none was measured on both models'}", list[str]()
    kind = "bad" if "REGRESSED" in verdicts else "good" if "IMPROVED" in verdicts else "plain"
    if overall:
        lines, kind = [title], kind_of(overall["verdict"])
        mean = f"{score(overall['difference'], '+')} over {counted(len(overall['tasks']), 'task')}"
        title = f"{overall['verdict']}: {mean}, 95% interval {interval(overall['interval_95'])}"
    elif len(metrics) == 1:
        title = f"{words(metrics[0].get('verdict'))}: {score(metrics[0].get('difference'), '+')} on {words(metrics[0].get('task'))}"
    lines += [_sentence(entry) for entry in metrics if len(metrics) <= 3 or entry.get("verdict") == "REGRESSED"]
    notices = [notice(kind, title, lines)]
    if gate:
        passed = gate["passed"] is True
        required = "Required: " + "; ".join(f"{key}: {words(value)}" for key, value in gate["asked"].items() if value)
        title = f"The gate {'passed' if passed else 'failed'}"
        notices.append(notice("good" if passed else "bad", title, [*map(words, gate["failures"]), required]))
    return notices


def _sentence(entry: Part) -> str:
    scores = f"{score(entry.get('base'))} → {score(entry.get('tuned'))}"
    difference = f"{score(entry.get('difference'), '+')}, 95% interval {interval(entry.get('interval_95'))}"
    documents = number(entry.get("documents"))
    name = f"{words(entry.get('verdict'))}: {words(entry.get('task'))}, {name_of(entry)}"
    return f"{name}: {scores} ({difference}; {documents} documents)"


def evaluation_blocks(files: RunFiles) -> list[Block]:
    """The scores, drawn and in numbers, and what limits them."""
    comparison = files.comparison
    if not comparison:
        return []
    metrics, deciding = comparison.get("metrics") or [], _deciding(comparison)
    widest = max((abs(end) for entry in deciding for end in _ends(entry)), default=0.0)
    rows = [_score_row(entry, widest) for entry in deciding[:MOST_SCORES]]
    blocks = [Block("scores", {"widest": score(widest), "rows": rows})] if rows else []
    cells = [[value(entry) for value in NUMBERS.values()] for entry in metrics]
    none = text("No task was measured on both models.")
    blocks.append(table([*NUMBERS], cells, range(2, 9), fold="All numbers") if metrics else none)
    if comparison.get("note"):
        blocks.append(text(comparison["note"]))
    if not comparison.get("complete"):
        lines = [f"{task}: {reason}" for task, reason in (comparison.get("not_measured") or {}).items()]
        blocks.append(notice("warning", "The evaluation is incomplete. Not measured:", lines or [words(None)]))
    return [*blocks, *_contamination(comparison.get("contamination")), _conditions(comparison, files.recipe)]


NUMBERS: dict[str, Callable[[Part], str]] = {
    "Task": lambda entry: words(entry.get("task")),
    "Metric": name_of,
    "Documents": lambda entry: number(entry.get("documents")),
    "Base": lambda entry: _with_stderr(entry, "base"),
    "Tuned": lambda entry: _with_stderr(entry, "tuned"),
    "Difference": lambda entry: score(entry.get("difference"), "+"),
    "95% interval": lambda entry: interval(entry.get("interval_95")),
    "p": lambda entry: number(entry.get("p_value"), ".2g"),
    "p (Holm)": lambda entry: number(entry.get("p_adjusted"), ".2g") if entry.get("decides") is not False else "-",
    "Test": lambda entry: words(entry.get("test")),
    "Verdict": verdict_of,
}
"""Columns of the table of all metrics."""


def _with_stderr(entry: Part, side: str) -> str:
    stderr = entry.get(f"{side}_stderr")
    return score(entry.get(side)) + (f" ± {score(stderr)}" if is_number(stderr) else "")


def _ends(entry: Part) -> list[float]:
    """The difference and the ends of its interval, where all lie between -1 and 1: a perplexity's would dwarf the others."""
    ends = [entry.get("difference"), *(entry.get("interval_95") or [])]
    return [end for end in ends if is_number(end)] if all(is_number(end) and abs(end) <= 1 for end in ends) else []


def _score_row(entry: Part, widest: float) -> Part:
    """One metric on both models; `ends` has difference, low and high between -100 and 100, or nothing."""
    return {
        "task": words(entry.get("task")),
        "metric": f"{name_of(entry)}; {number(entry.get('documents'))} documents",
        "verdict": verdict_of(entry),
        "kind": kind_of(verdict_of(entry)),
        "base": score(entry.get("base")),
        "tuned": score(entry.get("tuned")),
        "difference": score(entry.get("difference"), "+"),
        "interval": interval(entry.get("interval_95")),
        "ends": [f"{100 * end / widest:.2f}" for end in _ends(entry) if widest],
    }


def _contamination(searched: Part | None) -> list[Block]:
    """Documents of the evaluation that the training data holds: a sentence, and the tasks where some were found."""
    if not searched:
        return [text("The training data was not searched for documents of the tasks.")]
    if searched.get("reason"):
        return [text(f"The training data could not be searched for documents of the tasks: {searched['reason']}")]
    keys = ("documents", "found", "too_short")
    rows = [[task, *(number(counts.get(key)) for key in keys)] for task, counts in searched["tasks"].items()]
    head = ["Task", "Documents", "Found", "Too short to tell"]
    sentence = f"Documents of the tasks that share a {searched['ngram']}-gram with the training data:"
    return [text(sentence), table(head, rows, range(1, 4))]


def _conditions(comparison: Part, recipe: Recipe | None) -> Block:
    settings = comparison.get("settings") or {}
    limit = settings.get("limit")
    documents = f"at most {limit} documents per task" if limit else "all documents of each task"
    template = "with the chat template" if settings.get("apply_chat_template") else "without a chat template"
    remark = (comparison.get("prompting") or {}).get("note")
    sentence = (
        f"Both models: {documents}, {template}, in {words(settings.get('dtype'))}.{f' {remark}' if remark else ''}"
    )
    if recipe is not None and recipe.model.quantization is not None:
        sentence += (
            f" Neither is quantized: the tuned model is the adapters merged into what {recipe.model.quantization} was dequantized to, the "
            "base has its own weights. So a difference includes what quantization costs."
        )
    sentence += (
        " A difference is tuned - base; ± is a standard error. eval/comparison.json has all settings; their hash: "
    )
    return text(sentence, code(str(comparison.get("settings_hash", ""))[:12] or None), ".")


def chat_blocks(files: RunFiles) -> list[Block]:
    """Base and tuned side by side on the chat prompts."""
    chat = files.chat
    if not chat:
        wanted = files.recipe is None or files.recipe.eval.chat
        return [text("No chat samples: eval/chat.json is missing.")] if wanted else []
    if chat.get("skipped"):
        return [text(f"No prompts were answered. {chat['skipped']}")]
    rows = []
    for side, check in chat["checks"].items():
        counts = [number(check[key]) for key in ("answers", "ended", "empty", "loops")]
        rows.append([side, *counts, "yes" if check["passed"] else "no"])
    prompts = chat["prompts"]
    exchanges = [
        {
            "turns": [(words(turn["role"]), words(turn["content"])) for turn in one["messages"]],
            "answers": [_answer(side, one[side]) for side in ("base", "tuned")],
        }
        for one in prompts[:MOST_PROMPTS]
    ]
    more = len(prompts) - len(exchanges)
    others = f" {more} more prompts are there." if more else ""
    head = ["Model", "Answers", "Ended on their own", "Empty", "Looping", "Passed"]
    how = f"Both models answered with the settings in eval/chat.json, which has all answers.{others}"
    return [table(head, rows, range(1, 5)), text(how), Block("exchanges", {"": exchanges})]


def _answer(side: str, answer: Part) -> Part:
    faults = (("did not end", not answer["ended"]), ("empty", answer["empty"]), ("loops", answer["loops"]))
    marks = [mark for mark, bad in faults if bad]
    return {"name": side, "text": words(answer["text"]), "marks": marks, "note": counted(answer["tokens"], "token")}


def flips_blocks(files: RunFiles) -> list[Block]:
    """The documents that only one of the two models answered right, with both answers."""
    flips = files.flips
    if flips is None:
        return [text("Not recorded: eval/flips.jsonl is missing.")] if files.comparison else []
    if not flips:
        return [text("None: both models have the same documents right.")]
    counts = files.comparison.get("flips") or {}
    rows = [[task, one["metric"], number(one["gained"]), number(one["lost"])] for task, one in counts.items()]
    head = ["Task", "Metric", "Gained: tuned right, base wrong", "Lost: base right, tuned wrong"]
    groups = {}
    for direction in ("lost", "gained"):
        these = [one for one in flips if one["direction"] == direction]
        by_task: dict[str, list[Part]] = {}
        for one in these:
            by_task.setdefault(one["task"], []).append(one)
        shown = [_flip(one) for of_task in by_task.values() for one in of_task[:MOST_FLIPS]]
        if shown:
            groups[f"{direction.capitalize()}: {len(shown)} of {counted(len(these), 'document')}"] = shown
    return [table(head, rows, (2, 3)), text("eval/flips.jsonl has all of them."), Block("exchanges", groups)]


def _flip(flip: Part) -> Part:
    scores = f"{number(flip['base_score'], '.4g')} → {number(flip['tuned_score'], '.4g')}"
    return {
        "title": f"{flip.get('subtask') or flip['task']}, document {flip['doc_id']}: {scores}",
        "beginning": " ".join(words(flip["question"])[:80].split()),
        "turns": [("question", words(flip["question"])), ("expected", words(flip["target"]))],
        "answers": [{"name": side, "text": words(flip[side]), "marks": [], "note": ""} for side in ("base", "tuned")],
    }
