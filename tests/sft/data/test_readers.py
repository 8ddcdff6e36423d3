import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sft.data.readers import BadRow, count_rows, read_rows, without_nulls
from sft.errors import DataError
from sft.hub.names import SUFFIXES

ROWS = [{"prompt": f'Zahl {number}, "äöü"\n数 🙂\u2028\u0085', "completion": str(number)} for number in range(2500)]


def zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return bytes(sink.getvalue())


def arrow(rows: list[Any], stream: bool) -> bytes:
    table, sink = pa.Table.from_pylist(rows), pa.BufferOutputStream()
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=700)
    return bytes(sink.getvalue())


def parquet(rows: list[Any]) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    return bytes(sink.getvalue())


def lines(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def csv_text(rows: list[dict[str, Any]], path: Path) -> bytes:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path.read_bytes()


TEXTS: dict[str, Callable[[list[Any]], bytes]] = {
    "lines.jsonl": lines,
    "array.jsonl": lambda rows: json.dumps(rows).encode(),
    "array.json": lambda rows: json.dumps(rows, indent=1).encode(),
}
COLUMNAR: dict[str, Callable[[list[Any]], bytes]] = {
    "table.parquet": parquet,
    "stream.arrow": lambda rows: arrow(rows, True),
    "file.arrow": lambda rows: arrow(rows, False),
}


def read(folder: Path, name: str, content: bytes | str) -> list[Any]:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return list(read_rows(path))


def refused(folder: Path, name: str, content: bytes | str) -> str:
    with pytest.raises(DataError) as error:
        read(folder, name, content)
    assert str(error.value).startswith(str(folder))
    return str(error.value)


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
@pytest.mark.parametrize("name", [*TEXTS, "table.csv"])
def test_the_same_rows_come_out_of_every_text_file(name: str, ending: str, tmp_path: Path) -> None:
    content = csv_text(ROWS, tmp_path / "made") if name == "table.csv" else TEXTS[name](ROWS)
    content = {"": bytes, ".gz": gzip.compress, ".zst": zstd}[ending](content)
    assert read(tmp_path, name + ending, content) == ROWS


@pytest.mark.parametrize("name", COLUMNAR)
def test_the_same_rows_come_out_of_every_columnar_file(name: str, tmp_path: Path) -> None:
    assert read(tmp_path, name, COLUMNAR[name](ROWS)) == ROWS
    assert count_rows(tmp_path / name) == (len(ROWS) if name == "table.parquet" else None)


@pytest.mark.parametrize("name", [*TEXTS, "table.csv"])
def test_a_byte_order_mark_is_not_part_of_the_first_row(name: str, tmp_path: Path) -> None:
    content = csv_text(ROWS[:3], tmp_path / "made") if name == "table.csv" else TEXTS[name](ROWS[:3])
    assert read(tmp_path, name, b"\xef\xbb\xbf" + content) == ROWS[:3]


def test_strings_stay_strings(tmp_path: Path) -> None:
    row = {"date": "2024-01-02", "code": "00712", "missing": "NA", "number": "1e5", "empty": ""}
    assert (
        read(tmp_path, "rows.jsonl", lines([row]))
        == read(tmp_path, "rows.csv", csv_text([row], tmp_path / "a"))
        == [row]
    )


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_an_empty_file_has_no_rows(suffix: str, tmp_path: Path) -> None:
    assert read(tmp_path, f"rows{suffix}", b"") == []
    assert read(tmp_path, "rows.json", b" [ ] \n") == []


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "line 2 is not JSON: Expecting property name enclosed in double quotes (column 2)"),
        (b"caf\xe9", "line 2 is not UTF-8 text (byte 0xe9 at 4)"),
        (b"[1]", "line 2 is of type list, not an object with columns"),
    ],
)
def test_a_bad_line_is_one_bad_row_with_its_number(line: bytes, reason: str, tmp_path: Path) -> None:
    for name in ("rows.jsonl", "rows.json"):
        assert read(tmp_path, name, b'{"a": 1}\n' + line + b'\n\n{"a": 2}') == [{"a": 1}, BadRow(reason), {"a": 2}]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("rows.json", '[{"a": 1},\n{"a" 2}]', "cannot be read as json: Expecting ':' delimiter: line 2 column 6"),
        ("rows.json", b'[{"a": "caf\xe9"}]', "is not UTF-8 text: it holds the byte 0xe9. Save it as UTF-8."),
        ("rows.csv", b"q,caf\xe9\n1,2\n", "is not UTF-8 text: it holds the byte 0xe9. Save it as UTF-8."),
        ("rows.csv", 'q,a\n1,2\n3,"4\n5,6\n', "cannot be read as csv up to line 4: unexpected end of data"),
        ("rows.csv", "q,a,q\n1,2,3\n", "has more than one column q. Rename them."),
        ("rows.jsonl", b"version https://git-lfs.github.com/spec/v1\n", "is only a Git LFS pointer"),
        ("rows.jsonl.gz", gzip.compress(lines(ROWS), mtime=0)[:-2000], "cannot be read as jsonl: "),
        ("rows.parquet", parquet(ROWS)[:-20], "cannot be read as parquet: "),
        ("rows.arrow", arrow(ROWS, False)[:-40], "cannot be read as arrow: "),
        ("rows.txt", b"{}", "is not a data file. Use one of .json, .jsonl, .csv"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_message(name: str, content: bytes | str, words: str, tmp_path: Path) -> None:
    assert words in refused(tmp_path, name, content)


def test_a_csv_record_of_another_length_is_a_bad_row(tmp_path: Path) -> None:
    rows = read(tmp_path, "rows.csv", "q,a\n1,2\n3\n\n4,5,6\n7,8\n")
    assert rows[1:3] == [
        BadRow("line 3 has 1 fields, the header has 2"),
        BadRow("line 5 has 3 fields, the header has 2"),
    ]
    assert [rows[0], rows[3]] == [{"q": "1", "a": "2"}, {"q": "7", "a": "8"}]


@pytest.mark.parametrize("text", ["a;b\n{};2\n", "a\tb\n{}\t2\n", '"a"|"b"\r\n{}|2\r\n', "a,b\n{},2\n"])
def test_the_separator_of_a_csv_is_found_in_its_header(text: str, tmp_path: Path) -> None:
    assert read(tmp_path, "rows.csv", text.replace("{}", '"x, ""y"""')) == [{"a": 'x, "y"', "b": "2"}]


def test_a_null_that_only_another_row_explains_is_left_out() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": None}
    row = {"messages": [message, {"type": "text", "text": None, "image": None}], "output": None}
    kept = [{"role": "assistant", "content": None}, {"type": "text", "text": None}]
    assert without_nulls(row) == {"messages": kept, "output": None}


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pa.table([pa.array(["x"]), pa.array(["y"])], names=["a", "a"])
    pq.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(DataError, match="more than one column a"):
        list(read_rows(tmp_path / "rows.parquet"))
