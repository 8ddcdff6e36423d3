"""Traits of the families' chat templates, each in a template of our own: what is trained of a row, what is noted, what is refused."""

from collections.abc import Callable
from copy import copy
from typing import Any

import numpy as np
import pytest

from sft.data.conversation import Message
from sft.data.documents import Chunk, DocumentMaker, RowError
from sft.data.render import ChatRenderer
from sft.data.template_checks import checked_sample, end_of_turn, note_on_headers
from sft.data.tokenizer import load_tokenizer
from sft.errors import ModelError
from sft.recipe.schema import Recipe, Source

MakeRecipe = Callable[..., Recipe]
Row = dict[str, Any]

# Writes the system message into the last question while nothing follows it, demands ids, and shows no text beside a call.
MISTRAL = """
{%- set system = messages[0].content if messages[0].role == 'system' else '' -%}
{%- for m in messages if m.role != 'system' -%}
{%- if m.role == 'user' -%}[Q]{{ system ~ '|' if loop.last and system }}{{ m.content }}[/Q]
{%- elif m.tool_calls -%}[C]
{%- for call in m.tool_calls -%}
{%- if call.id is not defined or call.id | length != 9 -%}{{ raise_exception('ids have nine characters') }}{%- endif -%}
{{ call.function | tojson }}#{{ call.id }}
{%- endfor -%}{{ eos_token }}
{%- elif m.role == 'tool' -%}
{%- if m.tool_call_id | length != 9 -%}{{ raise_exception('ids have nine characters') }}{%- endif -%}
[R]{{ m.content }}#{{ m.tool_call_id }}[/R]
{%- else -%}{{ m.content }}{{ eos_token }}{%- endif -%}
{%- endfor -%}"""

# Shows the last turn's reasoning content alone, in a thought that its prompt opens.
THINKING = """
{%- for m in messages -%}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and loop.last -%}<think>
{{ m.reasoning_content or '' }}
</think>

{% endif -%}{{ m.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
<think>
{% endif -%}"""

# Shows no reasoning content, and opens a thought in the prompt.
DISTILLED = """
{%- for m in messages -%}<|im_start|>{{ m.role }}
{{ m.content.split('</think>')[-1] }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
<think>
{% endif -%}"""

CHATML = """
{%- for m in messages -%}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function.name ~ ' ' ~ CALL }}{% endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""
PLAIN = CHATML.replace("CALL", "''")


def talk(*contents: str, system: str = "") -> list[Message]:
    turns = [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 9, contents, strict=False)]
    return ([{"role": "system", "content": system}] if system else []) + turns


def calls(**ids: str) -> list[Message]:
    """A conversation with a call of a tool; the ids are those of `call` and `result`."""
    call: Row = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    call |= {"id": ids["call"]} if "call" in ids else {}
    result = {"role": "tool", "content": "five"} | ({"tool_call_id": ids["result"]} if "result" in ids else {})
    return [*talk("Ask"), {"role": "assistant", "content": "", "tool_calls": [call]}, result, talk("", "Five.")[1]]


@pytest.fixture(scope="module")
def tokenizer(make_recipe: MakeRecipe) -> Any:
    return load_tokenizer(make_recipe())


@pytest.fixture(scope="module")
def made(make_recipe: MakeRecipe, tokenizer: Any) -> Callable[..., tuple[str, Chunk]]:
    """One row as a document of a template: its text with the trained stretches in ⟦⟧, and the chunk."""

    def make(template: str, messages: list[Message], other: Any = None, **data: object) -> tuple[str, Chunk]:
        chosen = copy(other or tokenizer)
        chosen.chat_template = template
        end_of_turn(chosen)
        overrides = [f"data.{key}={value}" for key, value in ({"max_length": 4096} | data).items()]
        maker = DocumentMaker(make_recipe(*overrides).data, chosen)
        chunk = maker.make(Source(path="rows"), 0, "messages", [(1, {"messages": messages})])
        edges = np.flatnonzero(np.diff(chunk.trained, prepend=0, append=0))
        pieces = [chosen.decode(part) for part in np.split(chunk.tokens, edges)]
        return "".join(f"⟦{text}⟧" if at % 2 else text for at, text in enumerate(pieces)), chunk

    return make


@pytest.mark.parametrize(
    ("messages", "data", "text"),
    [
        (talk("One", "Two"), {}, "[Q]One[/Q]⟦Two<|im_end|>⟧"),
        (talk("One", "Two", system="Short."), {}, "[Q]Short.|One[/Q]⟦Two<|im_end|>⟧"),
        (
            talk("One", "Two", "Three", "Four", system="Short."),
            {"loss_on": "last_assistant"},
            "[Q]One[/Q]Two<|im_end|>[Q]Short.|Three[/Q]⟦Four<|im_end|>⟧",
        ),
    ],
)
def test_a_system_message_in_the_last_question_stands_where_generation_has_it(
    messages: list[Message], data: Row, text: str, made: Callable[..., tuple[str, Chunk]], tokenizer: Any
) -> None:
    shown, _ = made(MISTRAL, messages, **data)
    assert shown == text
    asking = copy(tokenizer)
    asking.chat_template = MISTRAL
    prompt = asking.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
    assert shown.startswith(prompt + "⟦")


def test_turns_before_the_last_question_cannot_be_trained_with_its_system_message(
    made: Callable[..., tuple[str, Chunk]],
) -> None:
    with pytest.raises(RowError, match=r"data.loss_on=last_assistant"):
        made(MISTRAL, talk("One", "Two", "Three", "Four", system="Short."))


@pytest.mark.parametrize(
    "ids",
    [
        {"call": "aB3456789", "result": "aB3456789"},
        {},
        {"call": "call_0123456789", "result": "call_0123456789"},
        {"call": "aB3456789"},
    ],
)
def test_ids_that_a_template_demands_are_made_where_a_row_has_none(
    ids: Row, made: Callable[..., tuple[str, Chunk]]
) -> None:
    text, _ = made(MISTRAL, calls(**ids))
    before, _, after = text.partition("[R]five#")
    given = after[:9]
    assert given.isalnum()
    assert before.endswith(f'{{"name": "add", "arguments": {{"a": 1}}}}#{given}<|im_end|>⟧')
    assert (given == ids.get("call")) == (ids.get("call") == "aB3456789")
    assert made(MISTRAL, calls(**ids))[0] == text


@pytest.mark.parametrize("arguments", [{"a": 1}, '{"a": 1}'])
@pytest.mark.parametrize("written", ["(call.function.arguments + '')", "call.function.arguments | tojson"])
def test_a_call_is_trained_whichever_form_of_arguments_a_template_reads(
    written: str, arguments: Any, made: Callable[..., tuple[str, Chunk]]
) -> None:
    messages = calls()
    messages[1]["tool_calls"][0]["function"]["arguments"] = arguments
    assert '⟦add {"a": 1}<|im_end|>⟧' in made(CHATML.replace("CALL", written), messages)[0]


def thoughts(*reasoning: str) -> list[Message]:
    turns = talk(*(f"{word}{at}" for at in range(len(reasoning)) for word in ("Q", "A")))
    for turn, thought in zip(turns[1::2], reasoning, strict=True):
        turn |= {"reasoning_content": thought} if thought else {}
    return turns


def test_earlier_turns_that_a_template_changes_do_not_hinder_the_last(made: Callable[..., tuple[str, Chunk]]) -> None:
    text, _ = made(THINKING, thoughts("hm", "so"), loss_on="last_assistant")
    assert text.endswith("<|im_start|>assistant\nA0<|im_end|>\n<|im_start|>user\nQ1<|im_end|>\n"
                         "<|im_start|>assistant\n<think>\n⟦so\n</think>\n\nA1<|im_end|>⟧\n")  # fmt: skip
    assert made(THINKING, thoughts("hm"))
    with pytest.raises(RowError, match=r"data.loss_on=last_assistant"):
        made(THINKING, thoughts("hm", "so"))


@pytest.mark.parametrize(
    ("template", "reasoning", "found", "trained"),
    [
        (DISTILLED, "", "prompt_thinks", "⟦A0<|im_end|>⟧"),
        (THINKING, "", "prompt_thinks", "⟦\n</think>\n\nA0<|im_end|>⟧"),
        (THINKING, "hm", None, "⟦hm\n</think>\n\nA0<|im_end|>⟧"),
        (PLAIN, "", None, "⟦A0<|im_end|>⟧"),
    ],
)
def test_answers_without_the_thought_that_their_prompt_opens_are_noted(
    template: str, reasoning: str, found: str | None, trained: str, made: Callable[..., tuple[str, Chunk]]
) -> None:
    text, chunk = made(template, thoughts(reasoning))
    assert trained in text
    assert set(chunk.findings.counts) == ({(found, 0)} if found else set())


MARKED = PLAIN.replace("{{ m.content }}", "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>"
                       "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}").replace(
    "{% endfor %}<|im_end|>\n", "{% endfor %}\n")  # fmt: skip


@pytest.mark.parametrize(
    ("template", "change", "into"),
    [
        (MARKED, "{%- for m", "{{ messages[-1].content }}{%- for m"),
        (MARKED, "{% generation %}", "{{ m.content }} {% generation %}"),
        (MARKED, "{% generation %}", "{% generation %}{{ m.content }} "),
        (MARKED, "{% endgeneration %}", "{% endgeneration %}{{ m.content }}"),
        (MARKED, "{%- for m", "{% if messages[0].role == 'system' %}{{ messages[-1].content }}{% endif %}{%- for m"),
        (PLAIN, "{%- for m", "{{ messages[-1].content }}{%- for m"),
        (PLAIN, "{{ m.content }}", "{{ m.content }}{{ m.content }}"),
    ],
)
def test_an_answer_that_is_written_twice_or_before_its_turn_is_refused(
    template: str, change: str, into: str, tokenizer: Any
) -> None:
    chosen = copy(tokenizer)
    chosen.chat_template = template
    checked_sample(ChatRenderer(chosen))
    assert template.count(change) == 1
    chosen.chat_template = template.replace(change, into)
    with pytest.raises(ModelError, match=r"model.chat_template"):
        checked_sample(ChatRenderer(chosen))


@pytest.mark.parametrize(
    ("template", "change", "into"),
    [
        (MARKED, "<|im_start|>assistant", "<|im_start|>model"),
        (MARKED, "<|im_start|>assistant", ""),
        (MARKED, "<|im_start|>assistant\n", "<|im_start|>assistant"),
        (PLAIN, "<|im_start|>assistant", "<|im_start|>model"),
        (THINKING, "<|im_start|>assistant", "<|im_start|>model"),
    ],
)
def test_a_template_that_prompts_otherwise_than_it_trains_is_refused(
    template: str, change: str, into: str, tokenizer: Any
) -> None:
    chosen = copy(tokenizer)
    assert template.count(change) == 1
    chosen.chat_template = template.replace(change, into)
    with pytest.raises(ModelError, match=r"model.chat_template"):
        checked_sample(ChatRenderer(chosen))


def test_a_header_that_is_trained_with_its_turn_may_be_prompted(tokenizer: Any) -> None:
    chosen = copy(tokenizer)
    chosen.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>{% else %}"
        "{% generation %}<|im_start|>assistant\n{{ m.content }}<|im_end|>{% endgeneration %}{% endif %}{% endfor %}"
        "{{ '<|im_start|>assistant\n' if add_generation_prompt else eos_token }}"
    )
    checked_sample(ChatRenderer(chosen))


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_a_template_with_one_header_for_both_speakers_is_refused(template: str, tokenizer: Any) -> None:
    chosen = copy(tokenizer)
    chosen.chat_template = template.replace("{{ m.role }}", "user").replace("<|im_start|>assistant", "<|im_start|>user")
    with pytest.raises(ModelError, match=r"<\|im_start\|>user.*who speaks"):
        checked_sample(ChatRenderer(chosen))
    chosen.chat_template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    checked_sample(ChatRenderer(chosen))


def test_headers_of_another_family_are_noted(tokenizer: Any) -> None:
    chosen = copy(tokenizer)
    chosen.chat_template = PLAIN.replace("<|im_start|>", "<|start_header_id|>")
    note = note_on_headers(chosen)
    assert note is not None
    assert "<|start_header_id|>" in note
    assert note_on_headers(tokenizer) is None
    # Zephyr and Tulu write headers as plain text.
    chosen.chat_template = PLAIN.replace("<|im_start|>{{ m.role }}", "<|{{ m.role }}|>").replace(
        "<|im_start|>assistant", "<|assistant|>"
    )
    assert note_on_headers(chosen) is None


def test_a_result_of_a_tool_that_a_template_leaves_out_is_refused(made: Callable[..., tuple[str, Chunk]]) -> None:
    shows = CHATML.replace("CALL", "''")
    assert made(shows, calls())
    silent = shows.replace("{{ m.content }}", "{{ m.content if m.role != 'tool' }}")
    with pytest.raises(RowError, match=r"'five'. Set model.chat_template"):
        made(silent, calls())
