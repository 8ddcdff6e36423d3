"""What is worth a look in the rows: counted while they are prepared, told with row numbers before every training."""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from sft.control_tokens import ControlTokens
from sft.formats import Conversation, Example, Text
from sft.turns import Message

MEANING = {
    "bad row": "a row that cannot be read or rendered; dropped (data.on_bad_row=drop)",
    "no answer to train on": "no answer to train on; dropped",
    "zero weight": "a row of weight 0 (`weight`, `loss_weight`, `sample_weight`); dropped",
    "no trained token": "no trained token; dropped",
    "longer than max_length": "longer than data.max_length; dropped",
    "no trained token within max_length": "no trained token within data.max_length; dropped",
    "refused by data.refuse": "a row with a finding that data.refuse names; dropped",
    "truncated": "longer than data.max_length; cut off at its end (data.overlong=truncate)",
    "split": "longer than data.max_length; several documents now (data.overlong=split)",
    "role_order": "roles out of order",
    "empty_turn": "an empty turn",
    "last_turn": "the last turn is not the assistant's: nothing follows it to train on",
    "special_tokens": "text that spells a special token; it was read as plain text (data.special_tokens=escape)",
    "special_tokens_kept": "text that spells a special token; it became one (data.special_tokens=keep)",
    "end_token": "an answer that closes with an end token of its own; it was cut off, the template writes one",
    "undecodable": "characters lost in an earlier decoding (U+FFFD), NUL, or half a surrogate pair",
    "placeholder": "a placeholder that was never filled in, such as {{name}}",
    "duplicate": "a row that is the same as an earlier one",
    "held_out_duplicate": "a row that is also held out; not trained",
    "same_answer": "the same answer as many other rows",
    "very_long": "far longer than the other rows",
    "empty_thought": "no thought before an answer: the chat template writes an empty one, which is trained",
}
"""What each kind of finding says of a row."""

_EXAMPLES = 5
_PLACEHOLDER = re.compile(r"\{\{\s*[A-Za-z_]\w*\s*\}\}")
_UNDECODABLE = re.compile("[\ufffd\x00\ud800-\udfff]")
_CAN_FOLLOW = {
    "start": {"system", "developer", "user"},
    "system": {"developer", "user"},
    "developer": {"user"},
    "user": {"assistant"},
    "assistant": {"user"},
    "call": {"tool"},
    "tool": {"tool", "assistant"},
}


@dataclass
class Findings:
    """How often, and in which rows first, by kind."""

    counts: Counter[str] = field(default_factory=Counter)
    rows: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """The first rows of each kind: number of the source and of the row."""

    details: dict[str, str] = field(default_factory=dict)
    """What else is to be said of a kind."""

    def add(self, kind: str, source: int, row: int, count: int = 1) -> None:
        """Note a row."""
        self.counts[kind] += count
        examples = self.rows.setdefault(kind, [])
        if len(examples) < _EXAMPLES:
            examples.append((source, row))

    def merge(self, other: Findings) -> None:
        """Add what was found in later rows."""
        self.counts += other.counts
        for kind, rows in other.rows.items():
            self.rows[kind] = (self.rows.get(kind, []) + rows)[:_EXAMPLES]


def _role_order(messages: list[Message]) -> bool:
    before = "start"
    for message in messages:
        role = message["role"]
        if role not in _CAN_FOLLOW[before]:
            return False
        before = "call" if role == "assistant" and message.get("tool_calls") else role
    return True


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return None


def _is_empty(message: Message) -> bool:
    return not message["content"].strip() and not message.get("tool_calls")


def strings(value: Any) -> list[str]:
    """Every string in a nested value, keys too."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for key, inner in value.items() for text in (key, *strings(inner))]
    return [text for inner in value for text in strings(inner)] if isinstance(value, list) else []


def found_in_row(example: Example, control: ControlTokens, escape: bool) -> list[str]:
    """The kinds of findings of one row.

    Args:
        example: The row before anything is cut off.
        control: The tokenizer's special tokens.
        escape: Special tokens in it become plain text.
    """
    if isinstance(example, Conversation):
        return _found_in_conversation(example, control, escape)
    return _found_in_text(example, control, escape) if isinstance(example, Text) else []


def _found_in_conversation(example: Conversation, control: ControlTokens, escape: bool) -> list[str]:
    messages, found = example.messages, []
    if not _role_order(messages):
        found.append("role_order")
    if any(_is_empty(message) for message in messages):
        found.append("empty_turn")
    if messages and messages[-1]["role"] != "assistant":
        found.append("last_turn")
    rest = [
        control.without_end(message["content"]) if escape and message["role"] == "assistant" else message["content"]
        for message in messages
    ]
    if any(left != message["content"] for left, message in zip(rest, messages, strict=True)):
        found.append("end_token")
    elsewhere = [
        text
        for message in messages
        for key, value in message.items()
        if key not in ("role", "content")
        for text in strings(value)
    ]
    # Templates that quote arguments get them parsed, and then an escape in the JSON is a character.
    elsewhere += [
        text
        for message in messages
        for call in message.get("tool_calls") or []
        if isinstance(arguments := call["function"].get("arguments"), str) and "\\" in arguments
        for text in strings(_parsed(arguments))
    ]
    elsewhere += strings(example.tools) + strings(example.template_arguments)
    return found + _found_in_strings([*rest, *elsewhere], control, escape)


def _found_in_text(example: Text, control: ControlTokens, escape: bool) -> list[str]:
    rest = control.without_end(example.completion) if escape else example.completion
    found = ["end_token"] if rest != example.completion else []
    return found + _found_in_strings([example.prompt + rest], control, escape)


def _found_in_strings(texts: list[str], control: ControlTokens, escape: bool) -> list[str]:
    found = []
    if any(control.found_in(text) for text in texts):
        found.append("special_tokens" if escape else "special_tokens_kept")
    if any(_UNDECODABLE.search(text) for text in texts):
        found.append("undecodable")
    if any("{{" in text and _PLACEHOLDER.search(text) for text in texts):
        found.append("placeholder")
    return found


def script_of(text: str) -> str:
    """The writing most letters of a text are in, by their Unicode names; `none` without letters.

    >>> script_of("Здравствуй, world of letters: Здравствуйте")
    'Cyrillic'
    """
    letters = Counter(unicodedata.name(letter, "?").split()[0] for letter in text[:2000] if letter.isalpha())
    return letters.most_common(1)[0][0].capitalize() if letters else "none"
