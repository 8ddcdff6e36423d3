"""Turns rows of the common dataset formats into what is rendered: a conversation, plain text, or tokens.

To add a format, write a function that reads a row and add it to FORMATS. `Source.format` and `Column` in sft/recipe/data.py list the names
of formats and of their columns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from sft.data.conversation import (
    Message,
    is_trained,
    message_without_reasoning,
    parsed,
    text_of,
    to_message,
    without_reasoning,
)
from sft.data.readers import Row
from sft.errors import DataError
from sft.recipe.schema import Data, Source

IGNORED = -100
"""The label of a token that is not a target."""

_UNSUPPORTED = {
    "images": "images are not supported",
    "videos": "videos are not supported",
    "audios": "audio is not supported",
    "functions": "name the column in the recipe: columns: {tools: functions}",
}
_ROW_WEIGHTS = ("weight", "loss_weight", "sample_weight")
_PREFERENCE_LABELS = ("label", "kto_tag")
_LOSS_MASKS = ("completion_mask", "assistant_masks", "loss_mask")
_RESERVED = (
    "messages tools documents chat_template tokenize add_generation_prompt continue_final_message "
    "return_assistant_tokens_mask strftime_now"
).split()
"""Variables of a chat template that a row may not set."""


@dataclass(frozen=True)
class Conversation:
    """Messages, and which of them are trained."""

    messages: list[Message]
    tools: list[Any] | None
    trained: list[bool]
    """Whether each message is trained."""

    template_arguments: dict[str, Any] = field(default_factory=dict)
    """The row's own variables for its chat template, such as enable_thinking."""


@dataclass(frozen=True)
class Text:
    """Plain text: the completion is trained and ended by the EOS token."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Tokens:
    """A row that came tokenized."""

    input_ids: list[int]
    labels: list[int]
    """Not shifted; IGNORED where a token is not a target."""


Example = Conversation | Text | Tokens
Turns = tuple[list[Message], list[bool]]
"""Messages, and whether each is trained."""


@dataclass(frozen=True)
class Format:
    """One kind of rows."""

    columns: set[str]
    """A row has all of these."""

    optional: set[str]
    """Columns that it reads too; any other is reported as unread."""

    read: Callable[[Row, Data, Source], Example]
    has_completion: bool = False
    """Whether the answer is apart from the prompt, as data.loss_on=completion needs."""


# What each format reads


def _turns_row(column: str) -> Callable[[Row, Data, Source], Example]:
    return lambda row, data, source: _conversation(row, data, _messages(row[column], column))


def _prompt_completion_row(row: Row, data: Data, source: Source) -> Example:
    if not source.chat:
        beside = [name for name in ("system", "tools") if row.get(name)]
        if beside:
            raise ValueError(f"it has {' and '.join(beside)}, which `chat: false` leaves no place for")
        completion = text_of(row["completion"])
        return Text(text_of(row["prompt"]), without_reasoning(completion) if data.reasoning == "drop" else completion)
    prompt, prompt_trained = _side(row["prompt"], "prompt", "user")
    answers, answers_trained = _side(row["completion"], "completion", "assistant")
    if data.loss_on == "auto":
        prompt_trained = [False] * len(prompt)
    return _conversation(row, data, (prompt + answers, prompt_trained + answers_trained), len(prompt))


def _alpaca_row(row: Row, data: Data, source: Source) -> Example:
    answer = row["output"] if row.get("output") is not None else row.get("response")
    question = "\n".join(filter(None, (text_of(row["instruction"]), text_of(row.get("input")))))
    history = row.get("history") or []
    if not isinstance(history, list) or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in history):
        raise ValueError("`history` is not a list of pairs of question and answer")
    messages: list[Message] = []
    for asked, answered in [*history, (question, answer)]:
        messages += [{"role": "user", "content": text_of(asked)}, {"role": "assistant", "content": text_of(answered)}]
    return _conversation(row, data, (messages, [False, True] * (len(messages) // 2)), len(messages) - 1)


def _tokens_row(row: Row, data: Data, source: Source) -> Example:
    labels = row["input_ids"] if row.get("labels") is None else row["labels"]
    for name, numbers in (("input_ids", row["input_ids"]), ("labels", labels)):
        if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
            raise ValueError(f"`{name}` is not a list of whole numbers")
    if len(labels) != len(row["input_ids"]):
        raise ValueError(f"`labels` has {len(labels)} numbers, and `input_ids` {len(row['input_ids'])}")
    if 0 in (row.get("attention_mask") or ()):
        raise ValueError("its `attention_mask` has zeros, so it is padded. Remove the padding")
    if any(after <= before for before, after in pairwise(row.get("position_ids") or ())):
        raise ValueError("its `position_ids` start again, so it is packed already. Give each document a row of its own")
    mask = next((name for name in _LOSS_MASKS if row.get(name) is not None and row.get("labels") is None), None)
    if mask is not None:
        raise ValueError(f"it has `{mask}` and no `labels`. Give `labels`, with -100 where nothing is trained")
    return Tokens(row["input_ids"], labels)


def _text_row(row: Row, data: Data, source: Source) -> Example:
    return Text("", text_of(row["text"]))


# Columns that any conversation may have.
_BESIDE = {"system", "tools", "chat_template_kwargs"}
FORMATS = {
    "messages": Format({"messages"}, _BESIDE, _turns_row("messages")),
    "sharegpt": Format({"conversations"}, _BESIDE, _turns_row("conversations")),
    "prompt_completion": Format({"prompt", "completion"}, _BESIDE, _prompt_completion_row, has_completion=True),
    "alpaca": Format(
        {"instruction", "output"}, {"input", "response", "history", *_BESIDE}, _alpaca_row, has_completion=True
    ),
    "tokens": Format({"input_ids"}, {"labels", "attention_mask", "position_ids", *_LOSS_MASKS}, _tokens_row),
    "text": Format({"text"}, set(), _text_row),
}
"""The first whose columns the rows have is taken; `text` is last, since alpaca rows often have a rendered `text` too."""


# Which format


def renamed(row: Row, source: Source) -> Row:
    """The row with the columns under our names; those they come from are gone."""
    if not source.columns:
        return row
    taken = set(source.columns.values())
    kept = {name: value for name, value in row.items() if name not in taken}
    return kept | {ours: row[theirs] for ours, theirs in source.columns.items() if theirs in row}


def row_format(rows: Sequence[Row], source: Source) -> str:
    """Which of FORMATS the rows of a source are: by the columns that at least half of its first rows have.

    Raises DataError where it is none, or not the one that the recipe states; the message lists the columns.
    """
    counts = Counter(name for row in rows for name in row)
    columns = {name for name, count in counts.items() if 2 * count >= len(rows)}
    found = ", ".join(sorted(columns)[:20]) or "none"
    wanted = Counter(source.columns.values())
    missing = [name for name in wanted if name not in counts]
    if missing:
        raise DataError(f"{source.path} has no column {', '.join(missing)}, which `columns` names. Found: {found}.")
    twice = [name for name, times in wanted.items() if times > 1]
    if twice:
        raise DataError(f"`columns` of {source.path} names {twice[0]} twice. Give each a column of its own.")
    ours = set(renamed(dict.fromkeys(columns), source))
    if "response" in ours:
        ours.add("output")
    if source.format is not None:
        lacking = FORMATS[source.format].columns - ours
        if lacking:
            raise DataError(
                f"{source.path} has format={source.format} and no {', '.join(sorted(lacking))}. Found: {found}. Name the columns with "
                "`columns`, or leave `format` out."
            )
        return source.format
    if {"chosen", "rejected"} <= ours:
        raise DataError(
            f"{source.path} is preference data (columns chosen and rejected) for DPO. To fine-tune on the chosen answers, where `chosen` "
            "is the answer alone, set columns: {completion: chosen}, format: prompt_completion."
        )
    for name, format in FORMATS.items():
        if format.columns <= ours:
            return name
    usable = "; ".join(" + ".join(f"`{name}`" for name in sorted(format.columns)) for format in FORMATS.values())
    raise DataError(
        f"{source.path} has no usable columns. Found: {found}. Usable: {usable}. Rename the columns, or name them with `columns` of the "
        "source."
    )


def unread_columns(rows: Sequence[Row], format: str, source: Source) -> list[str]:
    """The columns that nothing here reads."""
    columns = set(renamed({name: None for row in rows for name in row}, source))
    return sorted(columns - FORMATS[format].columns - FORMATS[format].optional - {*_UNSUPPORTED, *_ROW_WEIGHTS})


# One row


def to_example(row: Row, format: str, data: Data, source: Source) -> Example:
    """Convert one row. Raises ValueError where the row is not of that format; the message says where."""
    for name, why in _UNSUPPORTED.items():
        if row.get(name):
            raise ValueError(f"it has `{name}`: {why}")
    missing = FORMATS[format].columns - row.keys() - ({"output"} if "response" in row else set())
    if missing:
        names = ", ".join(map(repr, sorted(missing)))
        raise ValueError(f"it has no column {names}, as rows of the format {format} do, but {', '.join(row)}")
    for name in _PREFERENCE_LABELS if format not in ("tokens", "text") else ():
        if str(row.get(name)).lower() == "false":
            raise ValueError(
                f"its `{name}` is false, which marks an answer to avoid in preference data (KTO). Keep only the rows labelled true, or "
                "rename the column if it means something else"
            )
    return FORMATS[format].read(row, data, source)


def has_zero_weight(row: Row) -> bool:
    """Whether the row takes itself out of the loss. Raises ValueError where its weight is neither 0 nor 1.

    >>> has_zero_weight({"text": "Hi", "weight": "0.0"}), has_zero_weight({"text": "Hi", "weight": "12 kg"})
    (True, False)
    """
    weights = []
    for name in _ROW_WEIGHTS:
        if isinstance(row.get(name), list):
            raise ValueError(f"its `{name}` is a list: weights of single tokens are not supported. Use `labels`")
        try:
            weights.append(float(row[name]))
        except (KeyError, TypeError, ValueError, OverflowError):
            continue  # not a number, so a column about something else
        if weights[-1] not in (0, 1):
            raise ValueError(
                f"its `{name}` is {row[name]!r}; only 0 (not trained) and 1 (trained) are supported. Put rows to be seen more often into "
                "a source of their own with `epochs`, or rename the column if it is not a weight"
            )
    return 0 in weights


def _conversation(row: Row, data: Data, turns: Turns, prompt_turns: int = 0) -> Conversation:
    """The conversation of a row; its first `prompt_turns` turns are the prompt."""
    messages, trained = turns
    if row.get("system"):
        said = {message["content"] for message in messages if message["role"] == "system"}
        if said - {text_of(row["system"])}:
            raise ValueError("it has a system message and another one in the column `system`")
        if not said:
            messages = [{"role": "system", "content": text_of(row["system"])}, *messages]
            trained, prompt_turns = [False, *trained], prompt_turns + 1
    if data.loss_on == "completion":
        trained = [keep and index >= prompt_turns for index, keep in enumerate(trained)]
    elif data.loss_on == "last_assistant":
        last = max((index for index, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
        trained = [keep and index == last for index, keep in enumerate(trained)]
    if data.reasoning == "drop":
        messages = list(map(message_without_reasoning, messages))
    return Conversation(messages, _tools(row), trained, _template_arguments(row))


def _messages(value: Any, name: str) -> Turns:
    value = parsed(value, f"`{name}`")
    if not isinstance(value, list | None):
        raise ValueError(f"`{name}` is of type {type(value).__name__}, not a list of messages")
    messages = [to_message(given) for given in value or []]
    pairs = zip(messages, value or [], strict=True)
    return messages, [message["role"] == "assistant" and is_trained(given) for message, given in pairs]


def _side(value: Any, name: str, role: str) -> Turns:
    """A prompt or a completion: a text is one turn, a list several."""
    if isinstance(value, str | None):
        return [{"role": role, "content": text_of(value)}], [role == "assistant"]
    return _messages(value, name)


def _tools(row: Row) -> list[Any] | None:
    """The tools in OpenAI's form, which is what servers give the template."""
    tools = _typed(row, "tools", list) or []
    return [_tool(parsed(tool, "a tool")) for tool in tools] or None


def _typed(row: Row, name: str, kind: type) -> Any:
    """A column that may be JSON in a string; None if it is empty."""
    value = parsed(row.get(name) or None, f"`{name}`")
    if not isinstance(value, kind | None):
        raise ValueError(f"`{name}` is of type {type(value).__name__}, not a {kind.__name__}")
    return value


def _tool(tool: Any) -> Any:
    if not isinstance(tool, dict) or tool.get("type", "function") != "function":
        return tool
    if "function" not in tool and "name" in tool:
        tool = {"function": {key: value for key, value in tool.items() if key != "type"}}
    return {"type": "function"} | tool if "function" in tool else tool


def _template_arguments(row: Row) -> dict[str, Any]:
    arguments: dict[str, Any] = _typed(row, "chat_template_kwargs", dict) or {}
    reserved = sorted(name for name in arguments if name in _RESERVED or name.endswith("_token"))
    if reserved:
        raise ValueError(f"`chat_template_kwargs` sets {', '.join(reserved)}, which a row may not set")
    return arguments


def check_format(source: Source, format: str, data: Data) -> None:
    """Refuse (DataError) what data.loss_on or `chat` asks of a format that cannot give it."""
    if data.loss_on == "completion" and not FORMATS[format].has_completion:
        raise DataError(
            f"{source.path} is of the format {format}, which has no completion, and data.loss_on=completion. Set data.loss_on to "
            "assistant, last_assistant or all."
        )
    if not source.chat and format != "prompt_completion":
        raise DataError(
            f"{source.path} is of the format {format}, and chat=false is for rows of prompt and completion."
        )
