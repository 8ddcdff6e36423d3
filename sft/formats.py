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

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sft.errors import DataError
from sft.recipe import Data, Source
from sft.turns import Message, is_trained, parsed, text_of, to_turn, without_reasoning

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


def _messages(value: Any, name: str) -> tuple[list[Message], list[bool]]:
    value = parsed(value, f"`{name}`") if isinstance(value, str) else value
    if not isinstance(value, list | None):
        raise ValueError(f"`{name}` is of type {type(value).__name__}, not a list of messages")
    turns = [to_turn(message) for message in value or []]
    return turns, [
        turn["role"] == "assistant" and is_trained(message) for turn, message in zip(turns, value or [], strict=True)
    ]


def _alpaca(row: Row) -> list[Message]:
    answer = row["output"] if row.get("output") is not None else row.get("response")
    question = "\n".join(part for part in (text_of(row["instruction"]), text_of(row.get("input"))) if part)
    turns: list[Message] = []
    for asked, answered in row.get("history") or []:
        turns += [{"role": "user", "content": text_of(asked)}, {"role": "assistant", "content": text_of(answered)}]
    return [*turns, {"role": "user", "content": question}, {"role": "assistant", "content": text_of(answer)}]


def _side(value: Any, name: str, role: str) -> tuple[list[Message], list[bool]]:
    """Prompt or completion: text is one turn, a list is several."""
    if isinstance(value, str | None):
        return [{"role": role, "content": text_of(value)}], [role == "assistant"]
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
        return Text("", text_of(row["text"]))
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
            return Text(text_of(prompt), text_of(completion))
        asked, asked_trained = _side(prompt, "prompt", "user")
        answered, answered_trained = _side(completion, "completion", "assistant")
        messages, trained, prompt_turns = [*asked, *answered], [*asked_trained, *answered_trained], len(asked)
        if data.loss_on == "auto":
            trained[:prompt_turns] = [False] * prompt_turns
    if row.get("system") and not any(message["role"] == "system" for message in messages):
        messages, trained = [{"role": "system", "content": text_of(row["system"])}, *messages], [False, *trained]
        prompt_turns += 1
    if data.loss_on == "completion":
        trained[:prompt_turns] = [False] * prompt_turns
    elif data.loss_on == "last_assistant":
        last = max((index for index, turn in enumerate(messages) if turn["role"] == "assistant"), default=-1)
        trained = [keep and index == last for index, keep in enumerate(trained)]
    if data.reasoning == "drop":
        messages = [without_reasoning(message) for message in messages]
    tools = row.get("tools") or None
    tools = parsed(tools, "`tools`") if isinstance(tools, str) else tools
    if not isinstance(tools, list | None):
        raise ValueError(f"`tools` is of type {type(tools).__name__}, not a list")
    arguments = row.get("chat_template_kwargs") or {}
    return Conversation(messages, tools or None, trained, dict(arguments))
