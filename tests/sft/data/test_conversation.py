import json
from typing import Any

import pytest

from sft.data.conversation import message_without_reasoning, to_message, without_reasoning

ANSWER = {"role": "assistant", "content": "Hello"}
CALL = {"name": "search", "arguments": {"what": "pie"}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]}


def parts(*given: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"type": kind, "value": value} for kind, value in given]


@pytest.mark.parametrize(
    "message",
    [
        ANSWER,
        {"from": "GPT", "value": "Hello"},
        ANSWER | {"name": None, "tool_calls": None, "reasoning_content": ""},
        {"role": "chatgpt", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]},
        {"role": "assistant", "content": parts(("text", "Hel"), ("text", "lo"))},
        {"role": "assistant", "content": [{"type": "text", "text": None}, {"type": "text", "text": "Hello"}]},
    ],
)
def test_a_message_is_one_however_it_is_spelled(message: dict[str, Any]) -> None:
    assert to_message(message) == ANSWER


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "assistant", "tool_calls": json.dumps([CALL])},
        {"role": "assistant", "tool_calls": [{"function": CALL}]},
        {"role": "assistant", "tool_calls": [CALL | {"type": "function"}]},
        {"role": "assistant", "content": parts(("text", ""), ("tool_call", json.dumps([CALL])))},
        {"role": "assistant", "content": [{"type": "tool_call", "tool_call": CALL}]},
        {"role": "function_call", "content": json.dumps(CALL)},
        {"from": "function_call", "value": json.dumps([CALL])},
        {"role": "assistant", "function_call": json.dumps(CALL), "tool_calls": None},
    ],
)
def test_a_call_is_one_however_it_is_written(message: dict[str, Any]) -> None:
    assert to_message(message) == CALLED


@pytest.mark.parametrize("none", [{"arguments": ""}, {"arguments": None}, {}])
def test_a_call_without_arguments_has_an_empty_object_of_them(none: dict[str, Any]) -> None:
    call = {"id": "x1", "type": "function", "function": {"name": "now"} | none}
    (given,) = to_message({"role": "assistant", "content": None, "tool_calls": [call]})["tool_calls"]
    assert given == call | {"function": {"name": "now", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ({"role": "assistant", "text": "Hello"}, "a message has no `content`, but role, text"),
        ({"role": "assistant", "tool_calls": [{"name": "", "arguments": "{}"}]}, "a tool call has no name"),
    ],
)
def test_a_message_that_says_nothing_is_refused(message: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        to_message(message)


def test_reasoning_is_kept_apart_from_the_content() -> None:
    spelled = [ANSWER | {key: "Hm"} for key in ("reasoning_content", "reasoning", "thinking")]
    for message in [*spelled, {"role": "gpt", "content": parts(("reasoning", "Hm"), ("text", "Hello"))}]:
        assert to_message(message) == ANSWER | {"reasoning_content": "Hm"}


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("<think>\na\n\nb\n</think>\n\nFour\n", "Four\n"),
        ("</think>Four", "Four"),
        ("Two <think>a</think> and <think>b</think>two", "Two and two"),
        ("1 < 2 and think> nothing", "1 < 2 and think> nothing"),
    ],
)
def test_reasoning_in_every_spelling_is_taken_out(text: str, rest: str) -> None:
    assert without_reasoning(text) == rest
    assert message_without_reasoning(ANSWER | {"content": text, "reasoning_content": "c"}) == ANSWER | {"content": rest}


def test_reasoning_that_is_never_closed_cannot_be_taken_out() -> None:
    with pytest.raises(ValueError, match=r"never closed, .*data.reasoning=drop"):
        without_reasoning("<think>a</think>b<think>c")
