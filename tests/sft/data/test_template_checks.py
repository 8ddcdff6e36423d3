from collections.abc import Callable
from copy import copy
from functools import cache
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from sft.data.conversation import Message
from sft.data.documents import Chunk, DocumentMaker, RowError
from sft.data.formats import row_format
from sft.data.readers import read_rows
from sft.data.tokenizer import load_tokenizer
from sft.recipe.schema import Recipe, Source

MakeRecipe = Callable[..., Recipe]
Made = Callable[..., Chunk]

_PACKAGE = find_spec("trl")
assert _PACKAGE is not None
TEMPLATES = Path(_PACKAGE.origin or "").parent / "chat_templates"

ENDS = "model.new_tokens=['<|end|>', '<|return|>', '<|call|>', '<|eot_id|>', '<|eom_id|>']"
"""Tokens that end turns in the templates of other families."""

SYSTEM, SECOND = {"role": "system", "content": "First rule."}, {"role": "system", "content": "Second rule."}
USER, ANSWER = {"role": "user", "content": "Question one"}, {"role": "assistant", "content": "Answer one"}
CALL = {"type": "function", "function": {"name": "search", "arguments": {"what": "pie"}}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
FOUND = [{"role": "tool", "name": "search", "content": "five"}, {"role": "assistant", "content": "Five."}]
TOOL = {"name": "search", "description": "Finds.", "parameters": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
def tokenizer_of(make_recipe: MakeRecipe, real_model: Callable[[str], Path]) -> Callable[[str], Any]:
    """A real tokenizer, or the demo's with a template of TRL's."""

    @cache
    def load(name: str) -> Any:
        if name in ("qwen3", "minimind"):
            return load_tokenizer(make_recipe(f"model.name_or_path={real_model(name)}"))
        tokenizer = copy(load_tokenizer(make_recipe(ENDS)))
        if name != "demo":
            tokenizer.chat_template = (TEMPLATES / name).with_suffix(".jinja").read_text()
        return tokenizer

    return load


@pytest.fixture(scope="module")
def made(make_recipe: MakeRecipe, tokenizer_of: Callable[[str], Any]) -> Made:
    """One row of these messages as a document."""

    def make(name: str, messages: list[Message], **data: object) -> Chunk:
        overrides = [f"data.{key}={value}" for key, value in ({"max_length": 4096} | data).items()]
        maker = DocumentMaker(make_recipe(*overrides).data, tokenizer_of(name))
        tools = [{"type": "function", "function": TOOL}] if any("tool_calls" in message for message in messages) else []
        return maker.make(Source(path="rows"), 0, "messages", [(1, {"messages": messages, "tools": tools})])

    return make


def text_of(chunk: Chunk, tokenizer: Any) -> str:
    assert len(chunk.documents) == 1
    return str(tokenizer.decode(chunk.tokens.tolist()))


@pytest.mark.parametrize("name", ["qwen3", "minimind"])
def test_a_developer_is_the_system_where_the_template_knows_none(
    name: str, made: Made, tokenizer_of: Callable[[str], Any]
) -> None:
    asked = made(name, [SYSTEM | {"role": "developer"}, USER, ANSWER])
    assert "<|im_start|>system\nFirst rule.<|im_end|>" in text_of(asked, tokenizer_of(name))
    assert asked.tokens.tolist() == made(name, [SYSTEM, USER, ANSWER]).tokens.tolist()


def test_a_developer_is_one_where_the_template_has_a_place_for_it(
    made: Made, tokenizer_of: Callable[[str], Any]
) -> None:
    chunk = made("demo", [SYSTEM | {"role": "developer"}, USER, ANSWER])
    assert "<|im_start|>developer\nFirst rule.<|im_end|>" in text_of(chunk, tokenizer_of("demo"))


def thinking(*thoughts: str, as_text: bool = False) -> list[Message]:
    turns: list[Message] = []
    for number, thought in enumerate(thoughts):
        answer = {"role": "assistant", "content": f"Answer {number}"}
        if thought:
            answer |= {"content": f"<think>{thought}</think>Answer {number}"} if as_text else {"reasoning": thought}
        turns += [{"role": "user", "content": f"Question {number}"}, answer]
    return turns


def beside(text: str) -> list[Message]:
    return [USER, CALLED | {"content": text}, *FOUND]


def think(before: str) -> list[Message]:
    return [USER, {"role": "assistant", "content": f"{before}<think>Hm, hm</think>After it"}]


LOST = {
    "text before thoughts": (
        ["qwen3", "qwen3_6", "minimind"],
        think("Before it "),
        "assistant",
        "Before it",
        think(""),
    ),
    "text beside a call": (["llama3_1", "gptoss"], beside("I look it up"), "assistant", "I look it up", beside("")),
    "a second system message": (
        ["gptoss", "qwen3_vl"],
        [SYSTEM, SECOND, USER, ANSWER],
        "system",
        "Second rule.",
        [SYSTEM, USER, ANSWER],
    ),
    "thoughts of earlier turns": (
        ["nemotron_3_nano", "lfm2_2_5"],
        thinking("Mull one", "Mull two"),
        "assistant",
        "Mull one",
        thinking("", "Mull two"),
    ),
    "thoughts in the text of earlier turns": (
        ["nemotron_3_nano", "lfm2_2_5"],
        thinking("Mull one", "Mull two", as_text=True),
        "assistant",
        "Mull one",
        thinking("", "Mull two", as_text=True),
    ),
}
"""Templates that leave it out, a conversation that has it, whose and what, and the same conversation without."""


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, (names, *_) in LOST.items() for name in names])
def test_what_a_template_leaves_out_is_refused_with_role_and_text(kind: str, name: str, made: Made) -> None:
    _, messages, role, text, without = LOST[kind]
    with pytest.raises(RowError) as error:
        made(name, messages)
    assert f"the chat template leaves out what the {role} says: {text!r}. Set model.chat_template" in error.value.reason
    assert made(name, messages, on_bad_row="drop").counts.dropped_rows == {"bad_row": 1}
    # The text it is, and not the template or the rest of the conversation.
    assert len(made(name, without).documents) == 1


"""Templates that leave it out, though its words stand elsewhere in the same turn."""


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("name", ["nemotron_3_nano", "lfm2_2_5"])
def test_earlier_thoughts_that_nobody_trains_may_be_left_out(
    name: str, as_text: bool, made: Made, tokenizer_of: Callable[[str], Any]
) -> None:
    """As they are when the model answers."""
    messages = thinking("Mull one", "Mull two", as_text=as_text)
    text = text_of(made(name, messages, loss_on="last_assistant"), tokenizer_of(name))
    assert "Mull one" not in text
    assert "Mull two" in text
    messages[1] |= {"weight": 0}
    assert text_of(made(name, messages), tokenizer_of(name)) == text
    for message in messages:
        message.pop("weight", None)
    assert "Mull" not in text_of(made(name, messages, reasoning="drop"), tokenizer_of(name))


REAL = {
    "gpteacher_roleplay.json": 60,
    "oasst_en_best_path.jsonl": 60,
    "oasst_sft_zh.json": 60,
    "raschka_instruction_data.json": 60,
    "sgd_messages_tools_600.jsonl": 60,
    "t0_short.jsonl": 60,
    "llamafactory/alpaca_en_demo.json": 60,
    "llamafactory/alpaca_zh_demo.json": 60,
    "llamafactory/glaive_toolcall_en_demo.json": 60,
    "llamafactory/identity.json": 60,
    "llamafactory/reason_tool_use_demo_50.jsonl": 50,
    "llamafactory/v1_sft_demo.jsonl": 60,
    "fixtures/axolotl_alpaca.json": 1,
    "fixtures/axolotl_conversation.json": 1,
    "fixtures/torchtune_alpaca_tiny.json": 60,
    "fixtures/torchtune_chat_tiny.json": 1,
}
"""Files that prepare, and how many rows each gives at least."""


@pytest.mark.parametrize("name", ["qwen3", "minimind"])
@pytest.mark.parametrize("file", REAL)
def test_real_rows_lose_nothing(
    file: str, name: str, make_recipe: MakeRecipe, tokenizer_of: Callable[[str], Any], shared: Path
) -> None:
    rows = [row for row in islice(read_rows(shared / "sft" / file), 60) if isinstance(row, dict)]
    assert len(rows) >= REAL[file]
    format = row_format(rows, Source(path=file))
    maker = DocumentMaker(make_recipe("data.max_length=65536").data, tokenizer_of(name))
    assert len(maker.make(Source(path=file), 0, format, list(enumerate(rows, start=1))).documents) > 0.9 * len(rows)
