"""Checks chat answers without reading them: whether each ends on its own, is empty, or loops.

An answer loops where more than 60% of the 24-grams of characters in its last 800 are repetitions; answers under 80 characters never loop. A
passage that is written three times loops; prose, code, lists and tables stay below.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

WINDOW, LEAST, N, SHARE = 800, 80, 24, 0.6

_REASONING = re.compile(r"<think>.*?(</think>|$)", re.DOTALL)


def loops(text: str) -> bool:
    """Whether an answer repeats itself at its end.

    >>> loops("a b c"), loops("round and " * 40)
    (False, True)
    """
    last = text[-WINDOW:]
    if len(last) < LEAST:
        return False
    grams = [last[start : start + N] for start in range(len(last) - N + 1)]
    return 1 - len(set(grams)) / len(grams) > SHARE


def is_empty(text: str) -> bool:
    """Whether an answer has nothing but reasoning content.

    >>> is_empty(" "), is_empty("<think>Well.</think> "), is_empty("<think></think>4")
    (True, True, False)
    """
    return not _REASONING.sub("", text).strip()


def check(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counts over answers; they pass where each ends on its own, says something, and does not loop."""
    counts = {name: sum(bool(answer[name]) for answer in answers) for name in ("ended", "empty", "loops")}
    passed = counts["ended"] == len(answers) and not counts["empty"] and not counts["loops"]
    return {"answers": len(answers), **counts, "passed": passed}


def warning(tuned: dict[str, Any], ends: Sequence[str], limit: int) -> str | None:
    """What is wrong with the tuned model's answers, and what to look at; None where nothing is wrong."""
    if tuned["passed"]:
        return None
    lines, answers = [], tuned["answers"]
    if endless := answers - tuned["ended"]:
        lines.append(f"{endless} of {answers} answers do not end on their own: they are cut at {limit} tokens.")
        lines.append(
            f"Generation ends at {' or '.join(ends)}. `--show 3` marks the target tokens: the end of each turn must be among them, and not "
            "truncated by data.max_length. If it is, train longer; if answers are long, raise eval.chat.max_new_tokens."
            if ends
            else "final/generation_config.json names no token that ends an answer: set eos_token_id there."
        )
    if tuned["loops"]:
        lines.append(f"{tuned['loops']} of {answers} answers loop.")
    if tuned["empty"]:
        lines.append(f"{tuned['empty']} of {answers} answers are empty: look at the shortest answers of the data.")
    return "\n  ".join(["WARNING: the tuned model does not chat as it should.", *lines])
