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
from itertools import pairwise
from typing import Any

from sft.data.turns import Message, is_trained, parsed, text_of, to_turn, without_reasoning, without_thoughts
from sft.errors import DataError
from sft.recipe.schema import Data, Source

Row = dict[str, Any]

IGNORED = -100
"""The label of a token that is not trained."""

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


def _listed(columns: set[str]) -> str:
    names = sorted(columns)
    return (", ".join(names[:12]) or "none") + (f" and {len(names) - 12} more" if len(names) > 12 else "")


def row_format(columns: set[str], source: Source, anywhere: set[str] | None = None) -> str:
    """Which of FORMATS the rows of a source are.

    Args:
        columns: Of most of the first rows, as they are in the file.
        source: May rename columns, or state the format.
        anywhere: Columns that any of the rows has, for those that few need.

    Raises:
        DataError: None, or not the stated one; the message names the columns that were found.
    """
    missing = [theirs for theirs in source.columns.values() if theirs not in columns | (anywhere or set())]
    if missing:
        raise DataError(
            f"data.train: {source.path} has no column {', '.join(missing)}, which `columns` names. Found: {_listed(columns)}."
        )
    twice = [theirs for theirs, count in Counter(source.columns.values()).items() if count > 1]
    if twice:
        raise DataError(
            f"data.train: `columns` of {source.path} names {', '.join(twice)} twice. Give each name a column of its own."
        )
    names = set(renamed(dict.fromkeys(columns), source))
    if "response" in names:
        names.add("output")
    if source.format is not None:
        lacking = FORMATS[source.format] - names
        if lacking:
            raise DataError(
                f"data.train: {source.path} is said to be {source.format}, and has no {', '.join(sorted(lacking))}. Found: "
                f"{_listed(columns)}. Name the columns with `columns`, or leave `format` out."
            )
        return source.format
    if {"chosen", "rejected"} <= names:
        raise DataError(
            f"{source.path} is preference data (columns chosen and rejected), which is trained otherwise (DPO). To fine-tune on the "
            "chosen answers, where `chosen` is the answer alone, name them: columns: {completion: chosen}, format: prompt_completion."
        )
    for name, needed in FORMATS.items():
        if needed <= names:
            return name
    known = "; ".join(" + ".join(f"`{column}`" for column in sorted(needed)) for needed in FORMATS.values())
    raise DataError(
        f"{source.path} has no usable columns. Found: {_listed(columns)}. Usable: {known}. "
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
    history = row.get("history") or []
    if not isinstance(history, list) or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in history):
        raise ValueError("`history` is not a list of pairs of question and answer")
    for asked, answered in history:
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


_MASKS = ("completion_mask", "assistant_masks", "loss_mask")
"""Columns beside `input_ids` that say which tokens are trained, where there are no labels."""


def _tokens(row: Row) -> Tokens:
    """A tokenized row, its masks made labels, its padding taken away."""
    input_ids = _whole_numbers(row["input_ids"], "input_ids")
    columns = {}
    for name in ("labels", "attention_mask", *_MASKS, "position_ids"):
        if row.get(name) is not None:
            columns[name] = _whole_numbers(row[name], name)
            if len(columns[name]) != len(input_ids):
                raise ValueError(f"`{name}` has {len(columns[name])} numbers, and `input_ids` {len(input_ids)}")
    labels = columns.get("labels")
    for name in _MASKS if labels is None else ():
        if name in columns:
            before = labels or input_ids
            labels = [label if keep else IGNORED for label, keep in zip(before, columns[name], strict=True)]
    seen = columns.get("attention_mask", [1] * len(input_ids))
    kept = [index for index, attended in enumerate(seen) if attended]
    positions = columns.get("position_ids") or range(len(input_ids))
    if any(positions[index] <= positions[before] for before, index in pairwise(kept)):
        raise ValueError(
            "its `position_ids` start again: it was packed elsewhere. Give each document a row; they are packed here"
        )
    return Tokens([input_ids[index] for index in kept], [labels[index] for index in kept] if labels else labels)


_FOR_OTHERS = {
    "images": "pictures are not trained",
    "videos": "films are not trained",
    "audios": "sound is not trained",
    "functions": "name the column: columns: {tools: functions}",
}
_RESERVED = {
    "messages",
    "tools",
    "documents",
    "chat_template",
    "tokenize",
    "add_generation_prompt",
    "continue_final_message",
    "return_assistant_tokens_mask",
    "strftime_now",
}


def _template_arguments(row: Row) -> dict[str, Any]:
    arguments = row.get("chat_template_kwargs") or {}
    arguments = (parsed(arguments, "`chat_template_kwargs`") or {}) if isinstance(arguments, str) else arguments
    if not isinstance(arguments, dict):
        raise ValueError(f"`chat_template_kwargs` is of type {type(arguments).__name__}, not an object")
    taken = sorted(name for name in arguments if name in _RESERVED or name.endswith("_token"))
    if taken:
        raise ValueError(f"`chat_template_kwargs` sets {', '.join(taken)}, which is not the row's to decide")
    return arguments


def _tools(row: Row) -> list[Any] | None:
    tools = row.get("tools") or None
    tools = parsed(tools, "`tools`") if isinstance(tools, str) else tools
    if not isinstance(tools, list | None):
        raise ValueError(f"`tools` is of type {type(tools).__name__}, not a list")
    return [_tool(parsed(tool, "a tool") if isinstance(tool, str) else tool) for tool in tools] if tools else None


def _tool(tool: Any) -> Any:
    """A tool in OpenAI's form, which is what servers give the template; a bare function is put into it."""
    if not isinstance(tool, dict) or tool.get("type", "function") != "function":
        return tool
    if "function" not in tool and "name" in tool:
        tool = {"function": {key: value for key, value in tool.items() if key != "type"}}
    return {"type": "function"} | tool if "function" in tool else tool


_ROW_WEIGHTS = ("weight", "loss_weight", "sample_weight")
"""What other programs call the weight of a whole row."""

_PREFERENCE_LABELS = ("label", "kto_tag")
"""What other programs call the column that tells wanted answers from unwanted ones."""


def has_zero_weight(row: Row) -> bool:
    """Whether the row takes itself out of the loss.

    Raises:
        ValueError: A weight other than 0 and 1.

    >>> has_zero_weight({"text": "Hi", "weight": "0.0"}), has_zero_weight({"text": "Hi", "weight": "12 kg"})
    (True, False)
    """
    weights = []
    for name in _ROW_WEIGHTS:
        if isinstance(row.get(name), list):
            raise ValueError(f"its `{name}` is a list: weights of single tokens are not known. Mask them with `labels`")
        try:
            weight = float(row[name])
        except (KeyError, TypeError, ValueError, OverflowError):
            continue  # no number: a column about something else
        if weight not in (0, 1):
            raise ValueError(
                f"its `{name}` is {row[name]!r}: only 0 and 1 (not trained, trained) are known. Put rows to be seen more often into a "
                "source of their own with `epochs`, or rename the column where it is no weight"
            )
        weights.append(weight)
    return 0 in weights


def _refuse_unwanted(row: Row) -> None:
    for name in _PREFERENCE_LABELS:
        if row.get(name) is False or str(row.get(name)).lower() == "false":
            raise ValueError(
                f"its `{name}` is false, which marks an answer to avoid in preference data (KTO); fine-tuning would teach it. Keep only "
                "the rows labelled true, or rename the column where it means something else"
            )


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
    for name, why in _FOR_OTHERS.items():
        if row.get(name):
            raise ValueError(f"it has `{name}`: {why}")
    if format == "tokens":
        return _tokens(row)
    if format == "text":
        return Text("", text_of(row["text"]))
    _refuse_unwanted(row)
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
            beside = [name for name in ("system", "tools") if row.get(name)]
            if beside:
                raise ValueError(f"it has {' and '.join(beside)}, which `chat: false` leaves no place for")
            answer = text_of(completion)
            return Text(text_of(prompt), without_thoughts(answer) if data.reasoning == "drop" else answer)
        asked, asked_trained = _side(prompt, "prompt", "user")
        answered, answered_trained = _side(completion, "completion", "assistant")
        messages, trained, prompt_turns = [*asked, *answered], [*asked_trained, *answered_trained], len(asked)
        if data.loss_on == "auto":
            trained[:prompt_turns] = [False] * prompt_turns
    system = next((message["content"] for message in messages if message["role"] == "system"), None)
    if row.get("system") and system not in (None, text_of(row["system"])):
        raise ValueError("it has a system message and another one in the column `system`")
    if row.get("system") and system is None:
        messages, trained = [{"role": "system", "content": text_of(row["system"])}, *messages], [False, *trained]
        prompt_turns += 1
    if data.loss_on == "completion":
        trained[:prompt_turns] = [False] * prompt_turns
    elif data.loss_on == "last_assistant":
        last = max((index for index, turn in enumerate(messages) if turn["role"] == "assistant"), default=-1)
        trained = [keep and index == last for index, keep in enumerate(trained)]
    if data.reasoning == "drop":
        messages = [without_reasoning(message) for message in messages]
    return Conversation(messages, _tools(row), trained, _template_arguments(row))


def unread_columns(columns: set[str], format: str, source: Source) -> list[str]:
    """The columns of the rows that nothing of ours looks at."""
    read = {
        "messages": {"messages", "system", "tools", "chat_template_kwargs"},
        "sharegpt": {"conversations", "system", "tools", "chat_template_kwargs"},
        "prompt_completion": {"prompt", "completion", "system", "tools", "chat_template_kwargs"},
        "alpaca": {"instruction", "input", "output", "response", "history", "system", "tools", "chat_template_kwargs"},
        "tokens": {"input_ids", "labels", "attention_mask", "position_ids", *_MASKS},
        "text": {"text"},
    }[format]
    return sorted(set(renamed(dict.fromkeys(columns), source)) - read - {*_FOR_OTHERS, *_ROW_WEIGHTS})
