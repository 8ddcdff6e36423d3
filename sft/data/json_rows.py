"""Rows of JSON text: a line each, the elements of one array, or objects one after another. Memory stays flat.

What is wrong with one record is a BadRow where the next can still be found, and a DataError where it cannot.
Lines, columns and rows count from 1.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from sft.errors import DataError

Row = dict[str, Any]

BOM = codecs.BOM_UTF8

_CHUNK = 2**20
"""Bytes that a growing text takes in at least."""

_TAIL = 16
"""Characters before the end of a text within which an error may be only that the text goes on: -Infinity, \\ud83d."""

# A byte order mark is inside where files were concatenated.
_NOT_BLANK = re.compile(r"[^ \t\r\n\ufeff]")

_decode = json.JSONDecoder().raw_decode


@dataclass(frozen=True)
class BadRow:
    """A record that could not be read, where those after it can."""

    reason: str
    """Where it stands and what is wrong, such as `line 3 has 2 fields, the header has 4`."""


class BrokenJson(Exception):
    """What stands at a position is no JSON; the message says where."""


def json_rows(stream: BufferedReader, file: Path, lines: bool) -> Iterator[Row | BadRow]:
    """Every row of a JSON text.

    Args:
        stream: The text's bytes, UTF-8 from behind the byte order mark.
        file: What messages name.
        lines: Whether a record is a line, or may go over several. An array is known by its first character.

    Raises:
        DataError: An error behind which no row can be found.
    """
    line = 1
    while (head := stream.peek(1)) and not head.lstrip():
        line += stream.read(len(head)).count(b"\n")
    blank = stream.read(len(head) - len(head.lstrip()))
    line += blank.count(b"\n")
    if head.lstrip().startswith(b"["):
        return _array(_Text(stream, line), file)
    return _lines(stream, line) if lines else _objects(_Text(stream, line), file)


def _row_or_not(value: Any, where: str) -> Row | BadRow:
    if isinstance(value, dict):
        return value
    return BadRow(f"{where} is of type {type(value).__name__}, not an object with columns")


def not_utf8(text: str) -> int | None:
    """Where a text that was decoded with `surrogateescape` holds a byte that is not UTF-8, if it does.

    >>> not_utf8(b"caf\\xe9".decode(errors="surrogateescape"))
    3
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def escaped_byte(character: str) -> str:
    """The byte that `surrogateescape` made a character of.

    >>> escaped_byte("\\udce9")
    'byte 0xe9'
    """
    return f"byte 0x{ord(character) - 0xDC00:02x}"


def _what(error: Exception) -> str:
    """A decoder's error without the position, which is counted from elsewhere."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return error.msg if isinstance(error, json.JSONDecodeError) else str(error)


def _lines(stream: BufferedReader, first: int) -> Iterator[Row | BadRow]:
    """A row for each line that is not blank."""
    for number, line in enumerate(stream, start=first):
        # Files that were concatenated have the mark inside.
        record = line.removeprefix(BOM).rstrip()
        if not record:
            continue
        try:
            value = json.loads(record.decode())
        except UnicodeDecodeError as error:
            byte = record[error.start]
            yield BadRow(f"line {number} is not UTF-8 text (byte 0x{byte:02x} at {error.start + 1})")
        except (ValueError, RecursionError) as error:
            column = f" (column {error.colno})" if isinstance(error, json.JSONDecodeError) else ""
            yield BadRow(f"line {number} is not JSON: {_what(error)}{column}")
        else:
            yield _row_or_not(value, f"line {number}")


class _Text:
    """A window on a text that is decoded value by value: it grows until a value fits, and forgets those before."""

    def __init__(self, stream: BufferedReader, line: int) -> None:
        self.text = ""
        self.position = 0
        self._stream = stream
        self._ended = False
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        # The place of the position that here() last saw: newlines are counted from there on, so each of them once.
        self._seen, self._line, self._column = 0, line, 1

    def grow(self) -> bool:
        """Forget what is before the position and take in as much as is left, at least a chunk; False at the end."""
        if self._ended:
            return False
        self.here()
        rest = self.text[self.position :]
        # Doubling keeps the cost of one huge row linear in its length.
        chunk = self._stream.read(max(_CHUNK, len(rest)))
        self._ended = not chunk
        self.text = rest + self._decoder.decode(chunk, final=self._ended)
        self.position = self._seen = 0
        return True

    def place(self, position: int) -> tuple[int, int]:
        """The line and the column of a position that is not before what here() last saw."""
        newlines = self.text.count("\n", self._seen, position)
        if not newlines:
            return self._line, self._column + position - self._seen
        return self._line + newlines, position - self.text.rfind("\n", 0, position)

    def here(self) -> int:
        """The line of the position."""
        self._line, self._column = self.place(self.position)
        self._seen = self.position
        return self._line

    def skip_blank(self) -> str:
        """Go to the next character that is not white space and return it, or "" at the end."""
        while True:
            found = _NOT_BLANK.search(self.text, self.position)
            self.position = found.start() if found else len(self.text)
            if found or not self.grow():
                return found.group() if found else ""

    def value(self) -> Any:
        """Decode the value at the position and go behind it.

        Raises:
            BrokenJson: It is none, however much of the text follows. The position stays.
        """
        while True:
            try:
                value, end = _decode(self.text, self.position)
            except (ValueError, RecursionError) as error:
                at = getattr(error, "pos", self.position)
                goes_on = at >= len(self.text) - _TAIL or "Unterminated string" in str(error)
                if not (isinstance(error, json.JSONDecodeError) and goes_on and self.grow()):
                    raise self.broken(_what(error), at) from None
            else:
                # Half a number is a number too.
                if isinstance(value, dict) or end < len(self.text) - _TAIL or not self.grow():
                    break
        damage = not_utf8(self.text[self.position : end])
        if damage is not None:
            at = self.position + damage
            raise self.broken(f"not UTF-8 text, {escaped_byte(self.text[at])}", at)
        self.position = end
        return value

    def broken(self, what: str, position: int) -> BrokenJson:
        """An error that says where it is."""
        line, column = self.place(position)
        return BrokenJson(f"{what} (line {line}, column {column})")

    def skip_to_object(self) -> tuple[bool, int]:
        """Go from a broken record to the next line that opens an object, or to the end.

        Returns:
            Whether there is one, and the number of the last line before.
        """
        while (found := self.text.find("\n{", self.position)) < 0:
            # The last character may be the line break before the object.
            self.position = max(self.position, len(self.text) - 1)
            if not self.grow():
                last, _ = self.place(self.position)
                self.position = len(self.text)
                return False, last
        self.position = found + 1
        return True, self.place(found)[0]


def _array(text: _Text, file: Path) -> Iterator[Row | BadRow]:
    """A row for each element of one array."""
    number = 1
    try:
        text.skip_blank()
        text.position += 1
        # As if a comma went before the first row.
        following = "," if text.skip_blank() != "]" else "]"
        text.position += following == "]"
        while following == ",":
            if not text.skip_blank():
                raise text.broken("the file ends inside the array", text.position)
            row = _row_or_not(text.value(), f"row {number}")
            yield row
            number += 1
            following = text.skip_blank()
            if following not in (",", "]"):
                missing = f"expected ',' or ']' before it, found {following!r}"
                raise text.broken(missing if following else "the file ends inside the array", text.position)
            text.position += 1
        if text.skip_blank():
            raise text.broken("it follows the end of the array", text.position)
    except BrokenJson as error:
        raise DataError(
            f"{file}, row {number}, cannot be read: {error}. "
            "After an error in an array no row can be found; correct the file there."
        ) from None


def _objects(text: _Text, file: Path) -> Iterator[Row | BadRow]:
    """A row for each value, with or without line breaks in it."""
    rows = 0
    while text.skip_blank():
        first = text.here()
        try:
            value = text.value()
        except BrokenJson as error:
            found, last = text.skip_to_object()
            if not rows and not found:
                raise DataError(f"{file} cannot be read as json: {error}. Correct the file there.") from None
            where = f"line {first} is" if last <= first else f"lines {first} to {last} are"
            yield BadRow(f"{where} not JSON: {error}")
        else:
            rows += 1
            yield _row_or_not(value, f"line {first}")
