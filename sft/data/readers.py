"""Reads the rows of one data file.

| suffix          | content                                                                 |
|-----------------|-------------------------------------------------------------------------|
| .jsonl          | one JSON object per line; also one array                                |
| .json           | an array of objects, one object, or one object per line                 |
| .csv            | a header, then one record per row; separated by comma, semicolon or tab |
| .parquet .arrow | columns; of Arrow both the stream and the file format                   |

Text files may be compressed (.gz, .zst). Strings stay strings: `datasets` and pandas would read "2024-01-02" as a date, "00712"
as a number and "NA" as null.
"""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader, TextIOWrapper
from itertools import chain
from pathlib import Path
from typing import Any

from sft.data.conversation import TEXT_KEYS
from sft.errors import DataError
from sft.hub.names import SUFFIXES

Row = dict[str, Any]

_BOM = b"\xef\xbb\xbf"
_BATCH = 1000
"""Rows of a columnar file that are Python objects at one time."""

_LONGEST_FIELD = 2**28
"""Characters of one CSV field."""


@dataclass(frozen=True)
class BadRow:
    """A record that cannot be read, while those after it can."""

    reason: str
    """Where it stands and what is wrong, such as `line 3 has 2 fields, the header has 4`."""


def suffix_of(file: Path) -> str:
    """The suffix without that of a compression; "" if the file is not one that can be read.

    >>> suffix_of(Path("rows.jsonl.gz")), suffix_of(Path("rows.txt"))
    ('.jsonl', '')
    """
    name = file.name.lower()
    suffix = next((suffix for suffix in SUFFIXES if name.endswith(suffix)), "")
    return suffix.removesuffix(".gz").removesuffix(".zst")


def read_rows(file: Path) -> Iterator[Row | BadRow]:
    """Every row of a local file, in order; none of an empty file. Raises DataError where it cannot be read, or not further."""
    suffix = suffix_of(file)
    if not suffix:
        raise DataError(f"{file} is not a data file. Use one of {', '.join(SUFFIXES)}.")
    try:
        with file.open("rb") as start:
            head = start.read(64)
        if not head:
            return
        if head.startswith(b"version https://git-lfs"):
            raise DataError(f"{file} is only a Git LFS pointer: fetch the file itself with `git lfs pull`.")
        if suffix in (".parquet", ".arrow"):
            yield from _columnar_rows(file)
            return
        with _open_text(file) as stream:
            if stream.peek(3).startswith(_BOM):
                stream.read(3)
            yield from _csv_rows(stream, file) if suffix == ".csv" else _json_rows(stream, suffix)
    except FileNotFoundError:
        raise DataError(f"There is no file {file}.") from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file} is not UTF-8 text: it holds the byte 0x{error.object[error.start]:02x}. Save it as UTF-8."
        ) from None
    except (OSError, ValueError, EOFError, RecursionError, zlib.error) as error:
        raise DataError(f"{file} cannot be read as {suffix[1:]}: {error}.") from None


def _open_text(file: Path) -> BufferedReader:
    """The decompressed bytes of a text file."""
    compression = file.suffix.lower()
    if compression == ".gz":
        return BufferedReader(gzip.open(file, "rb"))
    if compression == ".zst":
        import pyarrow as pa

        return BufferedReader(pa.CompressedInputStream(pa.OSFile(str(file)), "zstd"))
    return file.open("rb")


# JSON


def _json_rows(stream: BufferedReader, suffix: str) -> Iterator[Row | BadRow]:
    first = stream.readline()
    if first.lstrip().startswith(b"[") or (suffix == ".json" and not _is_json(first)):
        value = json.loads((first + stream.read()).decode())
        values = value if isinstance(value, list) else [value]
        yield from (_object(one, f"row {number}") for number, one in enumerate(values, start=1))
        return
    for number, line in enumerate(chain([first], stream), start=1):
        record = line.removeprefix(_BOM).strip()  # concatenated files have the mark inside
        if record:
            yield _line(record, f"line {number}")


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _line(record: bytes, where: str) -> Row | BadRow:
    try:
        return _object(json.loads(record.decode()), where)
    except UnicodeDecodeError as error:
        return BadRow(f"{where} is not UTF-8 text (byte 0x{record[error.start]:02x} at {error.start + 1})")
    except json.JSONDecodeError as error:
        return BadRow(f"{where} is not JSON: {error.msg} (column {error.colno})")


def _object(value: Any, where: str) -> Row | BadRow:
    if isinstance(value, dict):
        return value
    return BadRow(f"{where} is of type {type(value).__name__}, not an object with columns")


# CSV


def _csv_rows(stream: BufferedReader, file: Path) -> Iterator[Row | BadRow]:
    csv.field_size_limit(max(csv.field_size_limit(), _LONGEST_FIELD))
    with TextIOWrapper(stream, "utf-8", newline="") as text:
        first = text.readline()
        # Strict, or a quote that is never closed would make the rest of the file one field.
        records = csv.reader(chain([first], text), strict=True, delimiter=_delimiter(first))
        try:
            header = next(records)
            _refuse_repeated(header, file)
            for fields in records:
                if len(fields) == len(header):
                    yield dict(zip(header, fields, strict=True))
                elif fields:
                    yield BadRow(f"line {records.line_num} has {len(fields)} fields, the header has {len(header)}")
        except csv.Error as error:
            raise DataError(
                f"{file} cannot be read as csv up to line {records.line_num}: {error}. Close the quote that opens before it, or double "
                "quotes inside a text."
            ) from None


def _delimiter(header: str) -> str:
    """What separates the fields of a header; a comma wherever there is one.

    >>> _delimiter("prompt;completion"), _delimiter("prompt,completion (a;b)")
    (';', ',')
    """
    fields = {delimiter: len(next(csv.reader([header], delimiter=delimiter), [])) for delimiter in ",;\t|"}
    return "," if fields[","] > 1 else max(fields, key=lambda delimiter: fields[delimiter])


def _refuse_repeated(names: list[str], file: Path) -> None:
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise DataError(f"{file} has more than one column {', '.join(repeated)}. Rename them.")


# Parquet and Arrow


def _columnar_rows(file: Path) -> Iterator[Row]:
    import pyarrow as pa

    try:
        for batch in _batches(file):
            batch.validate(full=True)  # the offsets of a damaged file may point anywhere: reading them can crash
            yield from map(without_nulls, batch.to_pylist())
    except pa.ArrowException as error:  # some are neither OSError nor ValueError
        raise ValueError(str(error)) from None


def _batches(file: Path) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if suffix_of(file) == ".parquet":
        # Buffered: by default whole row groups are read, which may be the whole file.
        with pq.ParquetFile(file, buffer_size=2**20, pre_buffer=False) as source:
            _refuse_repeated(source.schema_arrow.names, file)
            yield from source.iter_batches(_BATCH)
        return
    with pa.memory_map(str(file)) as source:
        is_file_format = source.read(6) == b"ARROW1"
        source.seek(0)
        if is_file_format:
            reader = pa.ipc.open_file(source)
            batches = map(reader.get_batch, range(reader.num_record_batches))
        else:
            batches = reader = pa.ipc.open_stream(source)
        _refuse_repeated(reader.schema.names, file)
        for batch in batches:
            yield from (batch.slice(start, _BATCH) for start in range(0, batch.num_rows, _BATCH))


def count_rows(file: Path) -> int | None:
    """How many rows a parquet file says that it holds; None for other files. Raises DataError where it cannot be read."""
    if suffix_of(file) != ".parquet":
        return None
    import pyarrow.parquet as pq

    try:
        return int(pq.read_metadata(file).num_rows) if file.stat().st_size else 0
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read as parquet: {error}.") from None


def without_nulls(row: Row) -> Row:
    """A row of a columnar file without the keys that only other rows have: columnar files give each message every key.

    >>> without_nulls({"tool": {"city": "Oslo", "x": None}, "output": None})
    {'tool': {'city': 'Oslo'}, 'output': None}
    """

    def prune(part: Any) -> Any:
        if isinstance(part, dict):
            # The text of a message or of a part may be null in any kind of file.
            text = next(({text} for speaker, text in TEXT_KEYS.items() if speaker in part), set())
            text = {"text", "value"} if part.get("type") == "text" else text
            return {key: prune(inner) for key, inner in part.items() if inner is not None or key in text}
        return [prune(inner) for inner in part] if isinstance(part, list) else part

    # The columns themselves stay: the format decides what a missing one means.
    return {key: prune(part) for key, part in row.items()}
