"""Rows of .csv text. Plain Python."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from io import BufferedReader, TextIOWrapper
from itertools import chain
from pathlib import Path

from sft.data.json_rows import BadRow, Row, escaped_byte, not_utf8
from sft.errors import DataError

_LONGEST_FIELD = 2**28
"""Characters of one field; without a limit a quote that is never closed would take the whole file."""


def csv_rows(stream: BufferedReader, file: Path) -> Iterator[Row | BadRow]:
    """Every row of a .csv: its fields as strings, by the names in the header.

    Args:
        stream: The text's bytes, UTF-8 from behind the byte order mark.
        file: What messages name.

    Raises:
        DataError: A header that does not name each column once, or a quote that is never closed.
    """
    # The limit is the process's, so it is only raised.
    csv.field_size_limit(max(csv.field_size_limit(), _LONGEST_FIELD))
    with TextIOWrapper(stream, "utf-8", errors="surrogateescape", newline="") as text:
        yield from _records(text, file)


def _records(text: TextIOWrapper, file: Path) -> Iterator[Row | BadRow]:
    head = text.readline()
    if said := re.fullmatch(r'"?sep=(.)"?\s*', head):  # Excel's own line, no header
        delimiter, lines = said[1], chain(["\n"], text)
    else:
        delimiter, lines = _delimiter(head), chain([head], text)
    # Strict, or a quote that is never closed would make the rest of the file one field.
    records = csv.reader(lines, strict=True, delimiter=delimiter)
    header: list[str] | None = None
    while True:
        first = records.line_num + 1
        try:
            fields = next(records, None)
        except csv.Error as error:
            where = f"line {first}" if records.line_num <= first else f"lines {first} to {records.line_num}"
            if header is None or _is_fatal(error):
                told = f"{file}, {where}, cannot be read as csv: {error}"
                raise DataError(f"{told}. Close the quote that opens there, or double it inside a text.") from None
            yield BadRow(f"{where}: {error}")
            continue
        if fields is None:
            return
        damage = _damage("".join(fields))
        if header is None and not fields and records.line_num == 1 and said:
            continue
        if header is None:
            header = _header(fields, damage, file)
        elif not fields:
            continue
        elif damage:
            yield BadRow(f"line {first} {damage}")
        elif len(fields) != len(header):
            yield BadRow(f"line {first} has {len(fields)} fields, the header has {len(header)}")
        else:
            yield dict(zip(header, fields, strict=True))


def _delimiter(header: str) -> str:
    """What separates the fields of a header; a comma wherever there is one.

    >>> _delimiter("prompt;completion"), _delimiter("prompt,completion (a;b)")
    (';', ',')
    """
    fields = {delimiter: len(next(csv.reader([header], delimiter=delimiter), [])) for delimiter in ",;\t|"}
    return "," if fields[","] > 1 else max(fields, key=lambda delimiter: fields[delimiter])


def _damage(text: str) -> str | None:
    at = not_utf8(text)
    return None if at is None else f"is not UTF-8 text ({escaped_byte(text[at])})"


def _is_fatal(error: csv.Error) -> bool:
    """Whether a quote took all that follows: to the end of the file, or as much as a field may hold."""
    return "unexpected end of data" in str(error) or "field limit" in str(error)


def _header(names: list[str], damage: str | None, file: Path) -> list[str]:
    if damage:
        raise DataError(f"{file}: the header {damage}. Save the file as UTF-8.")
    if not all(name.strip() for name in names) or not names:
        unnamed = next((index for index, name in enumerate(names, start=1) if not name.strip()), 1)
        raise DataError(
            f"{file}: column {unnamed} of the header has no name. Name it, or leave it out "
            "(pandas: to_csv(index=False))."
        )
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(f"{file}: the header names {', '.join(twice)} more than once. Rename the columns.")
    return names
