from collections.abc import Callable
from copy import copy
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from sft.data.conversation import Message
from sft.data.documents import token_range
from sft.data.render import ChatRenderer, Rendered, training_template
from sft.data.template_checks import checked_sample
from sft.data.tokenizer import TEMPLATES, load_tokenizer
from sft.errors import ModelError
from sft.recipe.schema import Recipe

MakeRecipe = Callable[..., Recipe]
RealModel = Callable[[str], Path]

# The second answer begins and ends with white space, which is the assistant's as well.
TALK: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello there"},
    {"role": "user", "content": "More? ünï 数"},
    {"role": "assistant", "content": " Süre 数\n"},
]
ANSWERS = ["Hello there", " Süre 数\n"]

UNMARKED = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def demo_tokenizer(make_recipe: MakeRecipe) -> Any:
    return load_tokenizer(make_recipe())


@pytest.fixture(scope="module")
def load(make_recipe: MakeRecipe, real_model: RealModel) -> Callable[..., Any]:
    @cache
    def loaded(name: str, *overrides: str) -> Any:
        return load_tokenizer(make_recipe(f"model.name_or_path={real_model(name)}", *overrides))

    return loaded


def with_template(tokenizer: Any, template: str) -> Any:
    other = copy(tokenizer)
    other.chat_template = template
    return other


def trained_text(tokenizer: Any, messages: list[Message], tools: list[Any] | None = None) -> list[str]:
    """What the trained tokens spell, turn by turn."""
    rendered = ChatRenderer(tokenizer).render(messages, tools)
    encoding = tokenizer(rendered.text, add_special_tokens=False)[0]
    ranges = [token_range(encoding, start, end) for start, end in rendered.spans]
    return [rendered.text[encoding.offsets[first][0] : encoding.offsets[stop - 1][1]] for first, stop in ranges]


def test_the_demos_answers_are_trained_with_their_ends(demo_tokenizer: Any) -> None:
    assert trained_text(demo_tokenizer, TALK) == [f"{answer}<|im_end|>" for answer in ANSWERS]


@pytest.mark.parametrize(("template", "end", "space"), [("chatml", "<|im_end|>", ""), ("plain", "<|im_end|>", " ")])
def test_a_shipped_template_trains_the_answers_with_their_ends(
    template: str, end: str, space: str, demo_tokenizer: Any
) -> None:
    tokenizer = with_template(demo_tokenizer, (TEMPLATES / f"{template}.jinja").read_text())
    assert trained_text(tokenizer, TALK) == [f"{space}{answer}{end}" for answer in ANSWERS]


def test_a_template_without_markers_is_masked_by_comparison(demo_tokenizer: Any) -> None:
    tokenizer = with_template(demo_tokenizer, UNMARKED)
    assert not ChatRenderer(tokenizer).is_marked
    assert trained_text(tokenizer, TALK) == [f"{answer}<|im_end|>" for answer in ANSWERS]


@pytest.mark.parametrize(
    ("name", "overrides", "begin", "end"),
    [
        # TRL's template for training writes the empty thought that generation without thinking is prompted with.
        ("qwen3", [], "<think>\n\n</think>\n\n", "<|im_end|>"),
        ("qwen3", ["model.chat_template=chatml"], "", "<|im_end|>"),
        ("minimind", [], "", "<|im_end|>"),
        ("minimind", ["model.chat_template=chatml"], "", "<|im_end|>"),
        ("stories260k_hf", ["model.chat_template=plain", "model.pad_token=<unk>"], " ", "</s>"),
        (
            "gpt2",
            ["model.chat_template=plain", "model.new_tokens=[<|pad|>]", "model.pad_token=<|pad|>"],
            " ",
            "<|endoftext|>",
        ),
    ],
)
def test_a_real_tokenizer_trains_the_answers_with_their_ends(
    name: str, overrides: list[str], begin: str, end: str, load: Callable[..., Any]
) -> None:
    tokenizer = load(name, *overrides)
    assert trained_text(tokenizer, TALK) == [f"{begin}{answer}{end}" for answer in ANSWERS]


@pytest.mark.parametrize("name", ["qwen3", "minimind"])
def test_a_call_of_a_tool_is_trained_and_its_answer_is_not(name: str, load: Callable[..., Any]) -> None:
    tokenizer = load(name)
    function = {"name": "multiply", "arguments": {"a": 2, "b": 3}}
    talk: list[Message] = [
        {"role": "user", "content": "2 times 3?"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "name": "multiply", "content": "six it is"},
        {"role": "assistant", "content": "It is 6."},
    ]
    tools = [{"type": "function", "function": {"name": "multiply", "description": "Times.", "parameters": {}}}]
    call, answer = trained_text(tokenizer, talk, tools)
    assert '"multiply"' in call
    assert '{"a": 2, "b": 3}' in call
    assert "six it is" not in call + answer
    assert "Times." not in call + answer
    assert answer.endswith("It is 6.<|im_end|>")
    assert call.endswith("<|im_end|>")


def test_a_template_that_rewrites_earlier_turns_is_refused(demo_tokenizer: Any) -> None:
    rewriting = UNMARKED.replace("{{ message['content'] }}", "{{ message['content'] if loop.last else '(earlier)' }}")
    renderer = ChatRenderer(with_template(demo_tokenizer, rewriting))
    with pytest.raises(ValueError, match=r"renders a turn differently once others follow .*Set model.chat_template"):
        renderer.render(TALK)


def test_a_template_may_refuse_a_conversation(demo_tokenizer: Any) -> None:
    strict = "{{ raise_exception('roles must alternate') if messages[0]['role'] == 'system' }}" + UNMARKED
    renderer = ChatRenderer(with_template(demo_tokenizer, strict))
    with pytest.raises(ValueError, match="the chat template refuses it: roles must alternate"):
        renderer.render(TALK)
    assert renderer.render(TALK[1:]).spans


_PACKAGE = find_spec("trl")
assert _PACKAGE is not None
_FOLDER = Path(_PACKAGE.origin or "").parent / "chat_templates"
TRL = {file.stem: file.read_text() for file in sorted(_FOLDER.glob("*.jinja")) if not file.stem.endswith("_training")}
"""The chat templates that the installed TRL knows, as their families ship them."""

MULTIMODAL = {"idefics3", "smolvlm", "llava_next"}
"""Templates that show nothing but lists of parts: text and images."""

THINKING = {
    "deepseek_r1_distill",
    "deepseekv3",
    "nemotron_3_5_lightning",
    "nemotron_3_nano",
    "nemotron_3_super",
    "nemotron_3_ultra",
}
"""Templates whose generation prompt opens a thought that an answer without one does not have."""

NOT_PREFIXES = THINKING | {"gptoss", "phi3", "phi3_5"}
"""Templates whose parts are no prefixes of the whole: those, and those that end the last turn with another token."""

QUESTIONS, REPLIES = ["Wie, ünï 数?", "And so?", "Once more"], ["Süre 数, of course", "So it is.", "No"]
CHAT: list[Message] = [
    turn
    for question, reply in zip(QUESTIONS, REPLIES, strict=True)
    for turn in ({"role": "user", "content": question}, {"role": "assistant", "content": reply})
]


@pytest.fixture(scope="module")
def trl_tokenizer(make_recipe: MakeRecipe) -> Any:
    """Knows the token that ends a turn of Phi-3, behind which its template writes the EOS."""
    return load_tokenizer(make_recipe("model.new_tokens=[<|end|>]"))


def rendered_by(name: str, tokenizer: Any, messages: list[Message]) -> tuple[ChatRenderer, Rendered, list[str]]:
    """With a template of TRL's: the renderer, the text, and the trained stretches."""
    renderer = ChatRenderer(with_template(tokenizer, TRL[name]))
    rendered = renderer.render(messages)
    return renderer, rendered, [rendered.text[start:end] for start, end in rendered.spans]


@pytest.mark.parametrize("name", sorted(TRL))
def test_a_template_without_text_alone_is_refused_and_every_other_is_taken(name: str, trl_tokenizer: Any) -> None:
    renderer = ChatRenderer(with_template(trl_tokenizer, TRL[name]))
    if name in MULTIMODAL:
        with pytest.raises(ModelError, match=r"model.chat_template"):
            checked_sample(renderer)
    else:
        checked_sample(renderer)


@pytest.mark.parametrize("name", sorted(set(TRL) - MULTIMODAL))
def test_the_trained_stretches_are_the_answers_with_their_ends(name: str, trl_tokenizer: Any) -> None:
    _, rendered, turns = rendered_by(name, trl_tokenizer, CHAT)
    assert len(turns) == len(REPLIES)
    ends = []
    for turn, reply in zip(turns, REPLIES, strict=True):
        before, answer, end = turn.partition(reply)
        assert answer
        assert end == end.strip() != ""
        assert not any(other in before + end for other in [*QUESTIONS, *REPLIES])
        ends.append(end)
    assert len(set(ends[:-1])) == 1
    # gpt-oss says with another token that nothing follows.
    assert ends[-1] == ends[0] or name == "gptoss"
    assert rendered.spans == sorted(rendered.spans)
    assert all(before[1] <= after[0] for before, after in zip(rendered.spans, rendered.spans[1:], strict=False))


@pytest.mark.parametrize("name", sorted(set(TRL) - MULTIMODAL))
def test_marked_turns_are_those_that_comparison_finds(name: str, trl_tokenizer: Any) -> None:
    """Two derivations that share nothing but the template's text."""
    renderer, rendered, _ = rendered_by(name, trl_tokenizer, CHAT)
    try:
        compared = renderer.prefix_spans(rendered.text, CHAT, [1, 3, 5])
    except ValueError as error:
        assert "renders a turn differently" in str(error)
        assert name in NOT_PREFIXES
    else:
        assert compared == rendered.spans


@pytest.mark.parametrize("name", sorted(set(TRL) - MULTIMODAL))
def test_what_generation_is_prompted_with_is_not_trained(name: str, trl_tokenizer: Any) -> None:
    renderer, rendered, turns = rendered_by(name, trl_tokenizer, CHAT)
    asked, prompted = (renderer.apply(CHAT[:-1], prompt=prompt) for prompt in (False, True))
    common = next((at for at in range(len(asked)) if not prompted.startswith(asked[: at + 1])), len(asked))
    prompt = prompted[common:]
    assert prompt
    assert renderer.generation_prompt in ("", prompt)
    # The header says whose turn it is. A thought that it opens may be the answer's own, and empty.
    header = prompt.partition("<think>")[0]
    assert not any(header.strip() in turn for turn in turns)
    for start, _ in rendered.spans:
        before = rendered.text[:start]
        assert before.removesuffix("<think>").endswith(header) if name in NOT_PREFIXES else before.endswith(prompt)


@pytest.mark.parametrize("name", sorted(TRL))
def test_the_training_template_is_the_one_that_trl_takes(name: str, demo_tokenizer: Any) -> None:
    """TRL says None of a template that can be trained with as it is, and refuses one that it does not know."""
    from trl.chat_template_utils import get_training_chat_template

    tokenizer = with_template(demo_tokenizer, TRL[name])
    try:
        taken = get_training_chat_template(tokenizer) or TRL[name]
    except ValueError:
        taken = None
    assert training_template(TRL[name]) == taken
    assert training_template(TRL[name] + " ") == (TRL[name] + " " if taken == TRL[name] else None)


def test_thoughts_are_trained_also_where_the_prompt_has_an_empty_one(load: Callable[..., Any]) -> None:
    """In minimind's template, which has no markers, the prompt's thought is no prefix of the turn's."""
    talk = [turn | {"reasoning_content": f"T{at}"} if at in (1, 5) else turn for at, turn in enumerate(CHAT)]
    first, second, third = trained_text(load("minimind"), talk)
    assert first.removeprefix("<think>").strip() == f"T1\n</think>\n\n{REPLIES[0]}<|im_end|>"
    assert second == f"{REPLIES[1]}<|im_end|>"
    assert third.removeprefix("<think>").strip() == f"T5\n</think>\n\n{REPLIES[2]}<|im_end|>"


def test_thoughts_are_shown_in_every_turn_also_where_a_template_knows_none(demo_tokenizer: Any) -> None:
    talk = [turn | {"reasoning_content": f"T{at}"} if at % 2 else turn for at, turn in enumerate(CHAT)]
    for template in (demo_tokenizer.chat_template, TRL["qwen3"], TRL["qwen3_5_think"], TRL["llama3"], UNMARKED):
        tokenizer = with_template(demo_tokenizer, template)
        turns = trained_text(tokenizer, talk)
        for at, (turn, reply) in enumerate(zip(turns, REPLIES, strict=True)):
            assert turn.partition("</think>")[0].removeprefix("<think>").strip() == f"T{2 * at + 1}"
            assert turn.partition("</think>")[2].strip().startswith(reply)


def test_a_template_that_reads_no_arguments_as_text_gets_them_parsed(demo_tokenizer: Any) -> None:
    shown = "{% for call in message.tool_calls or [] %}{{ call.function.name ~ (call.function.arguments | tojson) }}{% endfor %}"
    tokenizer = with_template(
        demo_tokenizer, UNMARKED.replace("{{ message['content'] }}", f"{{{{ message['content'] }}}}{shown}")
    )
    for arguments in ('{"a": "ü"}', {"a": "ü"}):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        talk: list[Message] = [CHAT[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
        assert trained_text(tokenizer, talk) == ['f{"a": "ü"}<|im_end|>']
    talk[1]["tool_calls"][0]["function"]["arguments"] = "{"
    with pytest.raises(ValueError, match=r"`arguments` of a tool call is not JSON .*: '{'"):
        ChatRenderer(tokenizer).render(talk)


def test_tools_that_a_template_would_lose_are_refused(demo_tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=r"has tools, and the chat template does not show them"):
        ChatRenderer(demo_tokenizer).render(CHAT, [{"type": "function", "function": {"name": "f"}}])


MARKED = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("change", "into"),
    [
        ("== 'assistant'", "== 'user'"),
        ("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>"),
        ("{% generation %}{{ message['content'] }}", "{{ message['content'] }}{% generation %}"),
        ("['role'] == 'assistant'", "['role'] == 'assistant' and loop.last"),
        ("['role'] == 'assistant'", "['role'] == 'assistant' and loop.index == 2"),
        ("['role'] == 'assistant'", "['role'] != 'system'"),
        ("{{ message['content'] }}<|im_end|>{% endg", "{{ messages[1]['content'] }}<|im_end|>{% endg"),
        ("{{ message['content'] }}<|im_end|>{% endg", "{{ message['content'] }}{% endg"),
        ("{{ message['content'] }}<|im_end|>{% endg", "<|im_end|>{% endg"),
        ("{% generation %}", "{{ raise_exception('no') }}{% generation %}"),
    ],
)
def test_markers_around_anything_else_than_the_answers_are_refused(change: str, into: str, demo_tokenizer: Any) -> None:
    checked_sample(ChatRenderer(with_template(demo_tokenizer, MARKED)))
    assert change in MARKED
    with pytest.raises(ModelError, match=r"model.chat_template"):
        checked_sample(ChatRenderer(with_template(demo_tokenizer, MARKED.replace(change, into, 1))))
