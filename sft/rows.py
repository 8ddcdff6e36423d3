"""Rows of the formats that people have, turned into one form: `messages` and `tools`.

| format            | columns                                                            |
|-------------------|--------------------------------------------------------------------|
| messages          | messages: [{role, content}]; tools, system: optional               |
| prompt_completion | prompt, completion: strings or lists of messages                   |
| alpaca            | instruction, output (or response); input, system, history: optional |
| sharegpt          | conversations: [{from, value}]; tools, system: optional            |

Plain Python, no torch: the launcher reads the first rows of a file here before any rank starts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from sft.errors import DataError

Message = dict[str, Any]
Row = dict[str, Any]

FORMATS = {
    "messages": {"messages"},
    "prompt_completion": {"prompt", "completion"},
    "sharegpt": {"conversations"},
    "alpaca": {"instruction", "output"},
}
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "system": "system",
    "observation": "tool",
    "tool": "tool",
    "developer": "developer",
}
SUFFIXES = (".json", ".jsonl", ".parquet", ".arrow")
_NO_ROWS = ("dataset_info.json", "state.json", "dataset_infos.json", "dataset_dict.json")
"""What `save_to_disk` writes beside its data."""

_WINDOW = 4 * 2**20
"""Bytes of a text file that a first look reads."""


def row_format(columns: set[str], origin: str) -> str:
    """Which of FORMATS the columns are.

    Raises:
        DataError: None; the message names the columns that were found.
    """
    names = columns | ({"output"} if "response" in columns else set())
    for name, needed in FORMATS.items():
        if needed <= names:
            return name
    known = "; ".join(" + ".join(f"`{column}`" for column in sorted(needed)) for needed in FORMATS.values())
    raise DataError(
        f"{origin} has no usable columns. Found: {', '.join(sorted(columns)) or 'none'}. Usable: {known}. "
        "Rename the columns to one of these."
    )


def _text(content: Any) -> str:
    """A message's content as text: a string, or a list of text parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [
            part.get("text", part.get("value")) if isinstance(part, dict) and part.get("type") == "text" else None
            for part in content
        ]
        if all(isinstance(part, str) for part in parts):
            return "".join(part for part in parts if part)
        kinds = sorted({str(part.get("type")) if isinstance(part, dict) else type(part).__name__ for part in content})
        raise ValueError(f"content has parts of type {', '.join(kinds)}; only text parts can be trained")
    raise ValueError(f"content is of type {type(content).__name__}, not text")


def _turn(message: Any) -> Message:
    if not isinstance(message, dict) or "role" not in message:
        raise ValueError(f"a message has no `role`: {json.dumps(message, ensure_ascii=False, default=str)[:80]}")
    role = ROLES.get(str(message["role"]))
    if role is None:
        raise ValueError(f"unknown role {message['role']!r}; known: {', '.join(sorted(ROLES))}")
    turn: Message = {"role": role, "content": _text(message.get("content"))}
    # Columnar files give every message every key, null where it has none; a template must not see those.
    turn |= {
        key: message[key] for key in ("tool_calls", "name", "tool_call_id", "reasoning_content") if message.get(key)
    }
    return turn


def _sharegpt_turn(message: Any) -> Message:
    if not isinstance(message, dict) or "from" not in message or "value" not in message:
        raise ValueError(
            f"a turn has no `from` and `value`: {json.dumps(message, ensure_ascii=False, default=str)[:80]}"
        )
    if message["from"] != "function_call":
        return _turn({"role": message["from"], "content": message["value"]})
    call = json.loads(message["value"])
    calls = call if isinstance(call, list) else [call]
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": call} for call in calls],
    }


def _alpaca(row: Row) -> list[Message]:
    answer = row["output"] if row.get("output") is not None else row.get("response")
    question = _text(row.get("instruction"))
    question = "\n".join(part for part in (question, _text(row.get("input"))) if part)
    turns: list[Message] = []
    for asked, answered in row.get("history") or []:
        turns += [{"role": "user", "content": _text(asked)}, {"role": "assistant", "content": _text(answered)}]
    return [*turns, {"role": "user", "content": question}, {"role": "assistant", "content": _text(answer)}]


def to_messages(row: Row, format: str) -> tuple[list[Message], list[Any] | None]:
    """One row in the one form.

    Returns:
        The conversation, and its tools as the chat template takes them, or None.

    Raises:
        ValueError: The row is not of that format; the text says where.
    """
    if format == "messages":
        messages = [_turn(message) for message in row["messages"] or []]
    elif format == "sharegpt":
        messages = [_sharegpt_turn(message) for message in row["conversations"] or []]
    elif format == "alpaca":
        messages = _alpaca(row)
    else:
        prompt, completion = row["prompt"], row["completion"]
        for name, value in (("prompt", prompt), ("completion", completion)):
            if not isinstance(value, str | list | None):
                raise ValueError(f"`{name}` is of type {type(value).__name__}, not text or a list of messages")
        asked = (
            [{"role": "user", "content": _text(prompt)}]
            if isinstance(prompt, str) or prompt is None
            else [_turn(m) for m in prompt]
        )
        one = isinstance(completion, str) or completion is None
        messages = [
            *asked,
            *([{"role": "assistant", "content": _text(completion)}] if one else [_turn(m) for m in completion]),
        ]
    if row.get("system") and not any(message["role"] == "system" for message in messages):
        messages.insert(0, {"role": "system", "content": _text(row["system"])})
    tools = row.get("tools") or None
    return messages, json.loads(tools) if isinstance(tools, str) else tools


def local_files(path: Path) -> list[Path]:
    """The data files a path stands for: itself, or those in the folder, sorted.

    Raises:
        DataError: A kind of file that is not read, or an empty folder.
    """
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES and file.name not in _NO_ROWS)
        if not files:
            raise DataError(f"The folder {path} holds no {', '.join(SUFFIXES)} file.")
        held_out = [file.name for file in files if re.match(r"(test|valid|dev|eval)", file.stem, flags=re.IGNORECASE)]
        if held_out and len(held_out) < len(files):
            raise DataError(
                f"The folder {path} holds files of several splits ({', '.join(held_out)} among them). Name the file to train on."
            )
        return files
    if path.suffix not in SUFFIXES:
        raise DataError(f"{path} is not a file that is read: use {', '.join(SUFFIXES)}.")
    return [path]


def without_nulls(value: Any) -> Any:
    """A row of a columnar file without the keys that only other rows have.

    >>> without_nulls({"tool": {"city": "Oslo", "x": None}, "output": None})
    {'tool': {'city': 'Oslo'}, 'output': None}
    """

    def prune(part: Any) -> Any:
        if isinstance(part, dict):
            return {key: prune(inner) for key, inner in part.items() if inner is not None}
        return [prune(inner) for inner in part] if isinstance(part, list) else part

    # The columns themselves stay: that a row has no output is for others to judge.
    return {key: prune(part) for key, part in value.items()}


def _arrow_rows(file: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if file.suffix == ".parquet":
        for batch in pq.ParquetFile(file).iter_batches(1000):
            yield from map(without_nulls, batch.to_pylist())
        return
    with pa.memory_map(str(file)) as source:
        try:
            for batch in pa.ipc.open_stream(source):
                yield from map(without_nulls, batch.to_pylist())
        except pa.ArrowInvalid:  # the file form of the same format
            reader = pa.ipc.open_file(source)
            for index in range(reader.num_record_batches):
                yield from map(without_nulls, reader.get_batch(index).to_pylist())


def _json_rows(file: Path) -> Iterator[Row]:
    with file.open(encoding="utf-8") as lines:
        start = lines.read(1)
        lines.seek(0)
        if start == "[" or file.suffix == ".json":
            text = lines.read()
            try:
                rows = json.loads(text)
            except ValueError:
                # Many .json files hold a line of JSON for each row.
                rows = [json.loads(line) for line in text.split("\n") if line.strip()]
            yield from rows if isinstance(rows, list) else [rows]
            return
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    yield json.loads(line)
                except ValueError as error:
                    raise DataError(f"{file}, line {number}, is not JSON: {error}.") from None


def read_rows(file: Path) -> Iterator[Row]:
    """Every row of a local file.

    Raises:
        DataError: The file cannot be read, or holds something else than rows.
    """
    import pyarrow as pa

    try:
        for number, row in enumerate(
            _json_rows(file) if file.suffix in (".json", ".jsonl") else _arrow_rows(file), start=1
        ):
            if not isinstance(row, dict):
                raise DataError(f"{file}, row {number}: is of type {type(row).__name__}, not an object with columns.")
            yield row
    except FileNotFoundError:
        raise DataError(f"There is no file {file}.") from None
    except (OSError, ValueError, pa.ArrowInvalid) as error:
        raise DataError(f"{file} cannot be read as {file.suffix[1:]}: {error}.") from None


def parquet_rows(file: Path) -> int:
    """How many rows a parquet file holds, by its footer.

    Raises:
        DataError: It is no parquet file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return int(pq.ParquetFile(file).metadata.num_rows)
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"{file} cannot be read as parquet: {error}.") from None


def first_rows(file: Path, count: int) -> list[Row]:
    """A first look at a file of any size: up to `count` rows from its start.

    Raises:
        DataError: As read_rows; also where there is no row at all.
    """
    if file.suffix == ".json" and file.stat().st_size > _WINDOW:
        rows = _rows_in_window(file, count)
    else:
        rows = list(islice(read_rows(file), count))
    if not rows:
        raise DataError(f"{file} holds no rows.")
    return rows


def _rows_in_window(file: Path, count: int) -> list[Row]:
    """Rows from the start of a large JSON array, without reading all of it."""
    with file.open(encoding="utf-8", errors="ignore") as source:
        text = source.read(_WINDOW)
    decoder = json.JSONDecoder()
    rows: list[Row] = []
    position = text.find("{")
    while position >= 0 and len(rows) < count:
        try:
            row, end = decoder.raw_decode(text, position)
        except ValueError:
            break
        rows.append(row)
        position = text.find("{", end)
    return rows
