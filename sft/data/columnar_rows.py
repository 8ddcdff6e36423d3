"""Rows of .parquet and .arrow files: of Arrow both the stream form and the file form. Memory stays flat."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sft.data.json_rows import BadRow, Row
from sft.errors import DataError

_BATCH = 1000
"""Rows of a columnar file that are Python objects at one time."""

_BUFFER = 2**20
"""Bytes that are read from a column at once."""

_FILE_FORM = b"ARROW1"
"""How Arrow's file form starts."""


def without_nulls(value: Any) -> Any:
    """A row of a columnar file without the keys that only other rows have.

    >>> without_nulls({"tool": {"city": "Oslo", "x": None}, "output": None})
    {'tool': {'city': 'Oslo'}, 'output': None}
    """

    def prune(part: Any) -> Any:
        if isinstance(part, dict):
            # What a message says may be null in any kind of file: its tool calls say it, or nothing does.
            says = {"content"} if "role" in part else {"value"} if "from" in part else set()
            says = {"text", "value"} if part.get("type") == "text" else says
            return {key: prune(inner) for key, inner in part.items() if inner is not None or key in says}
        return [prune(inner) for inner in part] if isinstance(part, list) else part

    # The columns themselves stay: that a row has no output is for others to judge.
    return {key: prune(part) for key, part in value.items()}


def columnar_rows(file: Path) -> Iterator[Row | BadRow]:
    """Every row of a .parquet or .arrow file, without the keys that only other rows have.

    Raises:
        DataError: Two columns have one name.
        OSError, ValueError: The file cannot be read, or not further.
    """
    import pyarrow as pa

    number = 0
    try:
        for batch in _batches(file):
            try:
                rows = _checked(batch)
            except (ValueError, OverflowError):  # text that is not UTF-8, a date that Python does not have
                rows = [_row_at(batch, index, number + index + 1) for index in range(batch.num_rows)]
            yield from rows
            number += len(rows)
    except pa.ArrowException as error:  # some of them are neither OSError nor ValueError
        raise ValueError(str(error)) from None


def _checked(batch: Any) -> list[Row | BadRow]:
    # A damaged file's offsets may point anywhere; read unchecked, they end the process.
    batch.validate(full=True)
    return [without_nulls(row) for row in batch.to_pylist()]


def _row_at(batch: Any, index: int, number: int) -> Row | BadRow:
    try:
        return _checked(batch.slice(index, 1))[0]
    except (ValueError, OverflowError) as error:
        return BadRow(f"row {number} cannot be read: {error}")


def _batches(file: Path) -> Iterator[Any]:
    """The record batches of a file, of at most _BATCH rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if _is_parquet(file):
        # Buffered, where the default takes in whole row groups: those may be the whole file.
        with pq.ParquetFile(file, buffer_size=_BUFFER, pre_buffer=False) as source:
            _refuse_repeated(source.schema_arrow.names, file)
            yield from source.iter_batches(_BATCH)
        return
    with pa.memory_map(str(file)) as source:
        if source.read(6) == _FILE_FORM:
            reader = pa.ipc.open_file(source)
            batches = map(reader.get_batch, range(reader.num_record_batches))
        else:
            source.seek(0)
            batches = reader = pa.ipc.open_stream(source)
        _refuse_repeated(reader.schema.names, file)
        for batch in batches:
            yield from (batch.slice(start, _BATCH) for start in range(0, batch.num_rows, _BATCH))


def _refuse_repeated(names: list[str], file: Path) -> None:
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(f"{file} has more than one column {', '.join(twice)}. Rename them.")


def columnar_count(file: Path) -> int | None:
    """How many rows a file holds, by its footer; None for Arrow's stream form, which has none.

    Raises:
        OSError, ValueError: The file cannot be read.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if _is_parquet(file):
            with pq.ParquetFile(file) as source:
                return int(source.metadata.num_rows)
        with pa.memory_map(str(file)) as source:
            return int(pa.ipc.open_file(source).count_rows()) if source.read(6) == _FILE_FORM else None
    except pa.ArrowException as error:
        raise ValueError(str(error)) from None


def _is_parquet(file: Path) -> bool:
    return file.suffix.lower() == ".parquet"
