"""What is worth a look in the rows: counted while they are prepared, told with row numbers before every training."""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from sft.data.formats import Conversation, Example, Text
from sft.data.special_tokens import ControlTokens
from sft.data.turns import Message
from sft.errors import DataError
from sft.recipe.schema import Data

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
    "mojibake": "text that was decoded wrongly (UTF-8 read as another encoding), such as Ã© for é",
    "escaped": "text that was escaped once too often: \\n, \\u00e9 or &quot; stands in it letter by letter",
    "lossy": "text that the tokenizer loses a part of: the model never sees it",
    "other_tokens": "other tokens than tokenizer.json makes: transformers rebuilds the tokenizer by its class. The model may have been "
    "pretrained on those of the file; tokenizer_class=TokenizersBackend in tokenizer_config.json keeps them (not for qwen2 and phi3)",
    "rendered": "text that was rendered for another model or in another format, such as <|im_start|>, [INST] or ### Response:",
    "echo": "an answer that begins with its whole question",
    "answer_in_question": "an answer that stands in its own question, word for word",
    "dialogue": "an answer that contains further turns (User: ... Assistant: ...)",
    "repeated_system": "a question that repeats the system message",
    "base64": "encoded data, such as an image (;base64,...), that is read as text",
    "cut_off": "answers of exactly the same length, which is also the longest: they were probably cut off",
    "missing_value": "an answer that is only nan, None or null, as programs write a missing value",
    "carriage_return": "a carriage return (a line end of Windows); it is trained where it stands in an answer",
    "no_end": "tokens whose last trained one is no special token: the model does not learn from them to stop",
    "placeholder": "a placeholder that was never filled in, such as {{name}}",
    "duplicate": "a row that is the same as an earlier one",
    "held_out_duplicate": "a row that is also held out; not trained",
    "held_out_near": "a held-out row whose questions, or first question and answer, equal a trained row's but for case and white space",
    "same_answer": "the same answer as many other rows",
    "very_long": "far longer than the other rows",
    "empty_thought": "no thought before an answer: the chat template writes an empty one, which is trained",
    "prompt_thinks": "no reasoning content: generation begins after <think>, which these answers are trained without",
    "made_ids": "tool calls without ids that the chat template accepts; ids were made, and are trained where the template writes them",
}
"""What each kind of finding says of a row."""

_REFUSED_FROM = {
    "role_order": 0.9,
    "empty_turn": 0.9,
    "last_turn": 0.9,
    "placeholder": 0.9,
    "rendered": 0.9,
    "echo": 0.9,
    "dialogue": 0.9,
    "missing_value": 0.5,
    "same_answer": 0.9,
    "duplicate": 0.9,
    "held_out_duplicate": 0.9,
    "held_out_near": 0.9,
    # Only some rows have line breaks or quotes that can be escaped, and fewer have letters beyond ASCII.
    "escaped": 0.5,
    "mojibake": 0.1,
    "undecodable": 0.1,
}
"""The fraction of a source's rows from which a kind of finding is refused: it is then a mistake in how the rows were made."""

TOLD_FROM = {"answer_in_question": 0.2, "dialogue": 0.2}
"""The fraction of a source's rows from which a kind of finding is noted: single rows are often meant so."""

_FEWEST_ROWS = 10
"""Rows of a source that say something about how all of them were made."""

_EXAMPLES = 5
_PLACEHOLDER = re.compile(r"\{\{\s*[A-Za-z_]\w*\s*\}\}")
_UNDECODABLE = re.compile("[\ufffd\x00\ud800-\udfff]")
_CONTINUES = "\x80-\xbf" + bytes(range(0x80, 0xA0)).decode("cp1252", "ignore")
"""The second and later bytes of a UTF-8 character, read as Latin-1 or cp1252."""

_NO_QUOTES = (
    "".join(c for c in map(chr, range(0x80, 0xC0)) if unicodedata.category(c) not in ("Pi", "Pf", "Zs"))
    + "€ƒ†‡Š‰ŒŽ•™šœžŸ"
)
"""Of them what does not close a quotation or a word: »Spaß«, CAFÉ…"""

_MOJIBAKE = re.compile(
    f"[ÂÃ][\xa0{_NO_QUOTES}]|[ÄÅ][{_NO_QUOTES}]|â[€\x80]|ðŸ|ð\x9f"
    f"|(?:[ÎÏÐÑ][{_CONTINUES}]){{3}}|(?:[ã-é][{_CONTINUES}]{{2}}){{2}}|锟斤拷"
)
_ESCAPED = re.compile(
    r"\\n(?![a-z])|\\r\\n|\\u[0-9a-fA-F]{4}|&(?:quot|apos|nbsp|#x?0?[0-9a-fA-F]{2,4});|&amp;(?:[a-z]{2,6}|#x?[0-9a-fA-F]{2,4});"
)
_FOREIGN = re.compile(
    r"<\|(?:im_start|im_end|eot_id|start_header_id|end_header_id|begin_of_text|user|assistant|system|end)\|>"
    r"|<(?:start|end)_of_turn>"
)
"""Special tokens of other models, of which this one's tokenizer may know none."""

_OTHER_FORMAT = re.compile(
    r"\[/?INST\]|<<SYS>>|###\s*(?:Instruction|Response|Human|Assistant)\b"
    r"|\A\s*(?:Human|User|Assistant):\s|\n(?:Human|User):\s*\Z"
)
"""What a prompt format writes that is no chat template: a second one around the first, where it stands in a turn."""

_MISSING = {"nan", "NaN", "NAN", "None", "null", "NULL", "<NA>", "undefined"}
_BASE64 = re.compile(";base64,[A-Za-z0-9+/]{100}")
_SHORTEST_QUESTION = 20
"""Characters of a question that no answer begins with by chance; of a system message that no question repeats by chance."""

SHORTEST_ANSWER = 40
"""Characters of an answer that is no label or name."""

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
    by_source: Counter[tuple[str, int]] = field(default_factory=Counter)
    """By kind and number of the source."""

    rows: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """The first rows of each kind: number of the source and of the row."""

    details: dict[str, str] = field(default_factory=dict)
    """What else is to be said of a kind."""

    longest: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """By number of the source: characters of its longest answer, how many rows have one as long, and the first of them."""

    def add(self, kind: str, source: int, row: int, count: int = 1) -> None:
        """Note a row."""
        self.counts[kind] += count
        self.by_source[kind, source] += count
        examples = self.rows.setdefault(kind, [])
        if len(examples) < _EXAMPLES:
            examples.append((source, row))

    def measure(self, characters: int, source: int, row: int, count: int = 1) -> None:
        """Take in the length of an answer, or of several equally long ones from `row` on."""
        known, times, first = self.longest.get(source, (0, 0, row))
        if characters > known:
            self.longest[source] = characters, count, row
        elif characters == known:
            self.longest[source] = known, times + count, first

    def merge(self, other: Findings) -> None:
        """Add what was found in later rows."""
        for source, (characters, count, row) in other.longest.items():
            self.measure(characters, source, row, count)
        self.counts += other.counts
        self.by_source += other.by_source
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
    system = messages[0]["content"].strip() if messages and messages[0]["role"] == "system" else ""
    if len(system) >= _SHORTEST_QUESTION and any(system in message["content"] for message in messages[1:]):
        found.append("repeated_system")
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
    # What a tool answers is often JSON, which has escapes.
    written = [message["content"] for message in messages if message["role"] != "tool"]
    pairs = [
        (before["content"], answer["content"])
        for before, answer in pairwise([{"content": ""}, *messages])
        if answer["role"] == "assistant"
    ]
    found += _found_in_strings([*rest, *elsewhere], control, escape) + _escaped(written) + _found_in_answers(pairs)
    told = {"special_tokens", "special_tokens_kept", "rendered"} & set(found)
    return found if told or not any(map(_OTHER_FORMAT.search, rest)) else [*found, "rendered"]


def _found_in_text(example: Text, control: ControlTokens, escape: bool) -> list[str]:
    rest = control.without_end(example.completion) if escape else example.completion
    found = ["end_token"] if rest != example.completion else []
    found += _found_in_strings([example.prompt + rest], control, escape) + _escaped([example.prompt, rest])
    return found + _found_in_answers([(example.prompt, rest)])


def _found_in_answers(pairs: list[tuple[str, str]]) -> list[str]:
    """What is found in answers, each with the question before it."""
    found = ["missing_value"] if any(answer.strip() in _MISSING for _, answer in pairs) else []
    questions = [(question.strip(), answer.lstrip()) for question, answer in pairs]
    if any(len(question) >= _SHORTEST_QUESTION and answer.startswith(question) for question, answer in questions):
        found.append("echo")
    if any(
        len(question) >= len(answer.rstrip()) >= SHORTEST_ANSWER and answer.rstrip() in question
        for question, answer in questions
    ):
        found.append("answer_in_question")
    # A text without a question may be a whole conversation.
    if any(
        "\nAssistant:" in answer and ("\nUser:" in answer or "\nHuman:" in answer)
        for question, answer in pairs
        if question
    ):
        found.append("dialogue")
    return found


def _escaped(texts: list[str]) -> list[str]:
    # Text with line breaks of its own is code, or about it; JSON has escapes of its own.
    suspect = [text for text in texts if "\\" in text or "&" in text]
    found = any("\n" not in text and text.lstrip()[:1] not in ("{", "[") and _ESCAPED.search(text) for text in suspect)
    return ["escaped"] if found else []


def _found_in_strings(texts: list[str], control: ControlTokens, escape: bool) -> list[str]:
    found = []
    if any(control.found_in(text) for text in texts):
        found.append("special_tokens" if escape else "special_tokens_kept")
    elif any(_FOREIGN.search(text) for text in texts):
        found.append("rendered")
    if any("\r" in text for text in texts):
        found.append("carriage_return")
    if any(";base64," in text and _BASE64.search(text) for text in texts):
        found.append("base64")
    if any(_UNDECODABLE.search(text) for text in texts):
        found.append("undecodable")
    if any(not text.isascii() and _MOJIBAKE.search(text) for text in texts):
        found.append("mojibake")
    if any("{{" in text and _PLACEHOLDER.search(text) for text in texts):
        found.append("placeholder")
    return found


def check_findings(findings: list[dict[str, Any]], data: Data) -> None:
    """Refuse what nearly all rows of a source have, where it can only be a mistake.

    Args:
        findings: As ledger.json has them.
        data: The recipe's section; says what it allows.

    Raises:
        DataError: A kind that it does not allow; the message names the key.
    """
    allowed = (*data.allow, "duplicate") if data.deduplicate else data.allow
    refused = {
        finding["kind"]: f"  {most['source']}: {most['count']} of {most['rows']} rows: {finding['meaning']} "
        f"({finding['kind']}; the first: {finding['rows'][0]})"
        for finding in findings
        if finding["kind"] not in allowed and (most := finding["most"])["rows"] >= _FEWEST_ROWS
        if most["count"] >= _REFUSED_FROM.get(finding["kind"], 2) * most["rows"]
    }
    if refused:
        raise DataError(
            "\n".join(
                [
                    "Too many rows of a source share a fault, so that they were most likely made wrongly:",
                    *refused.values(),
                ]
            )
            + "\nLook at them with --show and correct them. Where it is meant, set "
            f"data.allow=[{', '.join([*data.allow, *refused])}]."
        )


def script_of(text: str) -> str:
    """The writing most letters of a text are in, by their Unicode names; `none` without letters.

    >>> script_of("Здравствуй, world of letters: Здравствуйте")
    'Cyrillic'
    """
    letters = Counter(unicodedata.name(letter, "?").split()[0] for letter in text[:2000] if letter.isalpha())
    return letters.most_common(1)[0][0].capitalize() if letters else "none"
