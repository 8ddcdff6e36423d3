import json
from typing import Any

import pytest

from sft.data.conversation import message_without_reasoning, to_message, without_reasoning

ANSWER = {"role": "assistant", "content": "Hello"}
CALL = {"name": "search", "arguments": {"what": "pie"}}
FUNCTION = {"type": "function", "function": CALL}
CALLED = {"role": "assistant", "content": "", "tool_calls": [FUNCTION]}


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user"},
        {"role": "assistant"},
        {"role": "assistant", "name": "x", "weight": 1},
        {"role": "assistant", "text": "Hello"},
        {"role": "assistant", "tool_calls": [], "reasoning_content": ""},
        {"role": "assistant", "tool_calls": None, "function_call": None},
        {"role": "assistant", "tool_calls": "null"},
        {"from": "gpt", "text": "Hello", "role": "assistant"},
    ],
)
def test_a_message_without_content_says_what_it_has(message: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"a message has no `content`, but {', '.join(message)}"):
        to_message(message)


@pytest.mark.parametrize("none", ["", None, "absent"])
@pytest.mark.parametrize("nested", [False, True])
def test_a_call_without_arguments_has_an_empty_object_of_them(none: str | None, nested: bool) -> None:
    function = {"name": "now"} | ({} if none == "absent" else {"arguments": none})
    call = {"id": "x1", "type": "function", "function": function} if nested else function
    (given,) = to_message({"role": "assistant", "content": None, "tool_calls": [call]})["tool_calls"]
    assert given["function"]["name"] == "now"
    arguments = given["function"]["arguments"]
    assert (json.loads(arguments) if isinstance(arguments, str) else arguments) == {}
    assert given.get("id") == ("x1" if nested else None)


@pytest.mark.parametrize("name", ["", None, 5, ["f"]])
@pytest.mark.parametrize("shape", ["flat", "nested", "old", "role", "part"])
def test_a_call_needs_a_name(name: Any, shape: str) -> None:
    call = {"name": name, "arguments": "{}"}
    message = {
        "flat": {"role": "assistant", "tool_calls": [call]},
        "nested": {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]},
        "old": {"role": "assistant", "content": None, "function_call": call},
        "role": {"role": "function_call", "content": json.dumps(call)},
        "part": {"role": "assistant", "content": [{"type": "tool_call", "value": call}]},
    }[shape]
    with pytest.raises(ValueError, match="a tool call has no name"):
        to_message(message)


@pytest.mark.parametrize("role", ["assistant", "gpt"])
@pytest.mark.parametrize("call", [CALL, json.dumps(CALL), json.dumps([CALL]), [CALL]])
def test_a_call_under_the_old_key_is_a_call(role: str, call: Any) -> None:
    """OpenAI's form before `tool_calls`."""
    assert to_message({"role": role, "content": None, "function_call": call}) == CALLED
    assert to_message({"role": role, "function_call": call, "tool_calls": None}) == CALLED
    assert to_message({"role": role, "function_call": None, "tool_calls": [CALL]}) == CALLED


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("<think>a</think>Four", "Four"),
        ("<think>\na\n\nb\n</think>\n\nFour\n", "Four\n"),
        ("<think></think>Four", "Four"),
        ("a\nb</think>\n\nFour", "Four"),
        ("</think>Four", "Four"),
        ("Two <think>a</think> and <think>b</think>two", "Two and two"),
        ("a</think>Fo<think>b</think>ur", "Four"),
        ("Four", "Four"),
        ("1 < 2 and think> nothing", "1 < 2 and think> nothing"),
        ("<think>a</think>", ""),
    ],
)
def test_thoughts_in_every_spelling_are_taken_out(text: str, rest: str) -> None:
    assert without_reasoning(text) == rest
    assert message_without_reasoning(ANSWER | {"content": text, "reasoning_content": "c"}) == ANSWER | {"content": rest}


@pytest.mark.parametrize("text", ["<think>a", "Four <think>", "<think>a</think>b<think>c", "<think>a <think>b"])
def test_a_thought_that_is_never_closed_cannot_be_taken_out(text: str) -> None:
    with pytest.raises(ValueError, match=r"never closed, .*data.reasoning=drop"):
        without_reasoning(text)
