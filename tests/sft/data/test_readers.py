import csv
import gzip
import json
import math
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sft.data import json_rows
from sft.data.readers import BadRow, count_rows, first_rows, local_files, read_rows, suffix_of, without_nulls
from sft.errors import DataError
from sft.hub.names import SUFFIXES

ROWS = [{"prompt": f'Zahl {number}, "äöü"\n数 🙂\u2028\u0085', "completion": str(number)} for number in range(2500)]

COMPRESS: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".zst": lambda data: zstd(data)}
TEXTS = ("lines.jsonl", "array.jsonl", "lines.json", "array.json", "pretty.json", "table.csv")
COLUMNAR = ("table.parquet", "stream.arrow", "file.arrow")


def zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return bytes(sink.getvalue())


def text_of(kind: str, rows: list[dict[str, Any]]) -> str:
    if kind.startswith("lines"):
        return "\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n"
    if kind.startswith("array"):
        return json.dumps(rows, ensure_ascii=False)
    return "\n".join(json.dumps(row, indent=2) for row in rows)


def written(folder: Path, kind: str, rows: list[dict[str, Any]]) -> Path:
    """Rows as a file; its name starts with how they are laid out."""
    path = folder / kind
    table = pa.Table.from_pylist(rows)
    plain, ending = (kind.removesuffix(path.suffix), path.suffix) if path.suffix in COMPRESS else (kind, "")
    if plain == "table.csv":
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        path.write_bytes(COMPRESS[ending](path.read_bytes()))
    elif plain.endswith((".json", ".jsonl")):
        path.write_bytes(COMPRESS[ending](text_of(plain, rows).encode()))
    elif kind == "table.parquet":
        pq.write_table(table, path)
    else:
        new = pa.ipc.new_stream if kind == "stream.arrow" else pa.ipc.new_file
        with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
            writer.write_table(table)
    return path


def read(folder: Path, name: str, content: bytes | str) -> list[Any]:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return list(read_rows(path))


def refused(folder: Path, name: str, content: bytes | str) -> str:
    with pytest.raises(DataError) as error:
        read(folder, name, content)
    assert str(error.value).startswith(str(folder / name))
    return str(error.value).removeprefix(f"{folder}/")


@pytest.mark.parametrize("kind", [*(text + ending for text in TEXTS for ending in COMPRESS), *COLUMNAR])
def test_the_same_rows_come_out_of_every_kind_of_file(kind: str, tmp_path: Path) -> None:
    path = written(tmp_path, kind, ROWS)
    assert list(read_rows(path)) == ROWS
    assert first_rows(path, 3) == ROWS[:3]
    assert first_rows(path, 0) == []
    assert count_rows(path) in (None, len(ROWS))


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 50])
def test_where_a_text_is_cut_into_chunks_changes_no_row(
    kind: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"a": "ä🙂\\u\ud83d\\", "b": [-1.5e-10, 12, True, None, {}], "c": -math.inf}, {"a": "数" * 30}] * 3
    if kind == "table.csv":
        rows = [{"a": "ä🙂,", "b": '"\r\n'}] * 3
        path = written(tmp_path, kind, rows)
    else:
        path = tmp_path / kind
        dump = {"pretty": lambda row: json.dumps(row, indent=1)}.get(kind[:6], json.dumps)
        texts = [dump(row).replace("\\u6570", "数") for row in rows]
        path.write_text("[" + " ,\n".join(texts) + "]" if "array" in kind else "\n".join(texts), encoding="utf-8")
    monkeypatch.setattr(json_rows, "_CHUNK", chunk)
    assert list(read_rows(path)) == rows


@pytest.mark.parametrize("kind", [*TEXTS, "lines.jsonl.gz"])
def test_a_byte_order_mark_is_no_part_of_the_first_row(kind: str, tmp_path: Path) -> None:
    path = written(tmp_path, kind, ROWS[:2])
    content = path.read_bytes()
    with_mark = (
        gzip.compress(b"\xef\xbb\xbf" + gzip.decompress(content)) if kind.endswith("gz") else b"\xef\xbb\xbf" + content
    )
    assert read(tmp_path, kind, with_mark) == ROWS[:2]


def test_files_with_byte_order_marks_can_be_concatenated(tmp_path: Path) -> None:
    for name in ("rows.jsonl", "rows.json"):
        assert read(tmp_path, name, '\ufeff{"a": 1}\n\ufeff{"a": 2}\n') == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_compressed_files_can_be_concatenated(ending: str, tmp_path: Path) -> None:
    parts = [COMPRESS[ending](b'{"a": %d}\n' % number) for number in range(3)]
    assert read(tmp_path, f"rows.jsonl{ending}", b"".join(parts)) == [{"a": 0}, {"a": 1}, {"a": 2}]


@pytest.mark.parametrize("ending", [".gz", ".zst"])
@pytest.mark.parametrize("missing", [1, 9, 2000])
def test_a_truncated_archive_says_so_after_the_rows_it_has(ending: str, missing: int, tmp_path: Path) -> None:
    path = written(tmp_path, f"lines.jsonl{ending}", ROWS)
    assert path.stat().st_size > 2 * missing
    message = refused(tmp_path, path.name, path.read_bytes()[:-missing])
    assert message == f"lines.jsonl{ending} is truncated: the compressed data ends too early. Copy it again."


def test_a_damaged_archive_is_one_message(tmp_path: Path) -> None:
    content = bytearray(gzip.compress(b'{"a": 1}\n' * 10))
    content[-6] ^= 1
    assert "cannot be read as jsonl: CRC check failed" in refused(tmp_path, "rows.jsonl.gz", bytes(content))
    damaged = zstd(b'{"a": 1}\n' * 10)[:-3] + b"xyz"
    assert "rows.jsonl.zst cannot be read as jsonl: " in refused(tmp_path, "rows.jsonl.zst", damaged)
    assert "rows.jsonl.gz cannot be read as jsonl: " in refused(
        tmp_path, "rows.jsonl.gz", b"\x1f\x8b\x08\0" + b"x" * 99
    )


def test_a_line_that_cannot_be_read_is_told_and_the_others_are_read(tmp_path: Path) -> None:
    broken = {
        b'{"a": 1 "b"}': "line 3 is not JSON: Expecting ',' delimiter (column 9)",
        b'{"a":': "line 3 is not JSON: Expecting value (column 6)",
        b'{"a": "caf\xe9"}': "line 3 is not UTF-8 text (byte 0xe9 at 11)",
        b"5": "line 3 is of type int, not an object with columns",
        b"null": "line 3 is of type NoneType, not an object with columns",
        b'["a"]': "line 3 is of type list, not an object with columns",
        b"[" * 100_000: "line 3 is not JSON: it is nested too deeply",
        b'{"a": ' + b"1" * 5000 + b"}": "line 3 is not JSON: Exceeds the limit (4300 digits)",
        b'{"a": 1} {"a": 2}': "line 3 is not JSON: Extra data (column 10)",
    }
    for line, reason in broken.items():
        rows = read(tmp_path, "rows.jsonl", b'{"a": 0}\n\n' + line + b'\r\n   \n{"a": 3}')
        assert rows[::2] == [{"a": 0}, {"a": 3}]
        assert isinstance(rows[1], BadRow)
        assert rows[1].reason.startswith(reason)


def test_what_json_lets_through_comes_through(tmp_path: Path) -> None:
    for name in ("rows.jsonl", "rows.json"):
        (row,) = read(tmp_path, name, r'{"a": NaN, "b": [-Infinity], "c": "\ud800", "d": "\u0000"}')
        assert math.isnan(row.pop("a"))
        assert row == {"b": [-math.inf], "c": "\ud800", "d": "\0"}


def test_blank_lines_before_the_first_row_are_counted(tmp_path: Path) -> None:
    for name, blank in (("rows.jsonl", "\n \n"), ("rows.jsonl", "\n" * 3_000_001), ("rows.json", "\n\n")):
        row, bad = read(tmp_path, name, blank + '{"a": 1}\nno\n')
        assert row == {"a": 1}
        assert isinstance(bad, BadRow)
        assert bad.reason.startswith(f"line {blank.count(chr(10)) + 2} is not JSON: Expecting value")


@pytest.mark.parametrize("kind", ["lines.jsonl", "lines.json", "array.json", "table.csv"])
def test_rows_of_megabytes_are_rows(kind: str, tmp_path: Path) -> None:
    rows = [{"a": "ä" * length, "b": "x"} for length in (3_000_000, 1, 9_000_000)]
    assert list(read_rows(written(tmp_path, kind, rows))) == rows


@pytest.mark.parametrize("kind", ["array.json", "lines.json"])
def test_the_time_for_a_row_grows_as_its_length(kind: str, tmp_path: Path) -> None:
    def seconds(megabytes: int) -> float:
        # Many short values: each time that the text goes on they are decoded again.
        path = written(tmp_path, kind, [{"a": ["abc", "def"] * (megabytes * 2**20 // 14)}])
        start = time.process_time()
        assert len(list(read_rows(path))) == 1
        return time.process_time() - start

    # 16 times the length; quadratic would be 256 times the time.
    assert seconds(16) < 80 * max(seconds(1), 0.01)


@pytest.mark.parametrize("kind", ["array.json", "lines.json", "lines.jsonl", "table.csv"])
def test_the_time_for_a_file_grows_as_the_number_of_its_rows(kind: str, tmp_path: Path) -> None:
    def seconds(count: int) -> float:
        path = written(tmp_path, kind, [{"a": "1"}] * count)
        start = time.process_time()
        assert sum(1 for _ in read_rows(path)) == count
        return time.process_time() - start

    # A chunk holds 100,000 such rows; quadratic in one would be 400 times the time.
    assert seconds(80_000) < 100 * max(seconds(4_000), 0.01)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ('[{"a": 1},\n {"a": }]', "row 2, cannot be read: Expecting value (line 2, column 8)"),
        (
            '[{"a": 1},\n {"a": 2}\n {"a": 3}]',
            "row 3, cannot be read: expected ',' or ']' before it, found '{' (line 3, col",
        ),
        ('[{"a": 1}, {"a"', "row 2, cannot be read: Expecting ':' delimiter (line 1, column 16)"),
        ('[{"a": 1}, {"a": "b', "row 2, cannot be read: Unterminated string starting at (line 1, column 18)"),
        ('[{"a": 1},\n', "row 2, cannot be read: the file ends inside the array (line 2, column 1)"),
        ('[{"a": 1}', "row 2, cannot be read: the file ends inside the array (line 1, column 10)"),
        ("[", "row 1, cannot be read: the file ends inside the array (line 1, column 2)"),
        ("[{},]", "row 2, cannot be read: Expecting value (line 1, column 5)"),
        ("[{}]\n[{}]", "row 2, cannot be read: it follows the end of the array (line 2, column 1)"),
        (b'[{"a": "\xc3\xa4"},\n{"a": "\xff"}]', "row 2, cannot be read: not UTF-8 text, byte 0xff (line 2, column 8)"),
        (b'[{"a": 1}, {"a": "\xc3', "row 2, cannot be read: Unterminated string"),
        ("[" * 100_000, "row 1, cannot be read: it is nested too deeply (line 1, column 2)"),
        ("[INFO] start\n", "row 1, cannot be read: Expecting value (line 1, column 2)"),
    ],
)
def test_an_error_in_an_array_is_told_with_its_place(content: bytes | str, told: str, tmp_path: Path) -> None:
    for name in ("rows.json", "rows.jsonl"):
        message = refused(tmp_path, name, content)
        assert message.startswith(f"{name}, {told}")
        assert message.endswith("After an error in an array no row can be found; correct the file there.")


def test_the_place_of_an_error_is_right_far_into_an_array(tmp_path: Path) -> None:
    rows = ",\n".join(['{"a": "%s"}' % ("ä" * 999)] * 5000)
    assert "row 5001, cannot be read: Expecting value (line 5001, column 7)" in refused(
        tmp_path, "rows.json", f'[{rows},\n{{"a": oops}}]'
    )
    told = refused(tmp_path, "one_line.json", f'[{rows},\n{{"a": oops}}]'.replace("\n", ""))
    assert f"(line 1, column {5000 * 1009 + 8})" in told


def test_the_rows_before_an_error_in_an_array_are_given(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text('[{"a": 1}, {"a": 2}, {"a"')
    assert first_rows(tmp_path / "rows.json", 2) == [{"a": 1}, {"a": 2}]


def test_an_element_that_is_no_object_is_told_and_the_others_are_read(tmp_path: Path) -> None:
    assert read(tmp_path, "rows.json", '[{"a": 1}, "x", 12, [], {"a": 2}]') == [
        {"a": 1},
        *(
            BadRow(f"row {row} is of type {type}, not an object with columns")
            for row, type in enumerate(("str", "int", "list"), 2)
        ),
        {"a": 2},
    ]


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        (b'{"a": 1 "b"}', "line 2 is not JSON: Expecting ',' delimiter (line 2, column 9)"),
        (b'{"a": "b', "line 2 is not JSON: Invalid control character at (line 2, column 9)"),
        (b'{"a": [', "line 2 is not JSON: Expecting ',' delimiter (line 4, column 1)"),
        (b'{"a": "caf\xe9"}', "line 2 is not JSON: not UTF-8 text, byte 0xe9 (line 2, column 11)"),
        (b'{\n  "a": 1\n  "b": 2\n}', "lines 2 to 5 are not JSON: Expecting ',' delimiter (line 4, column 3)"),
        (b"<<<<<<<\n=======", "lines 2 to 3 are not JSON: Expecting value (line 2, column 1)"),
        (b"5", "line 2 is of type int, not an object with columns"),
    ],
)
def test_a_broken_object_is_told_and_the_others_are_read(broken: bytes, told: str, tmp_path: Path) -> None:
    content = b'{"a": 0}\n' + broken + b'\n{"a": 3}\n{"a": 4}\n'
    assert read(tmp_path, "rows.json", content) == [{"a": 0}, BadRow(told), {"a": 3}, {"a": 4}]


def test_a_line_that_a_crash_cut_is_told(tmp_path: Path) -> None:
    for cut in ('{"a": "b', '{"a": [1,\n', '{"a'):
        row, bad = read(tmp_path, "rows.json", '{"a": 0}\n' + cut)
        assert row == {"a": 0}
        assert isinstance(bad, BadRow)
        assert bad.reason.startswith("line 2 is not JSON: ")


def test_the_next_object_is_found_however_far_it_is(tmp_path: Path) -> None:
    assert read(tmp_path, "rows.json", '{"a": 0}\nno' + "\nno" * 2_000_000 + '\n{"a": 1}') == [
        {"a": 0},
        BadRow("lines 2 to 2000002 are not JSON: Expecting value (line 2, column 1)"),
        {"a": 1},
    ]


def test_a_json_file_is_one_object_or_several_with_and_without_line_breaks(tmp_path: Path) -> None:
    assert read(tmp_path, "one.json", '\n {"a":\n 1}\n') == [{"a": 1}]
    assert read(tmp_path, "several.json", '{"a": 1} {"a": 2}{"a":\n3}') == [{"a": 1}, {"a": 2}, {"a": 3}]
    for broken in ("{", '{"a": 1\n "b": 2}', "hello", '{"a": "b'):
        assert refused(tmp_path, "rows.json", broken).startswith("rows.json cannot be read as json: ")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b"only one", "line 3 has 1 fields, the header has 2"),
        (b"a,b,c", "line 3 has 3 fields, the header has 2"),
        (b'"a\nb,"c"', "lines 3 to 4: ',' expected after '\"'"),
        (b"a,caf\xe9", "line 3 is not UTF-8 text (byte 0xe9)"),
    ],
)
def test_a_record_of_a_csv_that_cannot_be_read_is_told_and_the_others_are_read(
    line: bytes, told: str, tmp_path: Path
) -> None:
    assert read(tmp_path, "rows.csv", b"q,a\n1,2\n" + line + b"\n\n3,4\n") == [
        {"q": "1", "a": "2"},
        BadRow(told),
        {"q": "3", "a": "4"},
    ]


def test_every_value_of_a_csv_is_text_with_its_line_breaks(tmp_path: Path) -> None:
    rows = read(tmp_path, "rows.csv", 'q,a\r\n1,"x\r\ny\nz"\r\n,\r\n" ""a"" ", b\r\n')
    assert rows == [{"q": "1", "a": "x\r\ny\nz"}, {"q": "", "a": ""}, {"q": ' "a" ', "a": " b"}]
    assert read(tmp_path, "header.csv", "q,a\n") == []


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("\n1,2\n", "rows.csv: column 1 of the header has no name."),
        (
            ",q,a\n0,1,2\n",
            "rows.csv: column 1 of the header has no name. Name it, or leave it out (pandas: to_csv(index=Fa",
        ),
        ("q,a,q\n1,2,3\n", "rows.csv: the header names q more than once. Rename the columns."),
        (b"q,\xff\n", "rows.csv: the header is not UTF-8 text (byte 0xff). Save the file as UTF-8."),
        (
            'q,a\n1,2\n3,"4\n5,6\n',
            "rows.csv, lines 3 to 4, cannot be read as csv: unexpected end of data. Close the quote",
        ),
        ('"q,a\n1,2\n', "rows.csv, lines 1 to 2, cannot be read as csv: unexpected end of data."),
    ],
)
def test_a_csv_that_cannot_be_read_is_one_message(content: bytes | str, told: str, tmp_path: Path) -> None:
    assert refused(tmp_path, "rows.csv", content).startswith(told)


def test_a_field_of_a_csv_may_have_a_hundred_million_characters(tmp_path: Path) -> None:
    read(tmp_path, "rows.csv", "q\n1\n")
    assert csv.field_size_limit() >= 100 * 2**20


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_without_bytes_has_no_rows(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"rows{suffix}"
    path.touch()
    assert list(read_rows(path)) == first_rows(path, 5) == []
    assert count_rows(path) == (0 if suffix in (".parquet", ".arrow") else None)


@pytest.mark.parametrize(
    ("name", "content"), [("a.jsonl", b"\n\n"), ("a.json", b"[ ]"), ("a.json", b" \n"), ("a.jsonl", b"\xef\xbb\xbf")]
)
def test_a_file_may_have_no_rows(name: str, content: bytes, tmp_path: Path) -> None:
    assert read(tmp_path, name, content) == []
    for ending in (".gz", ".zst"):
        assert read(tmp_path, name + ending, COMPRESS[ending](content)) == []


def test_a_columnar_file_may_have_no_rows(tmp_path: Path) -> None:
    for kind in COLUMNAR:
        path = written(tmp_path, kind, [{"a": 1}])
        table = pa.table({"a": pa.array([], pa.int64())})
        if kind == "table.parquet":
            pq.write_table(table, path)
        else:
            new = pa.ipc.new_stream if kind == "stream.arrow" else pa.ipc.new_file
            with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema):
                pass
        assert list(read_rows(path)) == []
        assert count_rows(path) in (None, 0)


def test_the_footer_counts_the_rows(tmp_path: Path) -> None:
    for name, count in {"table.parquet": 2500, "file.arrow": 2500, "stream.arrow": None, "lines.jsonl": None}.items():
        assert count_rows(written(tmp_path, name, ROWS)) == count


def test_a_null_that_only_another_row_explains_is_not_seen(tmp_path: Path) -> None:
    rows = [{"calls": [{"city": "Oslo"}], "output": None}, {"calls": [{"x": 1}], "output": "y"}]
    for kind in COLUMNAR:
        assert list(read_rows(written(tmp_path, kind, rows))) == rows
    assert without_nulls({"a": [None, {"b": None}]}) == {"a": [None, {}]}


@pytest.mark.parametrize("kind", COLUMNAR)
def test_a_text_in_columns_that_is_not_utf8_is_told_and_the_others_are_read(kind: str, tmp_path: Path) -> None:
    values = [b"x"] * 1500 + [b"caf\xe9"] + [b"y"] * 10
    binary = pa.array(values)
    texts = pa.StringArray.from_buffers(len(values), *binary.buffers()[1:])
    path = written(tmp_path, kind, [{"a": "x"}])
    if kind == "table.parquet":
        pq.write_table(pa.table({"a": texts}), path)
    else:
        new = pa.ipc.new_stream if kind == "stream.arrow" else pa.ipc.new_file
        with pa.OSFile(str(path), "wb") as sink, new(sink, pa.schema({"a": pa.string()})) as writer:
            writer.write_table(pa.table({"a": texts}))
    rows = list(read_rows(path))
    bad = rows.pop(1500)
    assert rows == [{"a": "x"}] * 1500 + [{"a": "y"}] * 10
    assert isinstance(bad, BadRow)
    assert bad.reason.startswith("row 1501 cannot be read: In column 0: Invalid: Invalid UTF8")


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    pq.write_table(table, tmp_path / "rows.parquet")
    assert "more than one column a" in refused(tmp_path, "rows.parquet", (tmp_path / "rows.parquet").read_bytes())


def parquet_bytes() -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"a": [1]}), sink)
    return bytes(sink.getvalue())


def arrow_bytes() -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, pa.schema({"a": pa.int64()})) as writer:
        writer.write_table(pa.table({"a": [1]}))
    return bytes(sink.getvalue())


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("rows.jsonl", gzip.compress(b"{}", mtime=0), "is gzip-compressed, not text; name it rows.jsonl.gz."),
        ("rows.csv", zstd(b"{}"), "is zstd-compressed, not text; name it rows.csv.zst."),
        ("rows.v1.jsonl", parquet_bytes(), "is a parquet file, not text; name it rows.v1.parquet."),
        ("rows.json", arrow_bytes(), "is an Arrow file, not text; name it rows.arrow."),
        ("rows.arrow", parquet_bytes(), "is a parquet file, not an Arrow file; name it rows.parquet."),
        ("rows.jsonl.gz", zstd(b"{}"), "is zstd-compressed, not gzip-compressed; name it rows.jsonl.zst."),
        ("rows.jsonl.gz", b'{"a": 1}', "is text, not gzip-compressed; name it rows.jsonl."),
        (
            "rows.jsonl.gz",
            gzip.compress(parquet_bytes(), mtime=0),
            "is a parquet file, not text; name it rows.jsonl.parquet.",
        ),
        ("rows.csv", b"PK\x03\x04" + b"x" * 99, "is a zip archive, not text; unpack it."),
        ("rows.csv", "q,a\n1,2".encode("utf-16"), "is UTF-16 text, not text; save it as UTF-8."),
        (
            "rows.parquet",
            b"version https://git-lfs.github.com/spec/v1\n",
            "is only a pointer of Git LFS, not a parquet",
        ),
        ("rows.jsonl", b"\x80\x04\x95\x00" + bytes(99), "is not text: it holds the byte 0x04. Name it for what it is."),
        ("rows.jsonl.gz", gzip.compress(b"rows.jsonl\0\0\0", mtime=0), "is not text: it holds the byte 0x00."),
        ("rows.parquet", b"no", "cannot be read as parquet: "),
        ("rows.arrow", b"no", "cannot be read as arrow: "),
        ("rows.parquet", parquet_bytes()[:-20], "cannot be read as parquet: "),
        ("rows.arrow", arrow_bytes()[:-40], "cannot be read as arrow: "),
        ("rows.txt", b"{}", "is not a file that is read: use .json, .jsonl, .csv, .parquet, .arrow, .json.gz, "),
    ],
)
def test_a_file_that_is_not_what_its_name_says_is_one_message(
    name: str, content: bytes, told: str, tmp_path: Path
) -> None:
    assert refused(tmp_path, name, content).startswith(f"{name} {told}")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_what_is_no_file_is_one_message(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"rows{suffix}"
    for look in (lambda: list(read_rows(path)), lambda: first_rows(path, 1), lambda: local_files(path)):
        with pytest.raises(DataError, match=r"There is no file"):
            look()
    path.mkdir()
    with pytest.raises(DataError, match=r"is a folder. Name a file in it"):
        list(read_rows(path))


def test_a_count_of_what_cannot_be_read_is_one_message(tmp_path: Path) -> None:
    for suffix in (".parquet", ".arrow"):
        with pytest.raises(DataError, match="There is no file"):
            count_rows(tmp_path / f"rows{suffix}")
    (tmp_path / "rows.parquet").write_bytes(b"no")
    with pytest.raises(DataError, match=r"rows.parquet cannot be read as parquet"):
        count_rows(tmp_path / "rows.parquet")
    (tmp_path / "rows.arrow").write_bytes(b"ARROW1 and no more")
    with pytest.raises(DataError, match=r"rows.arrow cannot be read as arrow"):
        count_rows(tmp_path / "rows.arrow")


def test_the_suffix_is_that_below_the_compression() -> None:
    assert [suffix_of(Path(f"a.b{suffix}")) for suffix in SUFFIXES[:5]] == list(SUFFIXES[:5])
    assert [suffix_of(Path(f"a{suffix}")) for suffix in SUFFIXES[5:]] == [s.rpartition(".")[0] for s in SUFFIXES[5:]]
    assert suffix_of(Path("A.JSONL.GZ")) == ".jsonl"
    for unknown in ("a.txt", "a.gz", "a", "a.parquet.gz", "a.jsonl.bz2", "ajsonl"):
        assert suffix_of(Path(unknown)) == ""


@pytest.mark.parametrize("kind", ["array.json", "lines.json", "lines.jsonl", "array.jsonl.gz", "table.csv"])
def test_memory_does_not_grow_with_the_file(kind: str, tmp_path: Path) -> None:
    rows = [{"prompt": "ä数" * 2000, "completion": "x" * 2000}] * 6000
    path = written(tmp_path, kind, rows)
    tracemalloc.start()
    count = sum(isinstance(row, dict) for row in read_rows(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == len(rows)
    assert kind.endswith(".gz") or path.stat().st_size > 60 * 10**6
    assert peak < 20 * 10**6


@pytest.mark.parametrize("kind", COLUMNAR)
def test_the_memory_of_arrow_does_not_grow_with_the_file(kind: str, tmp_path: Path) -> None:
    import random

    text = random.Random(0).randbytes(2**20).hex()
    rows = [{"a": text[start : start + 1000]} for start in range(40_000)]
    path = written(tmp_path, kind, rows)
    del rows
    before = pa.total_allocated_bytes()
    peak = max(pa.total_allocated_bytes() for _ in read_rows(path)) - before
    # One row group, one record batch, 40 MB.
    assert peak < 15 * 10**6


@pytest.mark.parametrize("kind", ["array.json", "lines.json", "lines.jsonl", "array.jsonl.zst", "table.csv"])
def test_a_first_look_reads_only_the_start(kind: str, tmp_path: Path) -> None:
    content = text_of(kind, [{"a": "ä" * 1000}] * 3000) if kind != "table.csv" else "a\n" + "ä\n" * 3_000_000
    # What follows cannot be read, and is not.
    torn = COMPRESS[Path(kind).suffix if kind.endswith(".zst") else ""](content.encode())[:-50] + b"\xff" * 50
    (tmp_path / kind).write_bytes(torn)
    tracemalloc.start()
    rows = first_rows(tmp_path / kind, 5)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(rows) == 5
    assert all(isinstance(row, dict) for row in rows)
    assert peak < 8 * 10**6


def test_the_module_imports_neither_torch_nor_datasets_nor_pyarrow() -> None:
    code = "import sys, sft.data.readers; print(*{'torch', 'datasets', 'pyarrow', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def names(files: list[Path], folder: Path) -> list[str]:
    return [str(file.relative_to(folder)) for file in files]


def test_a_folder_stands_for_its_data_files_sorted(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"holds no .json, .jsonl, .csv, .parquet, .arrow, .* file. For files in folders"
    ):
        local_files(tmp_path)
    touch(tmp_path, "b.jsonl.gz", "a.parquet", "c.csv", "notes.txt", ".d.jsonl", "state.json", "dataset_info.json")
    (tmp_path / "state.json").write_text('{"step": 5}')  # of another program
    (tmp_path / "e.json").mkdir()
    assert names(local_files(tmp_path), tmp_path) == ["a.parquet", "b.jsonl.gz", "c.csv"]
    assert local_files(tmp_path / "c.csv") == [tmp_path / "c.csv"]
    with pytest.raises(DataError, match=r"notes.txt is not a file that is read: use .json"):
        local_files(tmp_path / "notes.txt")


SHARDS = [f"data/{split}-0000{n}-of-00002.parquet" for split in ("test", "train", "validation") for n in (0, 1)]


@pytest.mark.parametrize(
    ("files", "split", "found"),
    [
        (SHARDS, "train", SHARDS[2:4]),
        (SHARDS, "validation", SHARDS[4:]),
        (["train.jsonl", "test.jsonl.gz"], "train", ["train.jsonl"]),
        (["my_train.jsonl", "my_dev.jsonl"], "val", ["my_dev.jsonl"]),
        (["train/a.json", "train/b.json", "test/a.json"], "train", ["train/a.json", "train/b.json"]),
        (
            ["main/train-00000-of-00001-f00.parquet", "main/eval.parquet"],
            "train",
            ["main/train-00000-of-00001-f00.parquet"],
        ),
        (["data/x.jsonl", "data/train_more.jsonl"], "train", ["data/train_more.jsonl", "data/x.jsonl"]),
        (["contest.jsonl", "values.jsonl"], "train", ["contest.jsonl", "values.jsonl"]),
        (["data/test-00000-of-00001.parquet"], "test", ["data/test-00000-of-00001.parquet"]),
    ],
)
def test_of_a_folder_only_the_files_of_the_split_are_read(
    files: list[str], split: str, found: list[str], tmp_path: Path
) -> None:
    touch(tmp_path, *files, "README.md", "dataset_info.json", ".cache/train.jsonl")
    assert names(local_files(tmp_path, split), tmp_path) == found


@pytest.mark.parametrize(
    ("files", "told"),
    [
        (
            ["a.jsonl", "test.jsonl.gz"],
            r"several splits \(test.jsonl.gz among them\), and files of none. Name the file",
        ),
        (["data/train_sft-00000-of-00001.parquet", "data/test.parquet"], r"no split `train`. It has: test, train_sft"),
        (["data/test-00000-of-00001.parquet"], r"no split `train`. It has: test. Set `split`"),
        (["main/train.parquet", "socratic/train.parquet"], r"several folders \(main, socratic\). Name one of them"),
    ],
)
def test_a_folder_in_which_the_split_is_not_clear_is_refused(files: list[str], told: str, tmp_path: Path) -> None:
    touch(tmp_path, *files)
    with pytest.raises(DataError, match=told):
        local_files(tmp_path)


def test_a_pattern_stands_for_its_matches_sorted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path, "data/b.jsonl", "data/a.jsonl", "data/c.parquet", "data/x/y/d.parquet", "data/x/.cache/e.parquet")
    touch(tmp_path, "data/notes.txt", "data/state.json", "data/[1].jsonl")
    matches = {
        "data/?.jsonl": ["data/a.jsonl", "data/b.jsonl"],
        "data/**/*.parquet": ["data/c.parquet", "data/x/y/d.parquet"],
        "data/**/**/*.parquet": ["data/c.parquet", "data/x/y/d.parquet"],
        "d*/x/*/d.*": ["data/x/y/d.parquet"],
        "data/*": ["data/[1].jsonl", "data/a.jsonl", "data/b.jsonl", "data/c.parquet"],
        # A file of that name goes before a pattern.
        "data/[1].jsonl": ["data/[1].jsonl"],
    }
    monkeypatch.chdir(tmp_path)
    for pattern, found in matches.items():
        assert names(local_files(tmp_path / pattern), tmp_path) == found
        assert [str(file) for file in local_files(Path(pattern))] == found
    for pattern in ("data/*.csv", "nothing/*.jsonl", "data/*.txt", "data/[.jsonl"):
        with pytest.raises(DataError) as error:
            local_files(tmp_path / pattern)
        assert str(error.value).startswith(f"No file matches {tmp_path / pattern}. Files that are read: .json, ")
    with pytest.raises(DataError, match="cannot be looked into: Invalid pattern"):
        local_files(tmp_path / "data/**.jsonl")


def save_to_disk(folder: Path, files: dict[str, list[dict[str, Any]]]) -> Path:
    """What datasets.Dataset.save_to_disk writes."""
    folder.mkdir(parents=True)
    for name, rows in files.items():
        written(folder, "stream.arrow", rows).rename(folder / name)
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in files]}))
    return folder


def test_a_saved_dataset_is_read_in_the_order_that_it_lists(tmp_path: Path) -> None:
    folder = save_to_disk(tmp_path / "saved", {"b.arrow": [{"a": 1}], "a.arrow": [{"a": 2}]})
    touch(folder, "cache-1.arrow")
    assert names(local_files(folder), folder) == ["b.arrow", "a.arrow"]
    assert [row for file in local_files(folder) for row in read_rows(file)] == [{"a": 1}, {"a": 2}]
    (folder / "a.arrow").unlink()
    with pytest.raises(DataError, match=r"saved lacks a.arrow, which its state.json lists"):
        local_files(folder)
    (folder / "state.json").write_text("{")
    with pytest.raises(DataError, match=r"state.json cannot be read as json"):
        local_files(folder)


def test_a_saved_dataset_has_no_other_split(tmp_path: Path) -> None:
    folder = save_to_disk(tmp_path / "saved", {"a.arrow": [{"a": 1}]})
    with pytest.raises(DataError, match=r"has no split `test`"):
        local_files(folder, "test")


def test_a_saved_dictionary_of_datasets_is_read_by_its_split(tmp_path: Path) -> None:
    for split in ("train", "test"):
        save_to_disk(tmp_path / split, {f"{split}.arrow": [{"a": split}]})
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert names(local_files(tmp_path), tmp_path) == ["train/train.arrow"]
    assert names(local_files(tmp_path, "test"), tmp_path) == ["test/test.arrow"]
    with pytest.raises(DataError, match=r"has no split `valid`. It has: train, test."):
        local_files(tmp_path, "valid")


def test_what_the_library_saves_is_read(tmp_path: Path) -> None:
    import datasets

    rows = [{"a": number, "b": [{"c": str(number)}]} for number in range(2500)]
    dataset = datasets.Dataset.from_list(rows)
    datasets.DatasetDict({"train": dataset, "test": dataset.select([3, 1])}).save_to_disk(
        tmp_path / "saved", num_shards={"train": 3, "test": 1}
    )
    assert [row for file in local_files(tmp_path / "saved") for row in read_rows(file)] == rows
    assert [row for file in local_files(tmp_path / "saved", "test") for row in read_rows(file)] == [rows[3], rows[1]]


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("llamafactory/alpaca_zh_demo.json", 1000),
        ("llamafactory/glaive_toolcall_en_demo.json", 300),
        ("llamafactory/v1_sft_demo.jsonl", 500),
        ("gpteacher_roleplay.json", 1923),
        ("t0_short.jsonl", 25691),
        ("fixtures/fms_twitter_complaints_small.arrow", None),
        ("fixtures/fms_twitter_complaints_small.parquet", None),
    ],
)
def test_real_files_are_read_whole(name: str, count: int | None, shared: Path) -> None:
    path = shared / "sft" / name
    rows = list(read_rows(path))
    assert rows
    assert all(isinstance(row, dict) for row in rows)
    assert count in (None, len(rows))
    assert count_rows(path) in (None, len(rows))
    assert first_rows(path, 50) == rows[:50]
    if path.suffix == ".json":
        assert rows == json.loads(path.read_bytes())


@pytest.mark.parametrize("text", ["a;b\n{};2\n", "a\tb\n{}\t2\n", '"a"|"b"\r\n{}|2\r\n', "sep=;\r\na;b\r\n{};2\r\n"])
def test_a_table_says_itself_what_separates_its_fields(text: str, tmp_path: Path) -> None:
    assert read(tmp_path, "rows.csv", text.replace("{}", '"x, ""y"""')) == [{"a": 'x, "y"', "b": "2"}]


def test_a_table_of_one_column_keeps_what_might_separate(tmp_path: Path) -> None:
    assert read(tmp_path, "rows.csv", "a,b (x;y;z)\n1;2,3\n") == [{"a": "1;2", "b (x;y;z)": "3"}]
    assert read(tmp_path, "rows.csv", "text\na;b\n") == [{"text": "a;b"}]
