import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sft.errors import DataError
from sft.rows import FORMATS, ROLES, first_rows, local_files, read_rows, row_format, to_messages

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, ANSWER]},
        {"messages": [USER | {"name": None, "tool_calls": None}, ANSWER], "tools": None, "system": None},
        {
            "messages": [
                USER,
                {"role": "gpt", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]},
            ]
        },
        {
            "messages": [
                USER,
                {"role": "assistant", "content": [{"type": "text", "value": "Hello"}], "loss_weight": 1.0},
            ]
        },
        {"prompt": "Hi", "completion": "Hello"},
        {"prompt": [USER], "completion": [ANSWER]},
        {"prompt": [{"role": "human", "content": "Hi"}], "completion": "Hello"},
        {"instruction": "Hi", "output": "Hello"},
        {"instruction": "Hi", "input": "", "output": "Hello", "history": None},
        {"instruction": "", "input": "Hi", "output": "Hello"},
        {"instruction": "Hi", "response": "Hello"},
        {"instruction": "Hi", "output": None, "response": "Hello"},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        {"conversations": [{"from": "user", "value": "Hi", "weight": 0}, {"from": "chatgpt", "value": "Hello"}]},
    ],
)
def test_rows_of_every_format_become_the_one_form(row: dict[str, Any]) -> None:
    assert to_messages(row, row_format(set(row), "rows.jsonl")) == ([USER, ANSWER], None)


def test_an_alpaca_row_keeps_its_input_its_history_and_its_system_prompt() -> None:
    row = {"instruction": "Add.", "input": "1+1", "output": "2", "history": [["Hi", "Hello"]], "system": "Be brief."}
    messages, _ = to_messages(row, "alpaca")
    assert messages == [
        SYSTEM,
        USER,
        ANSWER,
        {"role": "user", "content": "Add.\n1+1"},
        {"role": "assistant", "content": "2"},
    ]


def test_a_system_column_does_not_overrule_a_system_turn() -> None:
    own = {"role": "system", "content": "Be long."}
    assert to_messages({"messages": [own, USER, ANSWER], "system": "Be brief."}, "messages")[0][0] == own
    assert to_messages({"messages": [USER, ANSWER], "system": "Be brief."}, "messages")[0] == [SYSTEM, USER, ANSWER]


def test_a_call_of_a_tool_becomes_the_assistants_turn_with_its_tools() -> None:
    call = {"name": "search", "arguments": {"what": "pie"}}
    row = {
        "conversations": [
            {"from": "human", "value": "Hi"},
            {"from": "function_call", "value": json.dumps(call)},
            {"from": "observation", "value": "nothing"},
            {"from": "function_call", "value": json.dumps([call, call])},
        ],
        "tools": json.dumps([{"name": "search"}]),
    }
    messages, tools = to_messages(row, "sharegpt")
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[1]["tool_calls"] == [{"type": "function", "function": call}]
    assert len(messages[3]["tool_calls"]) == 2
    assert tools == [{"name": "search"}]


def test_what_a_turn_holds_besides_its_text_is_kept() -> None:
    calls = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    turns = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": calls, "reasoning_content": "Hm."},
        {"role": "tool", "content": "5", "tool_call_id": "x", "name": "f"},
    ]
    messages, _ = to_messages({"messages": turns}, "messages")
    assert messages == [USER, turns[1] | {"content": ""}, turns[2]]


@pytest.mark.parametrize("written", sorted(ROLES))
def test_every_role_is_one_that_templates_know(written: str) -> None:
    (message,), _ = to_messages({"messages": [{"role": written, "content": "x"}]}, "messages")
    assert message["role"] in {"user", "assistant", "system", "tool", "developer"}


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"messages": [{"role": "narrator", "content": "x"}]}, "unknown role 'narrator'; known: assistant"),
        ({"messages": [{"content": "x"}]}, "a message has no `role`"),
        ({"messages": ["x"]}, "a message has no `role`"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "parts of type image; only text"),
        ({"messages": [{"role": "user", "content": 5}]}, "content is of type int, not text"),
        ({"conversations": [{"from": "human"}]}, "a turn has no `from` and `value`"),
        ({"conversations": [{"from": "function_call", "value": "{"}]}, "Expecting property name"),
        ({"instruction": 5, "output": "x"}, "content is of type int"),
        ({"messages": [USER], "tools": "{"}, "Expecting property name"),
    ],
)
def test_a_row_that_is_wrong_says_where(row: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        to_messages(row, row_format(set(row), "rows.jsonl"))


def test_useless_columns_are_named_beside_the_useful_ones() -> None:
    with pytest.raises(DataError) as error:
        row_format({"text", "label"}, "rows.jsonl")
    message = str(error.value)
    assert message.startswith("rows.jsonl has no usable columns. Found: label, text.")
    for needed in FORMATS.values():
        assert all(f"`{column}`" in message for column in needed)
    with pytest.raises(DataError, match="Found: none"):
        row_format(set(), "rows.jsonl")


ROWS = [{"prompt": f"Zahl {number} äöü 数", "completion": str(number)} for number in range(7)]


def written(folder: Path, kind: str, rows: list[dict[str, Any]]) -> Path:
    path = folder / f"rows.{kind.rpartition(' ')[2]}"
    table = pa.Table.from_pylist(rows)
    if kind in ("lines in jsonl", "lines in json"):
        path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n", encoding="utf-8")
    elif kind in ("array in json", "array in jsonl"):
        path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    elif kind == "parquet":
        pq.write_table(table, path)
    else:
        new = pa.ipc.new_stream if kind == "stream in arrow" else pa.ipc.new_file
        with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=3)
    return path


KINDS = (
    "lines in jsonl",
    "lines in json",
    "array in json",
    "array in jsonl",
    "parquet",
    "stream in arrow",
    "file in arrow",
)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_rows_come_out_of_every_kind_of_file(kind: str, tmp_path: Path) -> None:
    path = written(tmp_path, kind, ROWS)
    assert list(read_rows(path)) == ROWS
    assert first_rows(path, 3) == ROWS[:3]


@pytest.mark.parametrize("kind", KINDS)
def test_a_line_separator_inside_a_text_ends_no_row(kind: str, tmp_path: Path) -> None:
    rows = [{"prompt": "one\u2028two\u0085three", "completion": "four\u2029five"}] * 2
    assert list(read_rows(written(tmp_path, kind, rows))) == rows


def test_the_first_rows_of_a_large_array_are_its_first_rows(tmp_path: Path) -> None:
    rows = [{"prompt": "{" + "x" * 100_000, "completion": str(number)} for number in range(60)]
    path = written(tmp_path, "array in json", rows)
    assert path.stat().st_size > 5 * 2**20
    assert first_rows(path, 5) == rows[:5]
    # Only as much as the window holds whole.
    assert 30 < len(first_rows(path, 60)) < 60


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("rows.jsonl", b'{"a": 1}\n{"a": \n', "rows.jsonl, line 2, is not JSON"),
        ("rows.jsonl", b"5\n", "rows.jsonl, row 1: is of type int, not an object"),
        ("rows.json", b'[{"a": 1}, "x"]', "rows.json, row 2: is of type str, not an object"),
        ("rows.json", b"{", "rows.json cannot be read as json"),
        ("rows.jsonl", b"\xff\xfe\n", "rows.jsonl cannot be read as jsonl"),
        ("rows.parquet", b"no", "rows.parquet cannot be read as parquet"),
        ("rows.arrow", b"no", "rows.arrow cannot be read as arrow"),
        ("rows.arrow", b"", "rows.arrow cannot be read as arrow"),
        ("rows.parquet", b"", "rows.parquet cannot be read as parquet"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_message(name: str, content: bytes, told: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=told):
        list(read_rows(tmp_path / name))


@pytest.mark.parametrize(("name", "content"), [("rows.jsonl", "\n\n"), ("rows.json", "[]"), ("rows.jsonl", "")])
def test_a_file_without_rows_is_refused(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match="holds no rows"):
        first_rows(tmp_path / name, 5)


def test_a_path_stands_for_its_data_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no .json, .jsonl, .parquet, .arrow file"):
        local_files(tmp_path)
    (tmp_path / "rows.csv").touch()
    with pytest.raises(DataError, match=r"rows.csv is not a file that is read: use .json"):
        local_files(tmp_path / "rows.csv")
    for name in ("b.jsonl", "a.parquet", "notes.txt"):
        (tmp_path / name).touch()
    assert [file.name for file in local_files(tmp_path)] == ["a.parquet", "b.jsonl"]


@pytest.mark.parametrize(
    ("file", "format", "count"),
    [
        ("llamafactory/alpaca_en_demo.json", "alpaca", 999),
        ("llamafactory/alpaca_zh_demo.json", "alpaca", 1000),
        ("llamafactory/identity.json", "alpaca", 91),
        ("llamafactory/glaive_toolcall_en_demo.json", "sharegpt", 300),
        ("llamafactory/v1_sft_demo.jsonl", "messages", 500),
        ("gpteacher_roleplay.json", "alpaca", 1923),
        ("oasst_en_best_path.jsonl", "messages", 100),
        ("oasst_sft_zh.json", "alpaca", 689),
        ("raschka_instruction_data.json", "alpaca", 1100),
        ("sgd_messages_tools_600.jsonl", "messages", 600),
        ("t0_short.jsonl", "prompt_completion", 25691),
        ("fixtures/axolotl_conversation.json", "sharegpt", 1),
        ("fixtures/torchtune_alpaca_tiny.json", "alpaca", None),
    ],
)
def test_real_files_become_the_one_form(file: str, format: str, count: int | None, shared: Path) -> None:
    path = shared / "sft" / file
    rows = list(read_rows(path))
    assert row_format(set(rows[0]), file) == format
    assert count in (None, len(rows))
    for row in rows:
        messages, tools = to_messages(row, format)
        assert {message["role"] for message in messages} <= {"user", "assistant", "system", "tool", "developer"}
        assert all(isinstance(message["content"], str) for message in messages)
        assert isinstance(tools, list | None)
    assert first_rows(path, 50) == rows[:50]


def test_a_null_that_only_another_row_explains_is_not_seen(tmp_path: Path) -> None:
    """Columnar files give every row every key."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def row(**arguments: object) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        return {
            "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        }

    pq.write_table(pa.Table.from_pylist([row(city="Oslo"), row(x=1)]), tmp_path / "rows.parquet")
    for wanted, found in zip(({"city": "Oslo"}, {"x": 1}), read_rows(tmp_path / "rows.parquet"), strict=True):
        messages, _ = to_messages(found, "messages")
        assert messages[1]["tool_calls"][0]["function"]["arguments"] == wanted


def test_a_folder_with_a_held_out_file_is_not_trained_on_whole(tmp_path: Path) -> None:
    for name in ("train.jsonl", "test.jsonl"):
        (tmp_path / name).write_text('{"prompt": "a", "completion": "b"}\n')
    (tmp_path / "dataset_info.json").write_text("{}")
    with pytest.raises(DataError, match=r"several splits \(test.jsonl among them\). Name the file"):
        local_files(tmp_path)
    (tmp_path / "test.jsonl").unlink()
    assert local_files(tmp_path) == [tmp_path / "train.jsonl"]
