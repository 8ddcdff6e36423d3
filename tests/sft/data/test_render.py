"""What is trained of a conversation: with the templates that TRL knows, and with traits of others in templates of our own."""

from collections.abc import Callable
from copy import copy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sft.data.conversation import Message
from sft.data.documents import Chunk, RowError
from sft.data.render import ChatRenderer, Rendered, training_template
from sft.data.template_checks import checked_sample
from sft.data.tokenizer import load_tokenizer
from sft.errors import ModelError
from sft.recipe.schema import Recipe
from tests.sft.data.conftest import trained_runs, turns

Made = Callable[..., Chunk]
TokenizerOf = Callable[..., Any]

# The second answer begins and ends with white space, which is the assistant's as well.
ANSWERS = ["Hello there", " Süre 数\n"]
TALK = turns("Hi", ANSWERS[0], "More? ünï 数", ANSWERS[1], system="Be brief.")

CHATML = """
{%- for m in messages -%}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function.name ~ ' ' ~ CALL }}{% endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""
UNMARKED = CHATML.replace("CALL", "''")

# Writes the system message into the last question while nothing follows it, and demands ids of calls.
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

# Shows the last turn's reasoning content alone, in reasoning that its prompt opens.
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

# Shows no reasoning content, and opens reasoning in the prompt.
DISTILLED = """
{%- for m in messages -%}<|im_start|>{{ m.role }}
{{ m.content.split('</think>')[-1] }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
<think>
{% endif -%}"""


def with_template(tokenizer: Any, template: str) -> Any:
    other = copy(tokenizer)
    other.chat_template = template
    return other


@pytest.fixture
def shown(made: Made, tokenizer_of: TokenizerOf) -> Callable[..., str]:
    """One conversation as a document of a template, the trained stretches in ⟦⟧."""

    def show(template: str, messages: list[Message], **data: object) -> str:
        tokenizer = with_template(tokenizer_of("demo"), template)
        chunk = made(tokenizer, [{"messages": messages}], **data)
        pieces = np.split(chunk.tokens, np.flatnonzero(np.diff(chunk.trained, prepend=0, append=0)))
        texts = [tokenizer.decode(piece.tolist()) for piece in pieces]
        return "".join(f"⟦{text}⟧" if at % 2 else text for at, text in enumerate(texts))

    return show


@pytest.mark.parametrize(
    ("name", "overrides", "begin", "end"),
    [
        ("demo", [], "", "<|im_end|>"),
        ("demo", ["model.chat_template=chatml"], "", "<|im_end|>"),
        # TRL's template for training writes the empty reasoning that generation without thinking is prompted with.
        ("qwen3", [], "<think>\n\n</think>\n\n", "<|im_end|>"),
        ("qwen3", ["model.chat_template=chatml"], "", "<|im_end|>"),
        ("minimind", [], "", "<|im_end|>"),
        ("stories260k_hf", [], " ", "</s>"),
        ("gpt2", [], " ", "<|endoftext|>"),
    ],
)
def test_a_real_tokenizer_trains_the_answers_with_their_ends(
    name: str, overrides: list[str], begin: str, end: str, made: Made, tokenizer_of: TokenizerOf
) -> None:
    tokenizer = tokenizer_of(name, *overrides)
    (runs,) = trained_runs(made(tokenizer, [{"messages": TALK}]), tokenizer)
    assert [run.strip() for run in runs] == [f"{begin}{answer}{end}".strip() for answer in ANSWERS]


def test_a_template_without_markers_is_masked_by_comparison(shown: Callable[..., str]) -> None:
    assert "⟦Hello there<|im_end|>⟧" in shown(UNMARKED, TALK)
    rewriting = UNMARKED.replace("{{ m.content }}", "{{ m.content if loop.last else '(earlier)' }}")
    with pytest.raises(RowError, match=r"renders a turn differently once others follow .*Set model.chat_template"):
        shown(rewriting, TALK)


@pytest.mark.parametrize("name", ["qwen3", "minimind"])
def test_a_tool_call_is_trained_and_its_result_is_not(name: str, made: Made, tokenizer_of: TokenizerOf) -> None:
    function = {"name": "multiply", "arguments": {"a": 2, "b": 3}}
    messages: list[Message] = [
        {"role": "user", "content": "2 times 3?"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "name": "multiply", "content": "six it is"},
        {"role": "assistant", "content": "It is 6."},
    ]
    tools = [{"type": "function", "function": {"name": "multiply", "description": "Times.", "parameters": {}}}]
    tokenizer = tokenizer_of(name)
    ((call, answer),) = trained_runs(made(tokenizer, [{"messages": messages, "tools": tools}]), tokenizer)
    assert '"multiply"' in call
    assert '{"a": 2, "b": 3}' in call
    assert "six it is" not in call + answer
    assert "Times." not in call + answer
    assert answer.endswith("It is 6.<|im_end|>")
    assert call.endswith("<|im_end|>")


# The templates that TRL knows

_PACKAGE = find_spec("trl")
assert _PACKAGE is not None
_FOLDER = Path(_PACKAGE.origin or "").parent / "chat_templates"
TRL = {file.stem: file.read_text() for file in sorted(_FOLDER.glob("*.jinja")) if not file.stem.endswith("_training")}
"""The chat templates that the installed TRL knows, as their families ship them."""

MULTIMODAL = {"idefics3", "smolvlm", "llava_next"}
"""Templates that show nothing but lists of parts: text and images."""

NOT_PREFIXES = set(
    "deepseek_r1_distill deepseekv3 nemotron_3_5_lightning nemotron_3_nano nemotron_3_super nemotron_3_ultra gptoss phi3 phi3_5".split()
)
"""Templates whose parts are no prefixes of the whole: the prompt opens reasoning that an answer without any does not have, or the
last turn ends with another token."""

QUESTIONS, REPLIES = ["Wie, ünï 数?", "And so?", "Once more"], ["Süre 数, of course", "So it is.", "No"]
CHAT = turns(*(text for pair in zip(QUESTIONS, REPLIES, strict=True) for text in pair))


@pytest.fixture(scope="module")
def trl_tokenizer(make_recipe: Callable[..., Recipe]) -> Any:
    """Knows the token that ends a turn of Phi-3, behind which its template writes the EOS."""
    return load_tokenizer(make_recipe("model.new_tokens=[<|end|>]"))


def rendered_by(name: str, tokenizer: Any) -> tuple[ChatRenderer, Rendered, list[str]]:
    """With a template of TRL's: the renderer, the text, and the trained stretches."""
    renderer = ChatRenderer(with_template(tokenizer, TRL[name]))
    rendered = renderer.render(CHAT)
    return renderer, rendered, [rendered.text[start:end] for start, end in rendered.spans]


@pytest.mark.parametrize("name", sorted(MULTIMODAL))
def test_a_template_without_text_alone_is_refused(name: str, trl_tokenizer: Any) -> None:
    with pytest.raises(ModelError, match=r"model.chat_template"):
        checked_sample(ChatRenderer(with_template(trl_tokenizer, TRL[name])))


@pytest.mark.parametrize("name", sorted(set(TRL) - MULTIMODAL))
def test_the_trained_stretches_are_the_answers_with_their_ends(name: str, trl_tokenizer: Any) -> None:
    renderer, rendered, trained = rendered_by(name, trl_tokenizer)
    checked_sample(renderer)
    ends = []
    for turn, reply in zip(trained, REPLIES, strict=True):
        before, answer, end = turn.partition(reply)
        assert answer
        assert end == end.strip() != ""
        assert not any(other in before + end for other in [*QUESTIONS, *REPLIES])
        ends.append(end)
    # gpt-oss says with another token that nothing follows.
    assert len(set(ends)) == 1 or name == "gptoss"
    # Comparison finds the same turns: two derivations that share nothing but the template's text.
    try:
        compared = renderer.prefix_spans(rendered.text, CHAT, [1, 3, 5])
    except ValueError as error:
        assert "renders a turn differently" in str(error)
        assert name in NOT_PREFIXES
    else:
        assert compared == rendered.spans


@pytest.mark.parametrize("name", sorted(set(TRL) - MULTIMODAL))
def test_what_generation_is_prompted_with_is_not_trained(name: str, trl_tokenizer: Any) -> None:
    renderer, rendered, trained = rendered_by(name, trl_tokenizer)
    asked, prompted = (renderer.apply(CHAT[:-1], prompt=prompt) for prompt in (False, True))
    common = next((at for at in range(len(asked)) if not prompted.startswith(asked[: at + 1])), len(asked))
    prompt = prompted[common:]
    assert prompt
    # The header says whose turn it is. Reasoning that it opens may be the answer's own, and empty.
    header = prompt.partition("<think>")[0]
    assert not any(header.strip() in turn for turn in trained)
    for start, _ in rendered.spans:
        before = rendered.text[:start]
        assert before.removesuffix("<think>").endswith(header) if name in NOT_PREFIXES else before.endswith(prompt)


@pytest.mark.parametrize("name", sorted(TRL))
def test_the_training_template_is_the_one_that_trl_takes(name: str, tokenizer_of: TokenizerOf) -> None:
    """TRL says None of a template that can be trained with as it is, and refuses one that it does not know."""
    from trl.chat_template_utils import get_training_chat_template

    try:
        taken = get_training_chat_template(with_template(tokenizer_of("demo"), TRL[name])) or TRL[name]
    except ValueError:
        taken = None
    assert training_template(TRL[name]) == taken
    assert training_template(TRL[name] + " ") == (TRL[name] + " " if taken == TRL[name] else None)


# Reasoning


def reasoning(*said: str) -> list[Message]:
    messages = turns(*(f"{word}{at}" for at in range(len(said)) for word in ("Q", "A")))
    for turn, words in zip(messages[1::2], said, strict=True):
        turn |= {"reasoning_content": words} if words else {}
    return messages


@pytest.mark.parametrize("name", ["unmarked", "qwen3", "qwen3_5_think", "llama3"])
def test_reasoning_is_shown_in_every_turn_also_where_a_template_knows_none(name: str, trl_tokenizer: Any) -> None:
    renderer = ChatRenderer(with_template(trl_tokenizer, TRL.get(name, UNMARKED)))
    rendered = renderer.render(reasoning("T0", "T1", "T2"))
    for at, (start, end) in enumerate(rendered.spans):
        said, _, answer = rendered.text[start:end].partition("</think>")
        assert said.removeprefix("<think>").strip() == f"T{at}"
        assert answer.strip().startswith(f"A{at}")


def test_earlier_turns_that_a_template_changes_do_not_hinder_the_last(shown: Callable[..., str]) -> None:
    text = shown(THINKING, reasoning("hm", "so"), loss_on="last_assistant")
    assert text.endswith("<|im_start|>assistant\nA0<|im_end|>\n<|im_start|>user\nQ1<|im_end|>\n"
                         "<|im_start|>assistant\n<think>\n⟦so\n</think>\n\nA1<|im_end|>⟧\n")  # fmt: skip
    with pytest.raises(RowError, match=r"data.loss_on=last_assistant"):
        shown(THINKING, reasoning("hm", "so"))


@pytest.mark.parametrize(
    ("template", "said", "found", "trained"),
    [
        (DISTILLED, "", ["prompt_thinks"], "⟦A0<|im_end|>⟧"),
        (THINKING, "", ["prompt_thinks"], "⟦\n</think>\n\nA0<|im_end|>⟧"),
        (THINKING, "hm", [], "⟦hm\n</think>\n\nA0<|im_end|>⟧"),
        (UNMARKED, "", [], "⟦A0<|im_end|>⟧"),
    ],
)
def test_answers_without_the_reasoning_that_their_prompt_opens_are_noted(
    template: str, said: str, found: list[str], trained: str, shown: Callable[..., str], made: Made, tokenizer_of: Any
) -> None:
    assert trained in shown(template, reasoning(said))
    chunk = made(with_template(tokenizer_of("demo"), template), [{"messages": reasoning(said)}])
    assert [kind for kind, _ in chunk.findings.counts] == found


# Forms that some templates demand


@pytest.mark.parametrize(
    ("messages", "data", "text"),
    [
        (turns("One", "Two"), {}, "[Q]One[/Q]⟦Two<|im_end|>⟧"),
        (turns("One", "Two", system="Short."), {}, "[Q]Short.|One[/Q]⟦Two<|im_end|>⟧"),
        (
            turns("One", "Two", "Three", "Four", system="Short."),
            {"loss_on": "last_assistant"},
            "[Q]One[/Q]Two<|im_end|>[Q]Short.|Three[/Q]⟦Four<|im_end|>⟧",
        ),
    ],
)
def test_a_system_message_in_the_last_question_stands_where_generation_has_it(
    messages: list[Message], data: dict[str, Any], text: str, shown: Callable[..., str], tokenizer_of: TokenizerOf
) -> None:
    assert shown(MISTRAL, messages, **data) == text
    asking = with_template(tokenizer_of("demo"), MISTRAL)
    assert text.startswith(asking.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True) + "⟦")


@pytest.mark.parametrize("given", ["aB3456789", None])
def test_ids_that_a_template_demands_are_computed_where_a_row_has_none(
    given: str | None, shown: Callable[..., str]
) -> None:
    call = {"id": given, "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    result = {"role": "tool", "content": "five", "tool_call_id": given}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    text = shown(MISTRAL, [*turns("Ask"), called, result, {"role": "assistant", "content": "Five."}])
    before, _, after = text.partition("[R]five#")
    assert before.endswith(f'{{"name": "add", "arguments": {{"a": 1}}}}#{after[:9]}<|im_end|>⟧')
    assert after[:9].isalnum()
    assert given in (after[:9], None)


@pytest.mark.parametrize("arguments", [{"a": "ü"}, '{"a": "ü"}'])
@pytest.mark.parametrize("written", ["(call.function.arguments + '')", "call.function.arguments | tojson"])
def test_a_call_is_trained_whichever_form_of_arguments_a_template_reads(
    written: str, arguments: Any, shown: Callable[..., str]
) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    messages = [*turns("Ask"), {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert '⟦add {"a": "ü"}<|im_end|>⟧' in shown(CHATML.replace("CALL", written), messages)


def test_tools_that_a_template_would_lose_are_refused(tokenizer_of: TokenizerOf) -> None:
    with pytest.raises(ValueError, match=r"has tools, and the chat template does not show them"):
        ChatRenderer(tokenizer_of("demo")).render(CHAT, [{"type": "function", "function": {"name": "f"}}])


def test_text_that_the_template_does_not_read_is_refused_and_a_flag_is_not(tokenizer_of: TokenizerOf) -> None:
    renderer = ChatRenderer(tokenizer_of("demo", "model.chat_template=chatml"))
    flags = {"enable_thinking": False, "custom_instructions": "", "xml_tools": []}
    assert renderer.render(TALK, arguments=flags) == renderer.render(TALK)
    with pytest.raises(ValueError, match=r"has custom_instructions, and the chat template does not read it"):
        renderer.render(TALK, arguments=flags | {"custom_instructions": "Be brief."})
    with pytest.raises(ValueError, match=r"has xml_tools"):
        renderer.render(TALK, arguments=flags | {"xml_tools": ["{}"]})
