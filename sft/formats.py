"""Rows of the formats that people have, turned into what is rendered: a conversation, plain text, or tokens.

| format            | columns                                                             |
|-------------------|---------------------------------------------------------------------|
| messages          | messages: [{role, content}]; tools, system: optional                |
| sharegpt          | conversations: [{from, value}]; tools, system: optional             |
| prompt_completion | prompt, completion: strings or lists of messages; tools: optional   |
| alpaca            | instruction, output (or response); input, system, history: optional |
| tokens            | input_ids; labels: optional, -100 where nothing is trained          |
| text              | text                                                                |

Plain Python, no torch: the launcher reads the first rows of a file here before any rank starts.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sft.errors import DataError
from sft.recipe import Data, Source

Message = dict[str, Any]
Row = dict[str, Any]

FORMATS = {
    "messages": {"messages"},
    "sharegpt": {"conversations"},
    "prompt_completion": {"prompt", "completion"},
    "alpaca": {"instruction", "output"},
    "tokens": {"input_ids"},
    "text": {"text"},
}
"""In the order in which they are looked for: a file of alpaca rows may have a rendered `text` beside."""

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "system": "system",
    "observation": "tool",
    "tool": "tool",
    "function": "tool",
    "developer": "developer",
}
_WEIGHTS = ("weight", "loss_weight", "train")
"""What other programs call the switch that takes a turn out of the loss."""


@dataclass(frozen=True)
class Conversation:
    """Turns, and which of them are trained."""

    messages: list[Message]
    tools: list[Any] | None
    trained: list[bool]
    """Whether the loss falls on a message, one for each."""

    template_arguments: dict[str, Any] = field(default_factory=dict)
    """What the row itself gives its chat template, such as enable_thinking."""


@dataclass(frozen=True)
class Text:
    """Text as it stands: the completion is trained and ended by the EOS token."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Tokens:
    """A row that was tokenized elsewhere."""

    input_ids: list[int]
    labels: list[int] | None


Example = Conversation | Text | Tokens


def renamed(row: Row, source: Source) -> Row:
    """The row with the columns under our names; the ones they come from are gone."""
    if not source.columns:
        return row
    taken = set(source.columns.values())
    kept = {name: value for name, value in row.items() if name not in taken}
    return kept | {ours: row[theirs] for ours, theirs in source.columns.items() if theirs in row}


def common_columns(rows: Sequence[Row]) -> set[str]:
    """The columns that at least half of the rows have."""
    counts = Counter(name for row in rows for name in row)
    return {name for name, count in counts.items() if 2 * count >= len(rows)}


def row_format(columns: set[str], source: Source) -> str:
    """Which of FORMATS the rows of a source are.

    Args:
        columns: Of the first rows, as they are in the file.
        source: May rename columns, or state the format.

    Raises:
        DataError: None, or not the stated one; the message names the columns that were found.
    """
    missing = [theirs for theirs in source.columns.values() if theirs not in columns]
    if missing:
        raise DataError(
            f"data.train: {source.path} has no column {', '.join(missing)}, which `columns` names. Found: "
            f"{', '.join(sorted(columns)) or 'none'}."
        )
    names = set(renamed(dict.fromkeys(columns), source))
    if "response" in names:
        names.add("output")
    if source.format is not None:
        lacking = FORMATS[source.format] - names
        if lacking:
            raise DataError(
                f"data.train: {source.path} is said to be {source.format}, and has no {', '.join(sorted(lacking))}. Found: "
                f"{', '.join(sorted(columns)) or 'none'}. Name the columns with `columns`, or leave `format` out."
            )
        return source.format
    if {"chosen", "rejected"} <= names:
        raise DataError(
            f"{source.path} is preference data (columns chosen and rejected), which is trained otherwise (DPO). To fine-tune on the "
            "chosen answers, name them: columns: {completion: chosen}, format: prompt_completion."
        )
    for name, needed in FORMATS.items():
        if needed <= names:
            return name
    known = "; ".join(" + ".join(f"`{column}`" for column in sorted(needed)) for needed in FORMATS.values())
    raise DataError(
        f"{source.path} has no usable columns. Found: {', '.join(sorted(columns)) or 'none'}. Usable: {known}. "
        "Rename the columns to one of these, or name them in the recipe (`columns` of the source)."
    )


def _text(content: Any) -> str:
    """A message's content as text: a string, or a list of text parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        kinds = sorted(
            {str(part.get("type")) if isinstance(part, dict) else type(part).__name__ for part in content} - {"text"}
        )
        parts = [part.get("text", part.get("value")) for part in content if isinstance(part, dict)]
        if kinds or not all(isinstance(part, str | None) for part in parts):
            raise ValueError(f"content has parts of type {', '.join(kinds) or 'text'}; only text parts can be trained")
        return "".join(part for part in parts if part)
    raise ValueError(f"content is of type {type(content).__name__}, not text")


def _parsed(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{what} is no JSON ({error}): {text[:80]!r}") from None


def _call(call: Any) -> Any:
    """A tool call in OpenAI's form."""
    if not isinstance(call, dict) or "name" not in call.get("function", call):
        raise ValueError(f"a tool call has no name: {json.dumps(call, ensure_ascii=False, default=str)[:80]}")
    return call if "function" in call else {"type": "function", "function": call}


def _take_parts(content: Any) -> tuple[Any, str, list[Any]]:
    """A content list without its thoughts and tool calls, and those two."""
    if not isinstance(content, list):
        return content, "", []
    rest, thoughts, calls = [], [], []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("reasoning", "thinking"):
            thoughts.append(_text(part.get("value", part.get("text", part.get("thinking")))))
        elif kind == "tool_call":
            value = part.get("value", part.get("tool_call"))
            value = _parsed(value, "a tool call") if isinstance(value, str) else value
            calls += [_call(call) for call in (value if isinstance(value, list) else [value])]
        else:
            rest.append(part)
    return rest, "".join(thoughts), calls


def _turn(message: Any) -> Message:
    """One message in the one form: role, content, and what else templates read."""
    if isinstance(message, dict) and "role" not in message and {"from", "value"} <= set(message):
        message = {"role": message["from"], "content": message["value"]} | message
    if not isinstance(message, dict) or "role" not in message:
        raise ValueError(f"a message has no `role`: {json.dumps(message, ensure_ascii=False, default=str)[:80]}")
    role = ROLES.get(str(message["role"]))
    if role is None:
        raise ValueError(f"unknown role {message['role']!r}; known: {', '.join(sorted(ROLES))}")
    if message["role"] == "function_call":
        calls = _parsed(_text(message.get("content")), "a function call")
        calls = calls if isinstance(calls, list) else [calls]
        return {"role": role, "content": "", "tool_calls": [_call(call) for call in calls]}
    content, thoughts, calls = _take_parts(message.get("content"))
    turn: Message = {"role": role, "content": _text(content)}
    # Columnar files give every message every key, null where it has none; a template must not see those.
    turn |= {key: message[key] for key in ("name", "tool_call_id") if message.get(key)}
    calls = [_call(call) for call in message.get("tool_calls") or []] or calls
    if calls:
        turn["tool_calls"] = calls
    for key in ("reasoning_content", "reasoning", "thinking"):
        thoughts = thoughts or _text(message.get(key))
    if thoughts:
        turn["reasoning_content"] = thoughts
    return turn


def _is_trained(message: Any) -> bool:
    """Whether the row itself takes this turn out of the loss."""
    for key in _WEIGHTS:
        weight = message.get(key) if isinstance(message, dict) else None
        if weight is not None and weight not in (0, 1):
            raise ValueError(f"`{key}` of a message is {weight!r}: only 0 and 1 (not trained, trained) are known")
        if weight == 0:
            return False
    return True


def _messages(value: Any, name: str) -> tuple[list[Message], list[bool]]:
    value = _parsed(value, f"`{name}`") if isinstance(value, str) else value
    if not isinstance(value, list | None):
        raise ValueError(f"`{name}` is of type {type(value).__name__}, not a list of messages")
    turns = [_turn(message) for message in value or []]
    return turns, [
        turn["role"] == "assistant" and _is_trained(message) for turn, message in zip(turns, value or [], strict=True)
    ]


def _alpaca(row: Row) -> list[Message]:
    answer = row["output"] if row.get("output") is not None else row.get("response")
    question = "\n".join(part for part in (_text(row.get("instruction")), _text(row.get("input"))) if part)
    turns: list[Message] = []
    for asked, answered in row.get("history") or []:
        turns += [{"role": "user", "content": _text(asked)}, {"role": "assistant", "content": _text(answered)}]
    return [*turns, {"role": "user", "content": question}, {"role": "assistant", "content": _text(answer)}]


def _side(value: Any, name: str, role: str) -> tuple[list[Message], list[bool]]:
    """Prompt or completion: text is one turn, a list is several."""
    if isinstance(value, str | None):
        return [{"role": role, "content": _text(value)}], [role == "assistant"]
    return _messages(value, name)


def _whole_numbers(value: Any, name: str) -> list[int]:
    if not isinstance(value, list) or not all(type(number) is int for number in value):
        raise ValueError(f"`{name}` is not a list of whole numbers")
    return value


def _tokens(row: Row) -> Tokens:
    input_ids = _whole_numbers(row["input_ids"], "input_ids")
    labels = _whole_numbers(row["labels"], "labels") if row.get("labels") is not None else None
    if labels is not None and len(labels) != len(input_ids):
        raise ValueError(f"`labels` has {len(labels)} numbers, and `input_ids` {len(input_ids)}")
    return Tokens(input_ids, labels)


def to_example(row: Row, format: str, data: Data, source: Source) -> Example:
    """One row as what is rendered.

    Args:
        row: Under our names (`renamed`).
        format: Of FORMATS.
        data: Says which turns are trained, and what happens to reasoning.
        source: Says whether text goes through the chat template.

    Raises:
        ValueError: The row is not of that format; the text says where.
        KeyError: A column is missing.
    """
    if format == "tokens":
        return _tokens(row)
    if format == "text":
        return Text("", _text(row["text"]))
    prompt_turns = 0
    if format in ("messages", "sharegpt"):
        name = "messages" if format == "messages" else "conversations"
        messages, trained = _messages(row[name], name)
    elif format == "alpaca":
        messages = _alpaca(row)
        trained, prompt_turns = [turn["role"] == "assistant" for turn in messages], len(messages) - 1
    else:
        prompt, completion = row["prompt"], row["completion"]
        if not source.chat:
            return Text(_text(prompt), _text(completion))
        asked, asked_trained = _side(prompt, "prompt", "user")
        answered, answered_trained = _side(completion, "completion", "assistant")
        messages, trained, prompt_turns = [*asked, *answered], [*asked_trained, *answered_trained], len(asked)
        if data.loss_on == "auto":
            trained[:prompt_turns] = [False] * prompt_turns
    if row.get("system") and not any(message["role"] == "system" for message in messages):
        messages, trained = [{"role": "system", "content": _text(row["system"])}, *messages], [False, *trained]
        prompt_turns += 1
    if data.loss_on == "completion":
        trained[:prompt_turns] = [False] * prompt_turns
    elif data.loss_on == "last_assistant":
        last = max((index for index, turn in enumerate(messages) if turn["role"] == "assistant"), default=-1)
        trained = [keep and index == last for index, keep in enumerate(trained)]
    if data.reasoning == "drop":
        messages = [without_reasoning(message) for message in messages]
    tools = row.get("tools") or None
    tools = _parsed(tools, "`tools`") if isinstance(tools, str) else tools
    if not isinstance(tools, list | None):
        raise ValueError(f"`tools` is of type {type(tools).__name__}, not a list")
    arguments = row.get("chat_template_kwargs") or {}
    return Conversation(messages, tools or None, trained, dict(arguments))


_THOUGHT = re.compile(r"^\s*<think>.*?</think>\s*", re.DOTALL)


def without_reasoning(message: Message) -> Message:
    """A turn without its thoughts.

    >>> without_reasoning({"role": "assistant", "content": "<think>2 + 2</think>Four", "reasoning_content": "2 + 2"})
    {'role': 'assistant', 'content': 'Four'}
    """
    if message["role"] != "assistant":
        return message
    turn = {key: value for key, value in message.items() if key != "reasoning_content"}
    return turn | {"content": _THOUGHT.sub("", turn["content"])}
