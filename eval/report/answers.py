"""The report's sections with what the models said: the fixed prompts, and the documents whose score changed."""

from __future__ import annotations

from typing import Any

from eval.report.blocks import MISSING, Answer, Block, Code, Exchange, Exchanges, Line, Paragraph, Table, number, words
from eval.report.results import Recorded, entries, get, is_number, mapping

MOST_PROMPTS = 16
MOST_FLIPS = 20
"""Shown in each direction, shared by the tasks."""


def chat_section(of: Recorded) -> list[Block]:
    """Base and tuned side by side on the fixed prompts; nothing where nobody asked for any."""
    if not of.chat:
        if of.recipe is not None and not of.recipe.eval.chat:
            return []
        return [Paragraph(("No chat samples: ", Code("eval/chat.json"), " is missing."))]
    if of.chat.get("skipped"):
        return [Paragraph(f"No prompts were answered. {words(of.chat['skipped'])}")]
    prompts = entries(of.chat, "prompts")
    shown = [_chat_exchange(one) for one in prompts[:MOST_PROMPTS]]
    blocks: list[Block] = [_checks(of.chat)]
    if len(prompts) > MOST_PROMPTS:
        blocks.append(Paragraph(f"{MOST_PROMPTS} of {len(prompts)} prompts are shown; all are in eval/chat.json."))
    generation = mapping(of.chat, "generation")
    if generation:
        blocks.append(Paragraph(f"Both answered with {_generated(generation)}."))
    return [*blocks, Exchanges(shown, ("The answers are in report.html and ", Code("eval/chat.json"), "."))]


def _generated(generation: dict[str, Any]) -> str:
    """What of the settings a reader wants; all are in eval/chat.json."""
    chosen = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    given = ", ".join(f"{key} {number(generation[key])}" for key in chosen if is_number(generation.get(key)))
    told = f"sampling{f' ({given})' if given else ''}" if generation.get("do_sample") is True else "greedy decoding"
    if is_number(generation.get("max_new_tokens")):
        told += f", at most {number(generation['max_new_tokens'])} tokens"
    if generation.get("chat_template"):
        told += f", {words(generation['chat_template'])} chat template"
    return told


def _checks(chat: dict[str, Any]) -> Table:
    rows: list[list[Line]] = []
    for side in ("base", "tuned"):
        check = mapping(chat, "checks", side)
        counts: list[Line] = [number(check.get(key)) for key in ("answers", "ended", "empty", "loops")]
        passed = check.get("passed")
        rows.append([side, *counts, ("yes" if passed else "no") if isinstance(passed, bool) else MISSING])
    head = ["Model", "Answers", "Ended by themselves", "Empty", "Looping", "Passed"]
    return Table(head, rows, numbers=(1, 2, 3, 4))


def chat_failed(chat: dict[str, Any]) -> bool:
    """Whether the tuned model's answers did not all end, or were empty, or looped."""
    return get(chat, "checks", "tuned", "passed") is False


def _chat_exchange(prompt: dict[str, Any]) -> Exchange:
    turns = [(words(turn.get("role")), _said(turn.get("content"))) for turn in entries(prompt, "messages")]
    return Exchange(turns, [_chat_answer(side, get(prompt, side)) for side in ("base", "tuned")])


def _said(content: object) -> str:
    """A turn's text; of a list of parts, theirs."""
    if isinstance(content, list):
        return "\n".join(str(get(part, "text") or part) for part in content)
    return words(content)


def _chat_answer(side: str, answer: object) -> Answer:
    marks = []
    if get(answer, "ended") is False:
        marks.append("did not end")
    if get(answer, "empty") is True:
        marks.append("empty")
    if get(answer, "loops") is True:
        marks.append("loops")
    tokens = get(answer, "tokens")
    notes = [f"{tokens:,} token{'s' if tokens != 1 else ''}"] if is_number(tokens) else []
    return Answer(side, words(get(answer, "text")), marks, notes)


def flips_section(of: Recorded) -> list[Block]:
    """The documents that only one of the two models answered right, with both answers."""
    counts = mapping(of.comparison, "flips")
    if of.flips is None and not counts:
        return [Paragraph(("Not recorded: ", Code("eval/flips.jsonl"), " is missing."))] if of.comparison else []
    if not of.flips and not counts:
        return [Paragraph("None: no document that one of the two models has right is wrong in the other.")]
    rows: list[list[Line]] = [
        [task, words(get(one, "metric")), number(get(one, "gained")), number(get(one, "lost"))]
        for task, one in counts.items()
    ]
    head = ["Task", "Metric", "Gained: tuned right, base wrong", "Lost: base right, tuned wrong"]
    blocks: list[Block] = [Table(head, rows, numbers=(2, 3))] if rows else []
    elsewhere: Line = ("Examples are in report.html, all in ", Code("eval/flips.jsonl"), ".")
    for direction, title in (("lost", "Lost"), ("gained", "Gained")):
        all_of_them = [one for one in of.flips or [] if one.get("direction") == direction]
        shown = _shared_out(all_of_them)
        if shown:
            left = len(all_of_them) - len(shown)
            more = f" {left:,} more are in eval/flips.jsonl." if left else ""
            blocks.append(Paragraph(f"{title}: {len(shown)} of {len(all_of_them):,} documents.{more}"))
            blocks.append(Exchanges([_flip(one) for one in shown], elsewhere))
            elsewhere = ""
    return blocks


def _shared_out(flips: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first flips of each task, as many of each as there is room for."""
    tasks: dict[str, list[dict[str, Any]]] = {}
    for flip in flips:
        tasks.setdefault(str(flip.get("task")), []).append(flip)
    shown: list[dict[str, Any]] = []
    for place in range(MOST_FLIPS):
        for of_task in tasks.values():
            if place < len(of_task) and len(shown) < MOST_FLIPS:
                shown.append(of_task[place])
    return sorted(shown, key=lambda flip: list(tasks).index(str(flip.get("task"))))


def _flip(flip: dict[str, Any]) -> Exchange:
    scores = f"{number(flip.get('base_score'), '.4g')} → {number(flip.get('tuned_score'), '.4g')}"
    beginning = " ".join(words(flip.get("question"))[:400].split())
    return Exchange(
        [("question", words(flip.get("question"))), ("expected", words(flip.get("target")))],
        [Answer(side, words(flip.get(side))) for side in ("base", "tuned")],
        title=f"{words(flip.get('subtask') or flip.get('task'))}, document {words(flip.get('doc_id'))}: {scores}",
        hint=beginning if len(beginning) <= 80 else beginning[:79] + "…",
    )
