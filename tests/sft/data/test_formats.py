import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from sft.data.formats import (
    FORMATS,
    Conversation,
    Example,
    Text,
    Tokens,
    renamed,
    row_format,
    to_example,
    unread_columns,
)
from sft.data.readers import read_rows
from sft.errors import DataError
from sft.recipe.schema import Data, Source

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"name": "search", "arguments": {"what": "pie"}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]}


def source(**values: Any) -> Source:
    return Source(path="rows.jsonl", **values)


def example(row: dict[str, Any], of: Source | None = None, **data: Any) -> Example:
    of = of or source()
    return to_example(renamed(row, of), row_format([row], of), Data(train="rows.jsonl", **data), of)


def conversation(row: dict[str, Any], of: Source | None = None, **data: Any) -> Conversation:
    made = example(row, of, **data)
    assert isinstance(made, Conversation)
    assert len(made.messages) == len(made.trained)
    return made


def turn(message: Any) -> dict[str, Any]:
    return conversation({"messages": [message]}).messages[0]


def parts(*given: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"type": kind, "value": value} for kind, value in given]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, ANSWER]},
        {"messages": json.dumps([USER, ANSWER])},
        {"messages": [USER | {"name": None, "tool_calls": None}, ANSWER], "tools": None, "system": None},
        {"messages": [USER, ANSWER], "tools": "", "system": ""},
        {"messages": [USER, ANSWER], "tools": "[]", "chat_template_kwargs": None},
        {"messages": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        {
            "messages": [
                USER,
                {"role": "gpt", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]},
            ]
        },
        {"messages": [USER, {"role": "assistant", "content": parts(("text", "Hel"), ("text", "lo"))}]},
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "text", "text": None},
                        {"type": "text", "text": "Hello", "value": None},
                        {"type": "text", "value": ""},
                    ],
                },
            ]
        },
        {"messages": [USER, ANSWER | {"loss_weight": 1.0}]},
        {"prompt": "Hi", "completion": "Hello"},
        {"prompt": [USER], "completion": [ANSWER]},
        {"prompt": json.loads(json.dumps([USER])), "completion": "Hello"},
        {"prompt": [{"role": "human", "content": "Hi"}], "completion": "Hello"},
        {"prompt": "Hi", "completion": [{"from": "gpt", "value": "Hello"}]},
        {"instruction": "Hi", "output": "Hello"},
        {"instruction": "Hi", "output": "Hello", "text": "### Hi\n### Hello"},
        {"instruction": "Hi", "input": "", "output": "Hello", "history": None},
        {"instruction": "Hi", "input": None, "output": "Hello", "history": []},
        {"instruction": "", "input": "Hi", "output": "Hello"},
        {"instruction": None, "input": "Hi", "output": "Hello"},
        {"instruction": "Hi", "response": "Hello"},
        {"instruction": "Hi", "output": None, "response": "Hello"},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        {"conversations": json.dumps([{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}])},
        {"conversations": [USER, ANSWER]},
        {"conversations": [{"from": "user", "value": "Hi", "weight": 0}, {"from": "chatgpt", "value": "Hello"}]},
    ],
)
def test_rows_of_every_format_become_the_one_form(row: dict[str, Any]) -> None:
    assert conversation(row) == Conversation([USER, ANSWER], None, [False, True])


def test_an_alpaca_row_keeps_its_input_its_history_and_its_system_prompt() -> None:
    row = {"instruction": "Add.", "input": "1+1", "output": "2", "history": [["Hi", "Hello"]], "system": "Be brief."}
    made = conversation(row)
    question, answer = {"role": "user", "content": "Add.\n1+1"}, {"role": "assistant", "content": "2"}
    assert made.messages == [SYSTEM, USER, ANSWER, question, answer]
    assert made.trained == [False, False, True, False, True]


def test_a_call_of_a_tool_becomes_the_assistants_turn_with_its_tools() -> None:
    row = {
        "conversations": [
            {"from": "human", "value": "Hi"},
            {"from": "function_call", "value": json.dumps(CALL)},
            {"from": "observation", "value": "nothing"},
            {"from": "function_call", "value": json.dumps([CALL, CALL])},
        ],
        "tools": json.dumps([{"name": "search"}]),
    }
    made = conversation(row)
    assert made.messages[:3] == [USER, CALLED, {"role": "tool", "content": "nothing"}]
    assert made.messages[3]["tool_calls"] == CALLED["tool_calls"] * 2
    assert made.trained == [False, True, False, True]
    tools = [{"type": "function", "function": {"name": "search"}}]
    assert made.tools == tools == conversation(row | {"tools": [{"name": "search"}]}).tools


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": CALL}]},
        {"role": "assistant", "tool_calls": [{"function": CALL}]},
        {"role": "assistant", "tool_calls": [CALL | {"type": "function"}]},
        {"role": "assistant", "content": parts(("tool_call", CALL))},
        {"role": "assistant", "content": parts(("tool_call", json.dumps(CALL)))},
        {"role": "assistant", "content": parts(("text", ""), ("tool_call", json.dumps([CALL])))},
        {"role": "assistant", "content": [{"type": "tool_call", "tool_call": CALL}]},
        {"role": "function_call", "content": json.dumps(CALL)},
        {"from": "function_call", "value": json.dumps([CALL])},
    ],
)
def test_a_call_is_one_however_it_is_written(message: dict[str, Any]) -> None:
    assert turn(message) == CALLED


TALK = [SYSTEM, USER, ANSWER, USER, ANSWER]
SPLIT = {"prompt": TALK[:4], "completion": TALK[4:]}


@pytest.mark.parametrize(
    ("loss_on", "messages", "completions", "history"),
    [
        ("auto", [0, 0, 1, 0, 1], [0, 0, 0, 0, 1], [0, 0, 1, 0, 1]),
        ("assistant", [0, 0, 1, 0, 1], [0, 0, 1, 0, 1], [0, 0, 1, 0, 1]),
        ("last_assistant", [0, 0, 0, 0, 1], [0, 0, 0, 0, 1], [0, 0, 0, 0, 1]),
        ("completion", None, [0, 0, 0, 0, 1], [0, 0, 0, 0, 1]),
        ("all", [0, 0, 1, 0, 1], [0, 0, 1, 0, 1], [0, 0, 1, 0, 1]),
    ],
)
def test_the_recipe_says_which_turns_are_trained(
    loss_on: str, messages: list[int] | None, completions: list[int], history: list[int]
) -> None:
    if messages is not None:
        assert conversation({"messages": TALK}, loss_on=loss_on).trained == messages
        assert conversation({"conversations": TALK}, loss_on=loss_on).trained == messages
    assert conversation(SPLIT, loss_on=loss_on).trained == completions
    with_system = {"prompt": TALK[1:4], "completion": "Hello", "system": SYSTEM["content"]}
    assert conversation(with_system, loss_on=loss_on).trained == completions
    alpaca = {"instruction": "Hi", "output": "Hello", "history": [["Hi", "Hello"]], "system": SYSTEM["content"]}
    assert conversation(alpaca, loss_on=loss_on).trained == history


def test_without_a_chat_template_prompt_and_completion_stay_text() -> None:
    plain = source(chat=False)
    assert example({"prompt": "1 + 1 =", "completion": " 2"}, plain) == Text("1 + 1 =", " 2")
    assert example({"prompt": None, "completion": " 2"}, plain) == Text("", " 2")
    with pytest.raises(ValueError, match="content"):
        example({"prompt": [USER], "completion": [ANSWER]}, plain)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"messages": [{"role": "narrator", "content": "x"}]}, "unknown role 'narrator'; known: assistant"),
        ({"messages": [{"content": "x"}]}, "a message has no `role`"),
        ({"messages": ["x"]}, "a message has no `role`"),
        ({"messages": {"role": "user"}}, "`messages` is of type dict, not a list of messages"),
        ({"messages": 5}, "`messages` is of type int, not a list of messages"),
        ({"messages": "Hi"}, "`messages` is not JSON"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "parts of type image; only text"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "parts of type str; only text"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "without a `text`"),
        ({"messages": [{"role": "user", "content": 5}]}, "content is of type int, not text"),
        ({"messages": [ANSWER | {"reasoning": 5}]}, "content is of type int, not text"),
        ({"conversations": [{"from": "human"}]}, "a message has no `role`"),
        ({"conversations": [{"from": "function_call", "value": "{"}]}, "a function call is not JSON .*: '{'"),
        ({"messages": [{"role": "assistant", "content": parts(("tool_call", "{"))}]}, "a tool call is not JSON"),
        ({"messages": [CALLED | {"tool_calls": [{"arguments": {}}]}]}, "a tool call has no name"),
        ({"messages": [CALLED | {"tool_calls": ["x"]}]}, "a tool call has no name"),
        ({"messages": [CALLED | {"tool_calls": [{"function": {"arguments": {}}}]}]}, "a tool call has no name"),
        ({"instruction": 5, "output": "x"}, "content is of type int"),
        ({"instruction": "x", "output": ["y"]}, "content has parts of type str"),
        ({"prompt": 5, "completion": "x"}, "`prompt` is of type int, not a list of messages"),
        ({"messages": [USER], "tools": "{"}, "`tools` is not JSON"),
        ({"messages": [USER], "tools": {"name": "f"}}, "`tools` is of type dict, not a list"),
        ({"text": 5}, "content is of type int"),
        ({"input_ids": "5 6"}, "`input_ids` is not a list of whole numbers"),
        ({"input_ids": [5, 6.0]}, "`input_ids` is not a list of whole numbers"),
        ({"input_ids": [5, True]}, "`input_ids` is not a list of whole numbers"),
        ({"input_ids": [5], "labels": "x"}, "`labels` is not a list of whole numbers"),
        ({"input_ids": [5, 6], "labels": [6]}, "`labels` has 1 numbers, and `input_ids` 2"),
    ],
)
def test_a_row_that_is_wrong_says_where(row: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        example(row)


@pytest.mark.parametrize("format", sorted(FORMATS))
def test_a_row_without_a_column_that_its_source_has_names_it(format: str) -> None:
    column, *others = sorted(FORMATS[format].columns)
    with pytest.raises(ValueError, match=f"it has no column '{column}'"):
        to_example(dict.fromkeys(others, "x"), format, Data(train="rows.jsonl"), source())


@pytest.mark.parametrize("format", list(FORMATS))
def test_a_format_is_known_by_its_columns(format: str) -> None:
    assert row_format([dict.fromkeys(FORMATS[format].columns | {"id", "source"})], source()) == format
    assert row_format([dict.fromkeys(FORMATS[format].columns)], source(format=format)) == format


def test_columns_go_by_the_names_that_the_recipe_gives_them() -> None:
    asked = source(columns={"instruction": "question", "output": "answer"})
    assert conversation({"question": "Hi", "answer": "Hello", "id": 5}, asked).messages == [USER, ANSWER]
    swapped = source(columns={"prompt": "completion", "completion": "prompt"})
    assert conversation({"prompt": "Hello", "completion": "Hi"}, swapped).messages == [USER, ANSWER]
    # A column that has become another one is no longer there under its own name.
    assert renamed({"text": "a", "output": "b", "id": 5}, source(columns={"output": "text"})) == {
        "output": "a",
        "id": 5,
    }
    with pytest.raises(DataError, match=r"has no column answer, which `columns` names. Found: question"):
        row_format([dict.fromkeys({"question"})], asked)
    with pytest.raises(DataError, match=r"`columns` of rows.jsonl names answer twice"):
        row_format(
            [dict.fromkeys({"question", "answer"})], source(columns={"prompt": "answer", "completion": "answer"})
        )


def test_preference_data_is_refused_until_its_answers_are_named() -> None:
    with pytest.raises(DataError, match=r"preference data .*DPO.*columns: {completion: chosen}"):
        row_format([dict.fromkeys({"prompt", "chosen", "rejected"})], source())
    with pytest.raises(DataError, match="preference data"):
        row_format([dict.fromkeys({"messages", "chosen", "rejected"})], source())
    named = source(columns={"completion": "chosen"}, format="prompt_completion")
    row = {"prompt": "Hi", "chosen": "Hello", "rejected": "No"}
    assert conversation(row, named) == Conversation([USER, ANSWER], None, [False, True])


def test_a_stated_format_that_the_columns_are_not_is_refused() -> None:
    with pytest.raises(DataError, match=r"format=sharegpt and no conversations. Found: messages"):
        row_format([dict.fromkeys({"messages"})], source(format="sharegpt"))
    with pytest.raises(DataError, match=r"format=prompt_completion and no completion, prompt. Found: none"):
        row_format([{}], source(format="prompt_completion"))


def test_useless_columns_are_named_beside_the_useful_ones() -> None:
    with pytest.raises(DataError) as error:
        row_format([dict.fromkeys({"body", "label"})], source())
    message = str(error.value)
    assert message.startswith("rows.jsonl has no usable columns. Found: body, label.")
    for needed in FORMATS.values():
        assert all(f"`{column}`" in message for column in needed.columns)
    with pytest.raises(DataError, match="Found: none"):
        row_format([{}], source())


@pytest.mark.parametrize(
    ("file", "format"),
    [
        ("llamafactory/alpaca_en_demo.json", "alpaca"),
        ("llamafactory/alpaca_zh_demo.json", "alpaca"),
        ("llamafactory/identity.json", "alpaca"),
        ("llamafactory/glaive_toolcall_en_demo.json", "sharegpt"),
        ("llamafactory/v1_sft_demo.jsonl", "messages"),
        ("llamafactory/reason_tool_use_demo_50.jsonl", "messages"),
        ("gpteacher_roleplay.json", "alpaca"),
        ("oasst_en_best_path.jsonl", "messages"),
        ("oasst_sft_zh.json", "alpaca"),
        ("raschka_instruction_data.json", "alpaca"),
        ("sgd_messages_tools_600.jsonl", "messages"),
        ("t0_short.jsonl", "prompt_completion"),
        ("fixtures/axolotl_conversation.json", "sharegpt"),
        ("fixtures/torchtune_alpaca_tiny.json", "alpaca"),
    ],
)
def test_real_files_become_the_one_form(file: str, format: str, shared: Path) -> None:
    rows = [row for row in islice(read_rows(shared / "sft" / file), 300) if isinstance(row, dict)]
    assert row_format(rows, source()) == format
    answered = 0
    for row in rows:
        made = to_example(row, format, Data(train="x"), source())
        assert isinstance(made, Conversation)
        assert all(isinstance(message["content"], str) for message in made.messages)
        assert all(
            message["role"] == "assistant" for message, kept in zip(made.messages, made.trained, strict=True) if kept
        )
        assert isinstance(made.tools, list | None)
        answered += any(made.trained)
    assert answered > 0.9 * len(rows) > 0


MASKED = {"input_ids": [5, 6, 7, 8], "attention_mask": [1, 1, 1, 1]}


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"attention_mask": [1, 1, 1, 0]}, Tokens([5, 6, 7], None)),
        ({"attention_mask": [0, 1, 1, 0]}, Tokens([6, 7], None)),
        ({"attention_mask": [0, 0, 0, 0]}, Tokens([], None)),
        ({"attention_mask": None}, Tokens([5, 6, 7, 8], None)),
        ({"attention_mask": [1, 1, 1, 0], "labels": [-100, 6, 7, -100]}, Tokens([5, 6, 7], [-100, 6, 7])),
        # What is padding is not looked at: some collators give it labels.
        ({"attention_mask": [0, 1, 1, 1], "labels": [5, 6, -100, 8]}, Tokens([6, 7, 8], [6, -100, 8])),
        ({"completion_mask": [0, 0, 1, 1]}, Tokens([5, 6, 7, 8], [-100, -100, 7, 8])),
        ({"assistant_masks": [0, 1, 0, 1]}, Tokens([5, 6, 7, 8], [-100, 6, -100, 8])),
        ({"completion_mask": [0, 0, 1, 1], "assistant_masks": [0, 1, 0, 1]}, Tokens([5, 6, 7, 8], [-100] * 3 + [8])),
        ({"completion_mask": [0, 0, 0, 0]}, Tokens([5, 6, 7, 8], [-100] * 4)),
        ({"completion_mask": None, "assistant_masks": None}, Tokens([5, 6, 7, 8], None)),
        ({"attention_mask": [1, 1, 1, 0], "completion_mask": [0, 1, 1, 0]}, Tokens([5, 6, 7], [-100, 6, 7])),
        # Labels say it themselves.
        (
            {"labels": [-100, 6, -100, -100], "completion_mask": [0, 0, 1, 1]},
            Tokens([5, 6, 7, 8], [-100, 6, -100, -100]),
        ),
    ],
)
def test_the_masks_of_a_tokenized_row_become_its_labels(columns: dict[str, Any], expected: Tokens) -> None:
    assert example(MASKED | columns) == expected


@pytest.mark.parametrize(
    "name",
    """messages tools documents chat_template tokenize add_generation_prompt continue_final_message
    return_assistant_tokens_mask strftime_now bos_token eos_token pad_token""".split(),
)
def test_what_the_run_decides_is_not_for_a_row_to_set(name: str) -> None:
    for given in ({name: "x", "thinking": True}, json.dumps({name: "x", "thinking": True})):
        with pytest.raises(ValueError, match=f"`chat_template_kwargs` sets {name}, which a row may not set"):
            conversation({"messages": [USER, ANSWER], "chat_template_kwargs": given})


THOUGHTS = ["<think>Hm.</think>Hello", "<think>\nHm.\n</think>\n\nHello", "Hm.\n</think>\n\nHello", "</think>Hello"]


@pytest.mark.parametrize("answer", THOUGHTS)
def test_dropped_thoughts_are_dropped_with_and_without_a_chat_template(answer: str) -> None:
    row = {"prompt": "Hi", "completion": answer}
    assert example(row, source(chat=False), reasoning="drop") == Text("Hi", "Hello")
    assert example(row, source(chat=False)) == Text("Hi", answer)
    said = {"role": "assistant", "content": answer}
    for given in (row, {"messages": [USER, said]}, {"instruction": "Hi", "output": answer}):
        assert conversation(given, reasoning="drop").messages == [USER, ANSWER]
        assert conversation(given).messages == [USER, said]


@pytest.mark.parametrize(
    ("format", "others"),
    [
        ("messages", ["prompt_id", "text"]),
        ("sharegpt", ["id"]),
        ("prompt_completion", ["source"]),
        ("alpaca", ["label", "text"]),
        ("tokens", ["token_type_ids"]),
        ("text", ["meta"]),
    ],
)
def test_columns_that_nobody_reads_are_known(format: str, others: list[str]) -> None:
    assert unread_columns([dict.fromkeys(FORMATS[format].columns | set(others))], format, source()) == others
    assert unread_columns([dict.fromkeys(FORMATS[format].columns)], format, source()) == []


@pytest.mark.parametrize("name", ["images", "videos", "audios", "functions"])
def test_a_column_that_would_be_left_out_in_silence_is_refused(name: str) -> None:
    for row in ({"messages": [USER, ANSWER]}, {"prompt": "Hi", "completion": "Hello"}, {"text": "Hi"}):
        with pytest.raises(ValueError, match=f"it has `{name}`: "):
            example(row | {name: ["x"]})
        for none in (None, [], ""):
            assert example(row | {name: none}) == example(row)
    tools = [{"type": "function", "function": {"name": "f"}}]
    named = source(columns={"tools": "functions"})
    assert conversation({"messages": [USER, ANSWER], "functions": tools}, named).tools == tools
