"""Finds what deserves a look in the rows: counted while they are prepared, reported with row numbers before every training."""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
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


@dataclass(frozen=True)
class Finding:
    """One kind of finding."""

    meaning: str
    """What it says of a row."""

    refused_from: float | None = None
    """The fraction of a source's rows from which it stops the run: the rows were made wrongly."""


FINDINGS = {
    "bad_row": Finding(
        "a row that cannot be read or rendered, or that data.refuse names; dropped (data.on_bad_row=drop)"
    ),
    "function": Finding("a row that data.function leaves out; dropped"),
    "zero_weight": Finding("a row of weight 0 (`weight`, `loss_weight`, `sample_weight`); dropped"),
    "no_answer": Finding("no answer to train on; dropped"),
    "no_target_tokens": Finding("no target token; dropped"),
    "too_long": Finding("longer than data.max_length; dropped"),
    "targets_past_max_length": Finding("no target token within data.max_length; dropped"),
    "truncated": Finding("longer than data.max_length; cut off at its end (data.overlong=truncate)"),
    "split": Finding("longer than data.max_length; several documents now (data.overlong=split)"),
    "role_order": Finding("roles out of order", 0.9),
    "empty_turn": Finding("an empty turn", 0.9),
    "last_turn": Finding("the last turn is not the assistant's: nothing follows it to train on", 0.9),
    "special_tokens": Finding("text that spells a special token; read as plain text (data.special_tokens=escape)", 0.5),
    "special_tokens_kept": Finding("text that spells a special token, and became one (data.special_tokens=keep)"),
    "end_token": Finding("an answer that closes with an end token of its own; cut off, the template writes one"),
    "undecodable": Finding("characters lost in an earlier decoding (U+FFFD), NUL, or half a surrogate pair", 0.1),
    # Only some rows have letters beyond ASCII, and line breaks or quotes that can be escaped.
    "mojibake": Finding("text that was decoded wrongly (UTF-8 read as another encoding), such as Ã© for é", 0.1),
    "escaped": Finding(
        "text that was escaped once too often: \\n, \\u00e9 or &quot; stands in it letter by letter", 0.5
    ),
    "unknown_token": Finding("text that the tokenizer has no token for: the model never sees it", 0.5),
    "rendered": Finding(
        "text rendered for another model or in another format, such as <|im_start|>, [INST] or ### Response:", 0.9
    ),
    "echo": Finding("an answer that begins with its whole question", 0.9),
    "dialogue": Finding("an answer that contains further turns (User: ... Assistant: ...)", 0.9),
    "missing_value": Finding("an answer that is only nan, None or null, as programs write a missing value", 0.5),
    "placeholder": Finding("a placeholder that was never filled in, such as {{name}}", 0.9),
    "no_end": Finding("tokens whose last target is not a special token: the model does not learn from them to stop"),
    "prompt_thinks": Finding(
        "no reasoning content: generation begins after <think>, and these answers are trained without it"
    ),
    "same_answer": Finding("the same answer as many other rows", 0.9),
    "duplicate": Finding("a row identical to an earlier one", 0.9),
    "held_out_duplicate": Finding("a row that is also held out; not trained", 0.9),
}

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
        """The findings as ledger.json has them, the most frequent first."""
        found = []
        for kind in dict.fromkeys(kind for kind, _ in self.counts):
            counts = {source: count for (of, source), count in sorted(self.counts.items()) if of == kind}
            worst = max(counts, key=lambda source: counts[source] / max(rows_in[source], 1))
            rows = [(source, row) for source in counts for row in self.rows[kind, source]][:_EXAMPLES]
            found.append(
                {
                    "kind": kind,
                    "meaning": FINDINGS[kind].meaning,
                    "count": sum(counts.values()),
                    "most": {"source": names[worst], "count": counts[worst], "rows": rows_in[worst]},
                    "rows": [place(names[source], file_starts[source], row) for source, row in rows],
                }
            )
        return sorted(found, key=lambda finding: -finding["count"])


def check_findings(findings: list[dict[str, Any]], data: Data) -> None:
    """Refuse what nearly all rows of a source have, if it can only be a mistake.

    Raises DataError where the recipe does not allow it; the message names the key.
    """
    allowed = (*data.allow, "duplicate") if data.deduplicate else data.allow
    refused = {}
    for finding in findings:
        kind, most = finding["kind"], finding["most"]
        limit = FINDINGS[kind].refused_from
        if kind in allowed or limit is None or most["rows"] < _FEWEST_ROWS or most["count"] < limit * most["rows"]:
            continue
        refused[kind] = (
            f"  {most['source']}: {most['count']} of {most['rows']} rows: {finding['meaning']} "
            f"({kind}; the first: {finding['rows'][0]})"
        )
    if refused:
        lines = ["Too many rows of a source share a fault, so they were most likely made wrongly:", *refused.values()]
        raise DataError(
            "\n".join(lines) + "\nLook at them with --show and correct them. If it is meant, set "
            f"data.allow=[{', '.join([*data.allow, *refused])}]."
        )


def find_in_all(documents: np.ndarray, mixture: Mixture, findings: Findings) -> None:
    """Add what only all rows together show: duplicates, and one answer to most questions."""
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
# Special tokens of other models, which this one's tokenizer may not know.
_FOREIGN = re.compile(
    r"<\|(?:im_start|im_end|eot_id|start_header_id|end_header_id|begin_of_text|user|assistant|system|end)\|>"
    r"|<(?:start|end)_of_turn>"
)
# A prompt format inside a turn, which the chat template would wrap once more.
_OTHER_FORMAT = re.compile(
    r"\[/?INST\]|<<SYS>>|###\s*(?:Instruction|Response|Human|Assistant)\b"
    r"|\A\s*(?:Human|User|Assistant):\s|\n(?:Human|User):\s*\Z"
)
_PATTERNS = (
    ("rendered", "texts", _FOREIGN),
    ("rendered", "turns", _OTHER_FORMAT),
    ("undecodable", "texts", re.compile("[\ufffd\x00\ud800-\udfff]")),
    ("mojibake", "not_ascii", _MOJIBAKE),
    ("placeholder", "texts", re.compile(r"\{\{\s*[A-Za-z_]\w*\s*\}\}")),
    ("escaped", "prose", _ESCAPED),
    ("missing_value", "answers", re.compile(r"\A\s*(?:nan|NaN|NAN|None|null|NULL|<NA>|undefined)\s*\Z")),
    ("dialogue", "replies", re.compile(r"\n(User|Human):(?s:.*)\nAssistant:|\nAssistant:(?s:.*)\n(User|Human):")),
)
"""Kind, where to look (`_places`), and what for."""

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
    """The kinds of findings of one row; with `escape`, special tokens in it become plain text."""
    found: list[str] = []
    if isinstance(example, Text):
        given, beside = [("user", example.prompt), ("assistant", example.completion)], []
    elif isinstance(example, Conversation):
        given, beside = [(one["role"], one["content"]) for one in example.messages], _strings_beside(example)
        found = _found_in_turns(example.messages)
    else:
        return []
    said = given
    if escape:
        said = [(role, special_tokens.without_end(text) if role == "assistant" else text) for role, text in given]
        found += ["end_token"] if said != given else []
    contents = [text for _, text in said]
    is_chat = isinstance(example, Conversation)
    texts = contents + beside if is_chat else ["".join(contents)]
    answers = [
        (before.strip(), text) for (_, before), (role, text) in pairwise([("", ""), *said]) if role == "assistant"
    ]
    places = _places(texts, contents if is_chat else [], said, answers)
    kinds = [kind for kind, where, pattern in _PATTERNS if any(map(pattern.search, places[where]))]
    if any(len(question) >= _SHORTEST_ECHO and answer.lstrip().startswith(question) for question, answer in answers):
        kinds.append("echo")
    if any(map(special_tokens.found_in, texts)):  # and that they are another model's is no news then
        found.append("special_tokens" if escape else "special_tokens_kept")
        kinds = [kind for kind in kinds if kind != "rendered"]
    return list(dict.fromkeys(found + kinds))


def _places(
    texts: list[str], turns: list[str], said: list[tuple[str, str]], answers: list[tuple[str, str]]
) -> dict[str, list[str]]:
    """Where the patterns look, of every string that a template may write and of what was said."""
    written = [text for role, text in said if role != "tool"]  # a tool's result is often JSON, which has escapes
    return {
        "texts": texts,
        "turns": turns,
        "not_ascii": [text for text in texts if not text.isascii()],
        # Text with line breaks of its own is code, or about it; JSON has escapes of its own.
        "prose": [text for text in written if "\n" not in text and text.lstrip()[:1] not in ("{", "[")],
        "answers": [answer for _, answer in answers],
        # An answer without a question may be a whole conversation.
        "replies": [answer for question, answer in answers if question],
    }


def _found_in_turns(messages: list[Message]) -> list[str]:
    kinds = {
        "role_order": not _roles_in_order(messages),
        "empty_turn": any(not message["content"].strip() and not message.get("tool_calls") for message in messages),
        "last_turn": bool(messages) and messages[-1]["role"] != "assistant",
    }
    return [kind for kind, is_found in kinds.items() if is_found]


def _roles_in_order(messages: list[Message]) -> bool:
    before = "start"
    for message in messages:
        role = message["role"]
        if role not in _CAN_FOLLOW[before]:
            return False
        before = "call" if role == "assistant" and message.get("tool_calls") else role
    return True


def _strings_beside(example: Conversation) -> list[str]:
    """What a template may write of a conversation beside the contents of its messages."""
    elsewhere: list[Any] = [example.tools, example.template_arguments]
    for message in example.messages:
        elsewhere.append({key: value for key, value in message.items() if key not in ("role", "content")})
        for call in message.get("tool_calls") or []:
            # Templates that quote arguments get them parsed, and then an escape in the JSON is a character.
            if isinstance(arguments := call["function"].get("arguments"), str) and "\\" in arguments:
                with suppress(ValueError):
                    elsewhere.append(json.loads(arguments))
    return _strings(elsewhere)


def _strings(value: Any) -> list[str]:
    """Every string in a nested value, keys included."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for key, inner in value.items() for text in (key, *_strings(inner))]
    return [text for inner in value for text in _strings(inner)] if isinstance(value, list) else []
