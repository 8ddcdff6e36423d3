"""Reads one message of a conversation, however it is spelled, into the form that chat templates expect: OpenAI's."""

from __future__ import annotations

import json
import re
from hashlib import blake2b
from typing import Any

Message = dict[str, Any]

_SPELLINGS = {
    "system": ("system", "developer"),
    "user": ("user", "human"),
    "assistant": ("assistant", "gpt", "chatgpt", "bot", "model", "function_call"),
    "tool": ("tool", "function", "observation"),
}
ROLES = {spelling: role for role, spellings in _SPELLINGS.items() for spelling in spellings}
"""Our role for each name that rows give it, in lower case; rows may write it in any case."""

TEXT_KEYS = {"role": "content", "from": "value"}
"""For each key that names the speaker of a message, the key of what is said."""

_WEIGHTS = ("weight", "loss_weight", "train", "training", "loss")
"""Keys by which other programs take a turn out of the loss."""

_REASONING_PARTS = ("reasoning", "thinking")

# Also reasoning whose opening tag is part of the prompt.
_REASONING = re.compile(r"(?:<think>.*?|\A(?:(?!<think>).)*?)</think>\s*", re.DOTALL)


def parsed(value: Any, what: str) -> Any:
    """A value, or what the JSON in a string says.

    Raises ValueError where the string is not JSON; the message names `what`.
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(f"{what} is not JSON ({error}): {value[:80]!r}") from None


def text_of(content: Any) -> str:
    """A message's content as text: a string, or a list of text parts. Raises ValueError where it is something else."""
    if not isinstance(content, str | list | None):
        raise ValueError(f"content is of type {type(content).__name__}, not text")
    return "".join(map(_text_of_part, content)) if isinstance(content, list) else content or ""


def _text_of_part(part: Any) -> str:
    if _kind(part) != "text":
        raise ValueError(f"content has parts of type {_kind(part)}; only text parts can be trained")
    text = part["text"] if part.get("text") is not None else part.get("value")
    if not isinstance(text, str | None) or not {"text", "value"} & set(part):
        raise ValueError("content has a part of type text without a `text`")
    return text or ""


def _kind(part: Any) -> Any:
    return part.get("type") if isinstance(part, dict) else type(part).__name__


def to_message(given: Any) -> Message:
    """One message in OpenAI's form: role, content, and what else chat templates read.

    Raises ValueError where it has no role or an unknown one, or holds what cannot be trained.
    """
    keys = ((speaker, text) for speaker, text in TEXT_KEYS.items() if isinstance(given, dict) and speaker in given)
    speaker, text = next(keys, ("", ""))
    if not speaker:
        raise ValueError(f"a message has neither `{'` nor `'.join(TEXT_KEYS)}`: {_start_of(given)}")
    given = {"role": given[speaker]} | ({"content": given[text]} if text in given else {}) | given
    role = ROLES.get(str(given["role"]).lower())
    if role is None:
        raise ValueError(f"unknown role {given['role']!r}; known: {', '.join(sorted(ROLES))}")
    if given.get("train_detail"):
        raise ValueError("`train_detail` of a message trains parts of a turn, which is not supported")
    if str(given["role"]).lower() == "function_call":
        given = {"role": role, "tool_calls": parsed(text_of(given.get("content")), "a function call")}
    content, reasoning, calls = given.get("content"), "", []
    if isinstance(content, list):
        for part in content:
            if _kind(part) in _REASONING_PARTS:
                reasoning += text_of(part.get("value", part.get("text", part.get("thinking"))))
            elif _kind(part) == "tool_call":
                calls += _tool_calls(parsed(part.get("value", part.get("tool_call")), "a tool call"))
        content = [part for part in content if _kind(part) not in (*_REASONING_PARTS, "tool_call")]
    message: Message = {"role": role, "content": text_of(content)}
    # Columnar files give each message every key, null if it has none; a template must not see those.
    message |= {key: given[key] for key in ("name", "tool_call_id") if given.get(key)}
    named = given.get("tool_calls") or given.get("function_call") or []
    calls = _tool_calls(parsed(named, "`tool_calls`") or []) or calls
    if calls:
        message["tool_calls"] = calls
    for key in ("reasoning_content", "reasoning", "thinking"):
        reasoning = reasoning or text_of(given.get(key))
    if reasoning:
        message["reasoning_content"] = reasoning
    if "content" not in given and not calls and not reasoning:
        raise ValueError(f"a message has no `content`, but {', '.join(map(str, given))}")
    return message


def _tool_calls(calls: Any) -> list[Any]:
    """One tool call or a list of them, each in OpenAI's form."""
    return [_tool_call(call) for call in (calls if isinstance(calls, list) else [calls])]


def _tool_call(call: Any) -> Any:
    function = (call.get("function") or call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise ValueError(f"a tool call has no name: {_start_of(call)}")
    if function.get("arguments") in (None, ""):
        function = function | {"arguments": "{}"}  # OpenAI's form of no arguments
    if call.get("function"):
        return {"type": "function"} | call | {"function": function}
    bare = {key: value for key, value in function.items() if key not in ("id", "type")}
    return ({"id": call["id"]} if call.get("id") else {}) | {"type": "function", "function": bare}


def _start_of(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)[:80]


def is_trained(given: Any) -> bool:
    """Whether a row leaves a message in the loss. Raises ValueError where its weight is neither 0 nor 1."""
    weights = {key: given[key] for key in _WEIGHTS if isinstance(given, dict) and given.get(key) is not None}
    for key, weight in weights.items():
        if weight not in (0, 1):
            raise ValueError(f"`{key}` of a message is {weight!r}; only 0 (not trained) and 1 (trained) are supported")
    return 0 not in weights.values()


def without_reasoning(text: str) -> str:
    """An answer without its <think> blocks. Raises ValueError where a block is never closed.

    >>> without_reasoning("<think>2 + 2</think>Four"), without_reasoning("2 + 2</think>Four")
    ('Four', 'Four')
    """
    rest = _REASONING.sub("", text)
    if "<think>" in rest:
        raise ValueError("a <think> block is never closed, so it cannot be dropped (data.reasoning=drop)")
    return rest


def message_without_reasoning(message: Message) -> Message:
    """An assistant's message without its reasoning; others unchanged."""
    if message["role"] != "assistant":
        return message
    rest = {key: value for key, value in message.items() if key != "reasoning_content"}
    return rest | {"content": without_reasoning(rest["content"])}


def with_call_ids(messages: list[Message]) -> list[Message]:
    """The messages, each call with an id of nine letters and digits, and each result with that of its call.

    An id of another form becomes a hash of itself, a missing one a hash of the call and its position: the same row is the same tokens
    every day. A result without an id answers the first call that has no result yet.
    """

    def valid(name: str) -> str:
        return name if re.fullmatch("[A-Za-z0-9]{9}", name) else blake2b(name.encode(), digest_size=8).hexdigest()[:9]

    changed: list[Message] = []
    waiting: list[str] = []
    for position, message in enumerate(messages):
        if calls := message.get("tool_calls"):
            names = [call.get("id") or json.dumps([position, call["function"]], default=str) for call in calls]
            waiting = [valid(str(name)) for name in names]
            calls = [call | {"id": name} for call, name in zip(calls, waiting, strict=True)]
            message = message | {"tool_calls": calls}
        elif message["role"] == "tool" and (message.get("tool_call_id") or waiting):
            answered = valid(str(message.get("tool_call_id") or waiting[0]))
            waiting = [name for name in waiting if name != answered]
            message = message | {"tool_call_id": answered}
        changed.append(message)
    return changed
