"""What can be seen in an answer without reading it: whether it ends, is empty, or goes round in circles. Pure.

The rule for loops: cut the text into units, a word, a number, a sign, or one character of a script that puts no spaces between
words; an answer loops where of the last 128 units, which must be at least 32, more than 60% of all runs of six (n-grams, n = 6) have
stood in them before. A stretch that is said three times over does; prose, code, lists and tables stay below. What is
not found: a list whose short lines differ in a number each, and a loop of fewer than 32 units.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

WINDOW, LEAST, N, SHARE = 128, 32, 6, 0.6

# Han, kana and other scripts without spaces are read by character; Hangul has spaces. A run of one sign is one unit.
_UNIT = re.compile(
    r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]|\w+|([^\w\s])\1*"
)
_WORD, _RULE = 24, 120
"""Characters of the longest word, and of the longest line drawn from one sign; what is longer is read by character."""

_THOUGHT = re.compile(r"<think>.*?(</think>|$)", re.DOTALL)


def units(text: str) -> list[str]:
    """Words, numbers and signs; characters where there are no words.

    >>> units("x = 10; // 好的 ------")
    ['x', '=', '10', ';', '//', '好', '的', '------']
    """
    found: list[str] = []
    for match in _UNIT.finditer(text):
        unit = match[0]
        found += unit if len(unit) > (_RULE if match[1] else _WORD) else [unit]
    return found


def repeated_share(text: str) -> float:
    """Of the n-grams in the last units, the share that has stood there before; 0 for a short text.

    >>> repeated_share("a b c"), repeated_share("round and " * 40)
    (0.0, 0.9733333333333334)
    """
    last = units(text)[-WINDOW:]
    if len(last) < LEAST:
        return 0.0
    grams = [tuple(last[start : start + N]) for start in range(len(last) - N + 1)]
    return 1 - len(set(grams)) / len(grams)


def loops(text: str) -> bool:
    """Whether an answer says the same again and again at its end."""
    return repeated_share(text) > SHARE


def is_empty(text: str) -> bool:
    """Whether nothing is said, thoughts aside.

    >>> is_empty(" "), is_empty("<think>Well.</think> "), is_empty("<think></think>4")
    (True, True, False)
    """
    return not _THOUGHT.sub("", text).strip()


def check(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What is counted of answers; passed where each ends by itself, says something, and does not loop."""
    counts = {name: sum(bool(answer[name]) for answer in answers) for name in ("ended", "empty", "loops")}
    passed = counts["ended"] == len(answers) and not counts["empty"] and not counts["loops"]
    return {"answers": len(answers), **counts, "passed": passed}


def warning(tuned: dict[str, Any], ends: Sequence[str], limit: int, only_text: bool, truncated: int) -> str | None:
    """What is wrong with the tuned model's answers, the likely reason, and the remedy; None where nothing is.

    Args:
        tuned: From check.
        ends: Tokens that end an answer, by final/generation_config.json.
        limit: Tokens of the longest answer.
        only_text: The data held no conversations.
        truncated: Tokens of the data that were cut off the ends of rows.
    """
    if tuned["passed"]:
        return None
    lines, answers = [], tuned["answers"]
    going_on = answers - tuned["ended"]
    if going_on:
        lines.append(f"{going_on} of {answers} answers do not end by themselves: they are cut at {limit} tokens.")
        lines.append(_why_it_goes_on(going_on == answers, ends, only_text, truncated))
    if tuned["loops"]:
        lines.append(f"{tuned['loops']} of {answers} answers say the same again and again.")
    if tuned["empty"]:
        lines.append(f"{tuned['empty']} of {answers} answers are empty: look at the shortest answers of the data.")
    return "\n  ".join(["WARNING: the tuned model does not chat as it should.", *lines])


def _why_it_goes_on(always: bool, ends: Sequence[str], only_text: bool, truncated: int) -> str:
    if not ends:
        return "final/generation_config.json names no token that ends an answer: set eos_token_id there."
    if only_text:
        return "The data are plain text without conversations, so that no end of a turn was trained: train on conversations."
    if truncated:
        return (
            f"{truncated:,} tokens of the data were cut off the ends of rows, and the ends of turns with them: raise data.max_length, or "
            "set data.overlong=drop."
        )
    if not always:
        return "It may have been trained too little; or it answers at length: then raise eval.chat.max_new_tokens."
    return (
        f"It has not learnt to write {' or '.join(ends)}, at which generation stops: train for longer or with a larger learning rate. "
        "`--show 3` marks the tokens that are trained: the end of each turn must be among them."
    )
