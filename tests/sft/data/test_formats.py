import json
from typing import Any, get_args

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
from sft.errors import DataError
from sft.recipe.data import Column
from sft.recipe.schema import REPOSITORY, Data, Source

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
SYSTEM = {"role": "system", "content": "Be brief."}
SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]


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


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, ANSWER], "tools": None, "system": ""},
        {"messages": json.dumps([USER, ANSWER]), "tools": "[]", "chat_template_kwargs": None},
        {"messages": SHAREGPT},
        {"messages": [USER, ANSWER | {"loss_weight": 1.0}]},
        {"prompt": "Hi", "completion": "Hello"},
        {"prompt": [USER], "completion": [ANSWER]},
        {"instruction": "Hi", "output": "Hello", "text": "### Hi\n### Hello"},
        {"instruction": "", "input": "Hi", "output": "Hello"},
        {"instruction": "Hi", "output": None, "response": "Hello"},
        {"conversations": SHAREGPT},
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


def test_tools_become_those_that_servers_give_the_template() -> None:
    tools = [{"type": "function", "function": {"name": "search"}}]
    for given in (tools, [{"name": "search"}], json.dumps([{"name": "search"}]), [json.dumps(tools[0])]):
        assert conversation({"conversations": SHAREGPT, "tools": given}).tools == tools
    called = conversation({"conversations": [*SHAREGPT, {"from": "function_call", "value": '{"name": "search"}'}]})
    assert called.trained == [False, True, True]


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


@pytest.mark.parametrize("key", ["weight", "loss_weight", "train", "training", "loss"])
def test_a_row_may_take_a_turn_out_of_the_loss(key: str) -> None:
    assert conversation({"messages": [USER, ANSWER | {key: 0}, USER, ANSWER | {key: 1.0}]}).trained == [0, 0, 0, 1]


def test_without_a_chat_template_prompt_and_completion_stay_text() -> None:
    plain = source(chat=False)
    assert example({"prompt": "1 + 1 =", "completion": " 2"}, plain) == Text("1 + 1 =", " 2")
    assert example({"prompt": None, "completion": " 2"}, plain) == Text("", " 2")
    for row in ({"prompt": [USER], "completion": [ANSWER]}, {"prompt": "a", "completion": "b", "system": "c"}):
        with pytest.raises(ValueError, match=r"content|`chat: false` leaves no place"):
            example(row, plain)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"messages": [{"role": "narrator", "content": "x"}]}, "unknown role 'narrator'; known: assistant"),
        ({"messages": [{"content": "x"}]}, "a message has neither `role` nor `from`"),
        ({"messages": {"role": "user"}}, "`messages` is of type dict, not a list of messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "parts of type image; only text"),
        ({"messages": [{"role": "user", "content": 5}]}, "content is of type int, not text"),
        ({"messages": [ANSWER | {"train_detail": [1]}]}, "`train_detail` of a message trains parts of a turn"),
        ({"messages": [SYSTEM, USER], "system": "Other."}, "another one in the column `system`"),
        ({"conversations": [{"from": "function_call", "value": "{"}]}, "a function call is not JSON .*: '{'"),
        ({"instruction": "x", "output": "y", "history": [["a"]]}, "`history` is not a list of pairs"),
        ({"messages": [USER], "tools": {"name": "f"}}, "`tools` is of type dict, not a list"),
        ({"input_ids": [5, True]}, "`input_ids` is not a list of whole numbers"),
        ({"input_ids": [5, 6], "labels": [6]}, "`labels` has 1 numbers, and `input_ids` 2"),
        ({"input_ids": [5, 6], "attention_mask": [1, 0]}, "it is padded. Remove the padding"),
        ({"input_ids": [5, 6], "completion_mask": [0, 1]}, "has `completion_mask` and no `labels`"),
    ],
)
def test_a_row_that_is_wrong_says_where(row: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        example(row)


def test_tokens_have_labels_of_their_own_or_are_all_trained() -> None:
    beside = {"attention_mask": [1, 1], "position_ids": [0, 1]}
    assert example({"input_ids": [5, 6]} | beside) == Tokens([5, 6], [5, 6])
    assert example({"input_ids": [5, 6], "labels": [-100, 6], "loss_mask": [1, 1]}) == Tokens([5, 6], [-100, 6])


def test_a_recipe_can_name_every_format_and_rename_every_column_and_the_docs_list_them() -> None:
    assert set(FORMATS) == set(get_args(get_args(Source.model_fields["format"].annotation)[0]))
    columns = {name for format in FORMATS.values() for name in format.columns | format.optional}
    assert set(get_args(Column)) <= columns
    assert {name for format in FORMATS.values() for name in format.columns} <= set(get_args(Column))
    table = (REPOSITORY / "docs" / "data.md").read_text()
    assert all(f"| {format} |" in table for format in FORMATS)


@pytest.mark.parametrize("format", sorted(FORMATS))
def test_a_format_is_known_by_its_columns(format: str) -> None:
    columns = FORMATS[format].columns
    assert row_format([dict.fromkeys(columns | {"id", "source"})], source()) == format
    assert row_format([dict.fromkeys(columns)], source(format=format)) == format
    column, *others = sorted(columns)
    with pytest.raises(ValueError, match=f"it has no column '{column}'"):
        to_example(dict.fromkeys(others, "x"), format, Data(train="rows.jsonl"), source())


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
        row_format([{"question": "x"}], asked)
    with pytest.raises(DataError, match=r"`columns` of rows.jsonl names answer twice"):
        row_format([{"answer": "x"}], source(columns={"prompt": "answer", "completion": "answer"}))


def test_preference_data_is_refused_until_its_answers_are_named() -> None:
    with pytest.raises(DataError, match=r"preference data .*DPO.*columns: {completion: chosen}"):
        row_format([dict.fromkeys({"prompt", "chosen", "rejected"})], source())
    named = source(columns={"completion": "chosen"}, format="prompt_completion")
    row = {"prompt": "Hi", "chosen": "Hello", "rejected": "No"}
    assert conversation(row, named) == Conversation([USER, ANSWER], None, [False, True])


def test_columns_of_no_format_or_not_of_the_stated_one_are_refused() -> None:
    with pytest.raises(DataError, match=r"format=sharegpt and no conversations. Found: messages"):
        row_format([{"messages": []}], source(format="sharegpt"))
    with pytest.raises(DataError, match=r"^rows.jsonl has no usable columns. Found: body, label. Usable: ") as error:
        row_format([{"body": "x", "label": "y"}], source())
    assert all(f"`{column}`" in str(error.value) for format in FORMATS.values() for column in format.columns)


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "strftime_now", "bos_token"])
def test_what_the_run_decides_is_not_for_a_row_to_set(name: str) -> None:
    for given in ({name: "x", "thinking": True}, json.dumps({name: "x", "thinking": True})):
        with pytest.raises(ValueError, match=f"`chat_template_kwargs` sets {name}, which a row may not set"):
            conversation({"messages": [USER, ANSWER], "chat_template_kwargs": given})
    kept = conversation({"messages": [USER, ANSWER], "chat_template_kwargs": '{"thinking": true}'})
    assert kept.template_arguments == {"thinking": True}


def test_dropped_reasoning_is_dropped_with_and_without_a_chat_template() -> None:
    answer = "<think>\nHm.\n</think>\n\nHello"
    row = {"prompt": "Hi", "completion": answer}
    assert example(row, source(chat=False), reasoning="drop") == Text("Hi", "Hello")
    assert example(row, source(chat=False)) == Text("Hi", answer)
    for given in (row, {"messages": [USER, ANSWER | {"content": answer}]}, {"instruction": "Hi", "output": answer}):
        assert conversation(given, reasoning="drop").messages == [USER, ANSWER]
        assert conversation(given).messages == [USER, ANSWER | {"content": answer}]


def test_columns_that_nobody_reads_are_known() -> None:
    for format, other in (("messages", "prompt_id"), ("alpaca", "text"), ("tokens", "token_type_ids")):
        assert unread_columns([dict.fromkeys(FORMATS[format].columns | {other})], format, source()) == [other]
        assert unread_columns([dict.fromkeys(FORMATS[format].columns)], format, source()) == []


@pytest.mark.parametrize("name", ["images", "videos", "audios", "functions"])
def test_a_column_that_would_be_left_out_in_silence_is_refused(name: str) -> None:
    row = {"messages": [USER, ANSWER]}
    with pytest.raises(ValueError, match=f"it has `{name}`: "):
        example(row | {name: ["x"]})
    for none in (None, [], ""):
        assert example(row | {name: none}) == example(row)
    tools = [{"type": "function", "function": {"name": "f"}}]
    named = source(columns={"tools": "functions"})
    assert conversation({"messages": [USER, ANSWER], "functions": tools}, named).tools == tools
