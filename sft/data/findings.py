"""Finds what deserves a look in the rows: counted while they are prepared, reported with row numbers before every training."""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from sft.data.conversation import Message
from sft.data.formats import Conversation, Example, Text
from sft.data.mixture import Mixture, first_documents
from sft.data.sources import place
from sft.data.special_tokens import SpecialTokens
from sft.errors import DataError
from sft.recipe.schema import Data

MEANING = {
    "bad_row": "a row that cannot be read or rendered; dropped (data.on_bad_row=drop)",
    "refused": "a row with a finding that data.refuse names; dropped",
    "zero_weight": "a row of weight 0 (`weight`, `loss_weight`, `sample_weight`); dropped",
    "no_answer": "no answer to train on; dropped",
    "no_target_tokens": "no target token; dropped",
    "too_long": "longer than data.max_length; dropped",
    "targets_past_max_length": "no target token within data.max_length; dropped",
    "truncated": "longer than data.max_length; cut off at its end (data.overlong=truncate)",
    "split": "longer than data.max_length; several documents now (data.overlong=split)",
    "role_order": "roles out of order",
    "empty_turn": "an empty turn",
    "last_turn": "the last turn is not the assistant's: nothing follows it to train on",
    "special_tokens": "text that spells a special token; read as plain text (data.special_tokens=escape)",
    "special_tokens_kept": "text that spells a special token, and became one (data.special_tokens=keep)",
    "end_token": "an answer that closes with an end token of its own; cut off, the template writes one",
    "undecodable": "characters lost in an earlier decoding (U+FFFD), NUL, or half a surrogate pair",
    "mojibake": "text that was decoded wrongly (UTF-8 read as another encoding), such as Ã© for é",
    "escaped": "text that was escaped once too often: \\n, \\u00e9 or &quot; stands in it letter by letter",
    "unknown_token": "text that the tokenizer has no token for: the model never sees it",
    "rendered": "text rendered for another model or in another format, such as <|im_start|>, [INST] or ### Response:",
    "echo": "an answer that begins with its whole question",
    "dialogue": "an answer that contains further turns (User: ... Assistant: ...)",
    "missing_value": "an answer that is only nan, None or null, as programs write a missing value",
    "placeholder": "a placeholder that was never filled in, such as {{name}}",
    "no_end": "tokens whose last target is not a special token: the model does not learn from them to stop",
    "prompt_thinks": "no reasoning content: generation begins after <think>, and these answers are trained without it",
    "same_answer": "the same answer as many other rows",
    "duplicate": "a row identical to an earlier one",
    "held_out_duplicate": "a row that is also held out; not trained",
}
"""What each kind of finding says of a row."""

_REFUSED_FROM = {
    "role_order": 0.9,
    "empty_turn": 0.9,
    "last_turn": 0.9,
    "special_tokens": 0.5,
    "placeholder": 0.9,
    "rendered": 0.9,
    "echo": 0.9,
    "dialogue": 0.9,
    "missing_value": 0.5,
    "same_answer": 0.9,
    "duplicate": 0.9,
    "held_out_duplicate": 0.9,
    # Only some rows have line breaks or quotes that can be escaped, and fewer have letters beyond ASCII.
    "escaped": 0.5,
    "mojibake": 0.1,
    "undecodable": 0.1,
    "unknown_token": 0.5,
}
"""The fraction of a source's rows from which a finding stops the run: the rows were made wrongly."""

_REPORTED_FROM = {"dialogue": 0.2}
"""The fraction of a source's rows from which a finding is reported: single rows are often meant so."""

_FEWEST_ROWS = 10
"""Rows of a source that say something about how all of them were made."""

_EXAMPLES = 5


@dataclass
class Findings:
    """How often each kind was found in each source, and in which rows first."""

    counts: Counter[tuple[str, int]] = field(default_factory=Counter)
    """By kind and number of the source."""

    rows: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    """The first rows, by kind and number of the source."""

    def add(self, kind: str, source: int, row: int, count: int = 1) -> None:
        """Note a row, or several of which this is the first."""
        self.counts[kind, source] += count
        self.rows[kind, source] = [*self.rows.get((kind, source), []), row][:_EXAMPLES]

    def merge(self, other: Findings) -> None:
        """Add what was found in later rows."""
        self.counts += other.counts
        for key, rows in other.rows.items():
            self.rows[key] = (self.rows.get(key, []) + rows)[:_EXAMPLES]

    def as_json(self, names: Sequence[str], file_starts: Sequence[Any], rows_in: Sequence[int]) -> list[dict[str, Any]]:
        """The findings as ledger.json has them, the most frequent first.

        Args:
            names: The sources' names.
            file_starts: Where the files of each source start.
            rows_in: Rows of each source.
        """
        found = []
        for kind in dict.fromkeys(kind for kind, _ in self.counts):
            counts = {source: count for (of, source), count in sorted(self.counts.items()) if of == kind}
            worst = max(counts, key=lambda source: counts[source] / max(rows_in[source], 1))
            places = [
                place(names[source], file_starts[source], row) for source in counts for row in self.rows[kind, source]
            ]
            if counts[worst] >= _REPORTED_FROM.get(kind, 0) * rows_in[worst]:
                found.append(
                    {
                        "kind": kind,
                        "meaning": MEANING[kind],
                        "count": sum(counts.values()),
                        "most": {"source": names[worst], "count": counts[worst], "rows": rows_in[worst]},
                        "rows": places[:_EXAMPLES],
                    }
                )
        return sorted(found, key=lambda finding: -finding["count"])


def check_findings(findings: list[dict[str, Any]], data: Data) -> None:
    """Refuse what nearly all rows of a source have, if it can only be a mistake.

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
        lines = ["Too many rows of a source share a fault, so they were most likely made wrongly:", *refused.values()]
        raise DataError(
            "\n".join(lines) + "\nLook at them with --show and correct them. If it is meant, set "
            f"data.allow=[{', '.join([*data.allow, *refused])}]."
        )


def find_in_all(documents: np.ndarray, mixture: Mixture, findings: Findings) -> None:
    """Add what only all rows together show: duplicates, and one answer to most questions.

    Args:
        documents: Of sft.data.store.DOCUMENT.
        mixture: What becomes of them.
        findings: What was found so far; added to.
    """
    first = first_documents(documents)
    rows = documents[first]
    duplicate = np.isin(first, mixture.duplicate_rows)
    for kind, which in (("duplicate", duplicate), ("held_out_duplicate", mixture.dropped["held_out"][first])):
        for row in rows[which]:
            findings.add(kind, int(row["source"]), int(row["row"]))
    for source in np.unique(rows["source"]):
        own = rows[rows["source"] == source]
        _, at, times = np.unique(own["answer"], return_index=True, return_counts=True)
        if len(own) >= 20 and times.max() > len(own) / 2:
            findings.add("same_answer", int(source), int(own["row"][at[times.argmax()]]), int(times.max()))


# In one row

_PLACEHOLDER = re.compile(r"\{\{\s*[A-Za-z_]\w*\s*\}\}")
_UNDECODABLE = re.compile("[\ufffd\x00\ud800-\udfff]")
_CONTINUES = "\x80-\xbf" + bytes(range(0x80, 0xA0)).decode("cp1252", "ignore")
"""The second and later bytes of a UTF-8 character, read as Latin-1 or cp1252."""

_NO_QUOTES = (
    "".join(c for c in map(chr, range(0x80, 0xC0)) if unicodedata.category(c) not in ("Pi", "Pf", "Zs"))
    + "€ƒ†‡Š‰ŒŽ•™šœžŸ"
)
"""Those of them that close no quotation and no word: »Spaß«, CAFÉ…"""

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
"""Special tokens of other models, which this one's tokenizer may not know."""

_OTHER_FORMAT = re.compile(
    r"\[/?INST\]|<<SYS>>|###\s*(?:Instruction|Response|Human|Assistant)\b"
    r"|\A\s*(?:Human|User|Assistant):\s|\n(?:Human|User):\s*\Z"
)
"""A prompt format inside a turn, which the chat template would wrap once more."""

_MISSING = {"nan", "NaN", "NAN", "None", "null", "NULL", "<NA>", "undefined"}
_SHORTEST_ECHO = 20
"""Characters of a question that no answer begins with by chance."""

_CAN_FOLLOW = {
    "start": {"system", "developer", "user"},
    "system": {"developer", "user"},
    "developer": {"user"},
    "user": {"assistant"},
    "assistant": {"user"},
    "call": {"tool"},
    "tool": {"tool", "assistant"},
}


def found_in_row(example: Example, special_tokens: SpecialTokens, escape: bool) -> list[str]:
    """The kinds of findings of one row.

    Args:
        example: The row before anything is cut off.
        special_tokens: Of the tokenizer.
        escape: Whether special tokens in it become plain text.
    """
    if isinstance(example, Text):
        answer = special_tokens.without_end(example.completion) if escape else example.completion
        found = ["end_token"] if answer != example.completion else []
        found += _found_in_texts([example.prompt + answer], special_tokens, escape)
        return found + _found_in_written([example.prompt, answer]) + _found_in_answers([(example.prompt, answer)])
    return _found_in_conversation(example, special_tokens, escape) if isinstance(example, Conversation) else []


def _found_in_conversation(example: Conversation, special_tokens: SpecialTokens, escape: bool) -> list[str]:
    messages = example.messages
    contents = [
        special_tokens.without_end(message["content"])
        if escape and message["role"] == "assistant"
        else message["content"]
        for message in messages
    ]
    found = []
    if not _roles_in_order(messages):
        found.append("role_order")
    if any(not message["content"].strip() and not message.get("tool_calls") for message in messages):
        found.append("empty_turn")
    if messages and messages[-1]["role"] != "assistant":
        found.append("last_turn")
    if any(content != message["content"] for content, message in zip(contents, messages, strict=True)):
        found.append("end_token")
    elsewhere = [
        {key: value for key, value in message.items() if key not in ("role", "content")} for message in messages
    ]
    # Templates that quote arguments get them parsed, and then an escape in the JSON is a character.
    arguments = [call["function"].get("arguments") for message in messages for call in message.get("tool_calls") or []]
    parsed = [_parsed(given) for given in arguments if isinstance(given, str) and "\\" in given]
    texts = contents + _strings([elsewhere, parsed, example.tools, example.template_arguments])
    found += _found_in_texts(texts, special_tokens, escape)
    # The result of a tool is often JSON, which has escapes.
    found += _found_in_written([message["content"] for message in messages if message["role"] != "tool"])
    before = [{"content": ""}, *messages]
    found += _found_in_answers(
        [
            (question["content"], answer["content"])
            for question, answer in pairwise(before)
            if answer["role"] == "assistant"
        ]
    )
    known = {"special_tokens", "special_tokens_kept", "rendered"} & set(found)
    return found if known or not any(map(_OTHER_FORMAT.search, contents)) else [*found, "rendered"]


def _roles_in_order(messages: list[Message]) -> bool:
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


def _strings(value: Any) -> list[str]:
    """Every string in a nested value, keys included."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for key, inner in value.items() for text in (key, *_strings(inner))]
    return [text for inner in value for text in _strings(inner)] if isinstance(value, list) else []


def _found_in_texts(texts: list[str], special_tokens: SpecialTokens, escape: bool) -> list[str]:
    found = []
    if any(map(special_tokens.found_in, texts)):
        found.append("special_tokens" if escape else "special_tokens_kept")
    elif any(map(_FOREIGN.search, texts)):
        found.append("rendered")
    if any(map(_UNDECODABLE.search, texts)):
        found.append("undecodable")
    if any(not text.isascii() and _MOJIBAKE.search(text) for text in texts):
        found.append("mojibake")
    if any("{{" in text and _PLACEHOLDER.search(text) for text in texts):
        found.append("placeholder")
    return found


def _found_in_written(texts: list[str]) -> list[str]:
    # Text with line breaks of its own is code, or about it; JSON has escapes of its own.
    suspect = [text for text in texts if ("\\" in text or "&" in text) and "\n" not in text]
    found = any(text.lstrip()[:1] not in ("{", "[") and _ESCAPED.search(text) for text in suspect)
    return ["escaped"] if found else []


def _found_in_answers(pairs: list[tuple[str, str]]) -> list[str]:
    """What is found in answers, each with the question before it."""
    found = ["missing_value"] if any(answer.strip() in _MISSING for _, answer in pairs) else []
    questions = [(question.strip(), answer.lstrip()) for question, answer in pairs]
    if any(len(question) >= _SHORTEST_ECHO and answer.startswith(question) for question, answer in questions):
        found.append("echo")
    # A text without a question may be a whole conversation.
    if any(
        question and "\nAssistant:" in answer and ("\nUser:" in answer or "\nHuman:" in answer)
        for question, answer in pairs
    ):
        found.append("dialogue")
    return found
