"""One message of a conversation, however it is spelled, in the one form that chat templates read."""

from __future__ import annotations

import json
import re
from typing import Any

Message = dict[str, Any]

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
_WEIGHTS = ("weight", "loss_weight", "train", "training", "loss")
"""What other programs call the switch that takes a turn out of the loss."""


def text_of(content: Any) -> str:
    """A message's content as text: a string, or a list of text parts.

    Raises:
        ValueError: It is something else.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        kinds = sorted(
            {str(part.get("type")) if isinstance(part, dict) else type(part).__name__ for part in content} - {"text"}
        )
        if kinds:
            raise ValueError(f"content has parts of type {', '.join(kinds)}; only text parts can be trained")
        parts = [part["text"] if part.get("text") is not None else part.get("value") for part in content]
        if not all(isinstance(part, str | None) for part in parts) or not all(
            {"text", "value"} & set(part) for part in content
        ):
            raise ValueError("content has a part of type text without a `text`")
        return "".join(part for part in parts if part)
    raise ValueError(f"content is of type {type(content).__name__}, not text")


def parsed(text: str, what: str) -> Any:
    """JSON in a string.

    Raises:
        ValueError: It is none; the text names `what`.
    """
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{what} is no JSON ({error}): {text[:80]!r}") from None


def _call(call: Any) -> Any:
    """A tool call in OpenAI's form."""
    function = (call.get("function") or call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise ValueError(f"a tool call has no name: {json.dumps(call, ensure_ascii=False, default=str)[:80]}")
    if function.get("arguments") in (None, ""):
        function = function | {"arguments": "{}"}  # OpenAI's form for none, which templates would write as no JSON
    if call.get("function"):
        return {"type": "function"} | call | {"function": function}
    bare = {key: value for key, value in function.items() if key not in ("id", "type")}
    return ({"id": call["id"]} if call.get("id") else {}) | {"type": "function", "function": bare}


def _take_parts(content: Any) -> tuple[Any, str, list[Any]]:
    """A content list without its thoughts and tool calls, and those two."""
    if not isinstance(content, list):
        return content, "", []
    rest, thoughts, calls = [], [], []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("reasoning", "thinking"):
            thoughts.append(text_of(part.get("value", part.get("text", part.get("thinking")))))
        elif kind == "tool_call":
            value = part.get("value", part.get("tool_call"))
            value = parsed(value, "a tool call") if isinstance(value, str) else value
            calls += [_call(call) for call in (value if isinstance(value, list) else [value])]
        else:
            rest.append(part)
    return rest, "".join(thoughts), calls


def to_turn(message: Any) -> Message:
    """One message in the one form: role, content, and what else templates read.

    Raises:
        ValueError: It has no role, or one that is not known, or holds what cannot be trained.
    """
    if isinstance(message, dict) and "role" not in message and {"from", "value"} <= set(message):
        message = {"role": message["from"], "content": message["value"]} | message
    if not isinstance(message, dict) or "role" not in message:
        raise ValueError(f"a message has no `role`: {json.dumps(message, ensure_ascii=False, default=str)[:80]}")
    role = ROLES.get(str(message["role"]))
    if role is None:
        raise ValueError(f"unknown role {message['role']!r}; known: {', '.join(sorted(ROLES))}")
    if message["role"] == "function_call":
        calls = parsed(text_of(message.get("content")), "a function call")
        calls = calls if isinstance(calls, list) else [calls]
        return {"role": role, "content": "", "tool_calls": [_call(call) for call in calls]}
    if message.get("train_detail"):
        raise ValueError("`train_detail` of a message trains parts of a turn, which is not supported")
    content, thoughts, calls = _take_parts(message.get("content"))
    turn: Message = {"role": role, "content": text_of(content)}
    # Columnar files give every message every key, null where it has none; a template must not see those.
    turn |= {key: message[key] for key in ("name", "tool_call_id") if message.get(key)}
    given = message.get("tool_calls") or message.get("function_call") or []
    given = (parsed(given, "`tool_calls`") or []) if isinstance(given, str) else given
    calls = [_call(call) for call in (given if isinstance(given, list) else [given])] or calls
    if calls:
        turn["tool_calls"] = calls
    for key in ("reasoning_content", "reasoning", "thinking"):
        thoughts = thoughts or text_of(message.get(key))
    if thoughts:
        turn["reasoning_content"] = thoughts
    if "content" not in message and not calls and not thoughts:
        raise ValueError(f"a message has no `content`, but {', '.join(map(str, message))}")
    return turn


def is_trained(message: Any) -> bool:
    """Whether the row leaves this turn in the loss.

    Raises:
        ValueError: A weight other than 0 and 1.
    """
    for key in _WEIGHTS:
        weight = message.get(key) if isinstance(message, dict) else None
        if weight is not None and weight not in (0, 1):
            raise ValueError(f"`{key}` of a message is {weight!r}: only 0 and 1 (not trained, trained) are known")
        if weight == 0:
            return False
    return True


# Also one whose opening tag was in the prompt.
_THOUGHT = re.compile(r"(?:<think>.*?|\A(?:(?!<think>).)*?)</think>\s*", re.DOTALL)


def without_thoughts(text: str) -> str:
    """An answer without its thoughts.

    Raises:
        ValueError: A thought is opened and never closed.

    >>> without_thoughts("<think>2 + 2</think>Four"), without_thoughts("2 + 2</think>Four")
    ('Four', 'Four')
    """
    rest = _THOUGHT.sub("", text)
    if "<think>" in rest:
        raise ValueError(
            "a thought is opened (<think>) and never closed, so it cannot be left out (data.reasoning=drop)"
        )
    return rest


def without_reasoning(message: Message) -> Message:
    """A turn without its thoughts; other roles' as they are."""
    if message["role"] != "assistant":
        return message
    turn = {key: value for key, value in message.items() if key != "reasoning_content"}
    return turn | {"content": without_thoughts(turn["content"])}
