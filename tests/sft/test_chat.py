from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sft.chat import ChatRenderer, assistant_mask
from sft.errors import ModelError
from sft.recipe import Recipe
from sft.rows import Message
from sft.tokenizer import TEMPLATES, load_tokenizer

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


@pytest.fixture(scope="session")
def demo_tokenizer(make_recipe: MakeRecipe) -> Any:
    return load_tokenizer(make_recipe())


def with_template(tokenizer: Any, template: str) -> Any:
    from copy import copy

    other = copy(tokenizer)
    other.chat_template = template
    return other


def trained_text(tokenizer: Any, messages: list[Message], tools: list[Any] | None = None) -> list[str]:
    """What the trained tokens spell, turn by turn."""
    rendered = ChatRenderer(tokenizer).render(messages, tools)
    encoded = tokenizer(rendered.text, add_special_tokens=False, return_offsets_mapping=True)
    runs: list[list[int]] = []
    mask = assistant_mask(encoded["offset_mapping"], rendered.spans)
    for (start, end), trained, before in zip(encoded["offset_mapping"], mask, [False, *mask], strict=False):
        if trained and not before:
            runs.append([start, end])
        elif trained:
            runs[-1][1] = end
    return [rendered.text[start:end] for start, end in runs]


def test_the_demos_answers_are_trained_with_their_ends(demo_tokenizer: Any) -> None:
    assert trained_text(demo_tokenizer, TALK) == [f"{answer}<|im_end|>" for answer in ANSWERS]


@pytest.mark.parametrize(("template", "end", "space"), [("chatml", "<|im_end|>", ""), ("plain", "<|im_end|>", " ")])
def test_a_shipped_template_trains_the_answers_with_their_ends(
    template: str, end: str, space: str, demo_tokenizer: Any
) -> None:
    tokenizer = with_template(demo_tokenizer, (TEMPLATES / f"{template}.jinja").read_text())
    assert trained_text(tokenizer, TALK) == [f"{space}{answer}{end}" for answer in ANSWERS]


@pytest.mark.parametrize("template", ["chatml", "plain"])
def test_a_shipped_template_asks_as_it_trains(template: str, demo_tokenizer: Any) -> None:
    """What generation is prompted with is exactly what came before the trained tokens."""
    tokenizer = with_template(demo_tokenizer, (TEMPLATES / f"{template}.jinja").read_text())
    rendered = ChatRenderer(tokenizer).render(TALK)
    prompt = tokenizer.apply_chat_template(TALK[:-1], tokenize=False, add_generation_prompt=True)
    assert rendered.text[: rendered.spans[-1][0]] == prompt


def test_a_template_without_markers_is_masked_by_comparison(demo_tokenizer: Any) -> None:
    tokenizer = with_template(demo_tokenizer, UNMARKED)
    assert ChatRenderer(tokenizer).marked_template is None
    assert trained_text(tokenizer, TALK) == [f"{answer}<|im_end|>" for answer in ANSWERS]


def test_markers_and_comparison_agree(demo_tokenizer: Any) -> None:
    marked = with_template(demo_tokenizer, (TEMPLATES / "chatml.jinja").read_text())
    one, other = (ChatRenderer(t).render(TALK) for t in (marked, with_template(demo_tokenizer, UNMARKED)))
    assert one == other


@pytest.mark.parametrize(
    ("name", "overrides", "begin", "end"),
    [
        # TRL's template for training writes the empty thought that generation without thinking is prompted with.
        ("qwen3", [], "<think>\n\n</think>\n\n", "<|im_end|>"),
        ("qwen3", ["model.chat_template=chatml"], "", "<|im_end|>"),
        ("minimind", [], "", "<|im_end|>"),
        ("minimind", ["model.chat_template=chatml"], "", "<|im_end|>"),
        ("stories260k_hf", ["model.chat_template=plain", "model.pad_token=<unk>"], " ", "</s>"),
    ],
)
def test_a_real_tokenizer_trains_the_answers_with_their_ends(
    name: str, overrides: list[str], begin: str, end: str, real_model: RealModel, make_recipe: MakeRecipe
) -> None:
    tokenizer = load_tokenizer(make_recipe(f"model.name_or_path={real_model(name)}", *overrides))
    assert trained_text(tokenizer, TALK) == [f"{begin}{answer}{end}" for answer in ANSWERS]


@pytest.mark.parametrize("name", ["qwen3", "minimind"])
def test_a_call_of_a_tool_is_trained_and_its_answer_is_not(
    name: str, real_model: RealModel, make_recipe: MakeRecipe
) -> None:
    tokenizer = load_tokenizer(make_recipe(f"model.name_or_path={real_model(name)}"))
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
    with pytest.raises(ModelError, match=r"renders a turn differently once others follow .*Set model.chat_template"):
        renderer.render(TALK)


def test_a_template_may_refuse_a_conversation(demo_tokenizer: Any) -> None:
    strict = "{{ raise_exception('roles must alternate') if messages[0]['role'] == 'system' }}" + UNMARKED
    renderer = ChatRenderer(with_template(demo_tokenizer, strict))
    with pytest.raises(ValueError, match="the chat template refuses it: roles must alternate"):
        renderer.render(TALK)
    assert renderer.render(TALK[1:]).spans


@pytest.mark.parametrize(
    ("offsets", "spans", "mask"),
    [
        ([(0, 2), (2, 4)], [], [0, 0]),
        ([(0, 2), (2, 4), (4, 6)], [(2, 4)], [0, 1, 0]),
        ([(0, 3), (3, 6)], [(2, 4)], [1, 1]),  # a token that reaches into the turn belongs to it
        ([(0, 2), (2, 2), (2, 4)], [(2, 4)], [0, 0, 1]),  # a token of no characters is nobody's
        ([(0, 1), (0, 1), (1, 2)], [(0, 1)], [1, 1, 0]),  # several tokens for one character
        ([(0, 1), (1, 2), (2, 3), (3, 4)], [(0, 1), (1, 2), (3, 4)], [1, 1, 0, 1]),
        ([(5, 6)], [(0, 1), (2, 3), (5, 6)], [1]),
    ],
)
def test_a_token_counts_where_any_of_its_characters_do(
    offsets: list[tuple[int, int]], spans: list[tuple[int, int]], mask: list[int]
) -> None:
    assert assistant_mask(offsets, spans) == [bool(one) for one in mask]


def test_transformers_returns_the_spans_that_the_markers_mean() -> None:
    """What `_apply` leans on: texts and, for each, character ranges with the end exclusive."""
    from transformers.utils.chat_template_utils import render_jinja_template

    template = "a{% generation %}bc{% endgeneration %}d{{ bos_token }}"
    texts, spans = render_jinja_template(
        [[{"role": "user", "content": ""}]], chat_template=template, return_assistant_tokens_mask=True, bos_token="<s>"
    )
    assert texts == ["abcd<s>"]
    assert [tuple(span) for span in spans[0]] == [(1, 3)]


def test_trl_has_a_marked_template_for_the_families_without_markers(real_model: RealModel) -> None:
    """What `_marked_template` leans on, for qwen3; of an unknown template TRL says so by a ValueError."""
    from transformers import AutoTokenizer
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers

    tokenizer = AutoTokenizer.from_pretrained(real_model("qwen3"))
    assert not has_generation_markers(tokenizer.chat_template)
    assert has_generation_markers(get_training_chat_template(tokenizer))
    tokenizer.chat_template = UNMARKED.replace("im_start", "imm_start")
    with pytest.raises(ValueError, match="template"):
        get_training_chat_template(tokenizer)
