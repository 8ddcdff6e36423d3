"""Templates that are refused before a row is rendered, and rows that are refused for what a template leaves out of them."""

from collections.abc import Callable
from copy import copy
from typing import Any

import pytest

from sft.data.conversation import Message
from sft.data.documents import Chunk, RowError
from sft.data.render import ChatRenderer
from sft.data.template_checks import checked_sample
from sft.data.tokenizer import load_tokenizer
from sft.errors import ModelError
from sft.recipe.schema import Recipe
from tests.sft.data.conftest import turns
from tests.sft.data.test_render import THINKING, TRL, UNMARKED, with_template

Made = Callable[..., Chunk]
TokenizerOf = Callable[..., Any]

MARKED = """
{%- for m in messages -%}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""
GOOD = {"marked": MARKED, "unmarked": UNMARKED, "thinking": THINKING}


@pytest.mark.parametrize(
    ("name", "change", "into"),
    [
        # Markers around anything else than the answers
        ("marked", "== 'assistant'", "== 'user'"),
        ("marked", "<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>"),
        ("marked", "{% generation %}{{ m.content }}", "{{ m.content }}{% generation %}"),
        ("marked", "m.role == 'assistant'", "m.role == 'assistant' and loop.last"),
        ("marked", "m.role == 'assistant'", "m.role != 'system'"),
        ("marked", "{{ m.content }}<|im_end|>{% endg", "{{ messages[1].content }}<|im_end|>{% endg"),
        ("marked", "{% generation %}", "{{ raise_exception('no') }}{% generation %}"),
        # An answer twice, or before its turn
        ("marked", "{%- for m", "{{ messages[-1].content }}{%- for m"),
        ("marked", "{% generation %}", "{{ m.content }} {% generation %}"),
        ("unmarked", "{%- for m", "{{ messages[-1].content }}{%- for m"),
        # Another prompt than is trained
        ("marked", "<|im_start|>assistant", "<|im_start|>model"),
        ("marked", "<|im_start|>assistant\n", "<|im_start|>assistant\nSure: "),
        ("unmarked", "<|im_start|>assistant", "<|im_start|>model"),
        ("thinking", "<|im_start|>assistant", "<|im_start|>model"),
    ],
)
def test_a_template_that_trains_or_prompts_anything_else_is_refused(
    name: str, change: str, into: str, tokenizer_of: TokenizerOf
) -> None:
    checked_sample(ChatRenderer(with_template(tokenizer_of("demo"), GOOD[name])))
    assert change in GOOD[name]
    with pytest.raises(ModelError, match=r"model.chat_template"):
        checked_sample(ChatRenderer(with_template(tokenizer_of("demo"), GOOD[name].replace(change, into, 1))))


def test_a_header_that_is_trained_with_its_turn_may_be_prompted(tokenizer_of: TokenizerOf) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>{% else %}"
        "{% generation %}<|im_start|>assistant\n{{ m.content }}<|im_end|>{% endgeneration %}{% endif %}{% endfor %}"
        "{{ '<|im_start|>assistant\n' if add_generation_prompt else eos_token }}"
    )
    checked_sample(ChatRenderer(with_template(tokenizer_of("demo"), template)))


# What a template leaves out

SYSTEM, SECOND = {"role": "system", "content": "First rule."}, {"role": "system", "content": "Second rule."}
USER, ANSWER = turns("Question one", "Answer one")
CALL = {"type": "function", "function": {"name": "search", "arguments": {"what": "pie"}}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
FOUND = [{"role": "tool", "name": "search", "content": "five"}, {"role": "assistant", "content": "Five."}]
TOOL = {
    "type": "function",
    "function": {"name": "search", "description": "Finds.", "parameters": {"type": "object", "properties": {}}},
}
ENDS = "model.new_tokens=['<|end|>', '<|return|>', '<|call|>', '<|eot_id|>', '<|eom_id|>']"
"""Tokens that end turns in the templates of other families."""


@pytest.fixture(scope="module")
def with_ends(make_recipe: Callable[..., Recipe]) -> Any:
    return load_tokenizer(make_recipe(ENDS))


@pytest.fixture
def by(made: Made, tokenizer_of: TokenizerOf, with_ends: Any) -> Callable[..., Chunk]:
    """One row of these messages as a document of a real tokenizer, or of a template of TRL's."""

    def make(name: str, messages: list[Message], **data: object) -> Chunk:
        real = name in ("qwen3", "minimind")
        tokenizer = tokenizer_of(name) if real else with_template(copy(with_ends), TRL[name])
        tools = [TOOL] if any("tool_calls" in message for message in messages) else []
        return made(tokenizer, [{"messages": messages, "tools": tools}], **data)

    return make


def thinking(*thoughts: str, as_text: bool = False) -> list[Message]:
    messages = turns(*(f"{word} {at}" for at in range(len(thoughts)) for word in ("Question", "Answer")))
    for turn, thought in zip(messages[1::2], thoughts, strict=True):
        if thought:
            turn |= {"content": f"<think>{thought}</think>{turn['content']}"} if as_text else {"reasoning": thought}
    return messages


def beside(text: str) -> list[Message]:
    return [USER, CALLED | {"content": text}, *FOUND]


def think(before: str) -> list[Message]:
    return [USER, {"role": "assistant", "content": f"{before}<think>Hm, hm</think>After it"}]


LOST = {
    "text before reasoning": (("qwen3",), think("Before it "), "assistant", "Before it", think("")),
    "text beside a call": (("llama3_1",), beside("I look it up"), "assistant", "I look it up", beside("")),
    "a second system message": (
        ("gptoss",),
        [SYSTEM, SECOND, USER, ANSWER],
        "system",
        "Second rule.",
        [SYSTEM, USER, ANSWER],
    ),
    "reasoning of earlier turns": (
        ("nemotron_3_nano",),
        thinking("Mull one", "Mull two"),
        "assistant",
        "Mull one",
        thinking("", "Mull two"),
    ),
}
"""Templates that leave it out, a conversation that has it, whose and what, and the same conversation without."""


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, (names, *_) in LOST.items() for name in names])
def test_what_a_template_leaves_out_is_refused_with_role_and_text(
    kind: str, name: str, by: Callable[..., Chunk]
) -> None:
    _, messages, role, text, without = LOST[kind]
    with pytest.raises(RowError) as error:
        by(name, messages)
    assert f"the chat template leaves out what the {role} says: {text!r}. Set model.chat_template" in error.value.reason
    # The text it is, and not the template or the rest of the conversation.
    assert len(by(name, without).documents) == 1


def test_a_result_of_a_tool_that_a_template_leaves_out_is_refused(made: Made, tokenizer_of: TokenizerOf) -> None:
    row = {"messages": [USER, CALLED, *FOUND]}
    assert len(made(with_template(tokenizer_of("demo"), UNMARKED), [row]).documents) == 1
    silent = UNMARKED.replace("{{ m.content }}", "{{ m.content if m.role != 'tool' }}")
    with pytest.raises(RowError, match=r"'five'. Set model.chat_template"):
        made(with_template(tokenizer_of("demo"), silent), [row])


@pytest.mark.parametrize("as_text", [False, True])
def test_earlier_reasoning_that_nobody_trains_may_be_left_out(
    as_text: bool, by: Callable[..., Chunk], with_ends: Any
) -> None:
    """As it is when the model answers."""
    messages = thinking("Mull one", "Mull two", as_text=as_text)
    text = with_ends.decode(by("lfm2_2_5", messages, loss_on="last_assistant").tokens.tolist())
    assert "Mull one" not in text
    assert "Mull two" in text
    assert "Mull" not in with_ends.decode(by("lfm2_2_5", messages, reasoning="drop").tokens.tolist())


def test_a_turn_that_a_template_leaves_open_is_refused(made: Made, tokenizer_of: TokenizerOf) -> None:
    open_ended = MARKED.replace("<|im_end|>{% endg", "{{ '' if m.name == 'x' else '<|im_end|>' }}{% endg")
    tokenizer = with_template(tokenizer_of("demo"), open_ended)
    checked_sample(ChatRenderer(tokenizer))
    with pytest.raises(RowError, match=r"leaves the assistant's turn open: '.*Answer one'"):
        made(tokenizer, [{"messages": [USER, ANSWER | {"name": "x"}]}])
