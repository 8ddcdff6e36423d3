"""Values as Markdown that shows them as they are."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

MISSING = "not recorded"


def text(value: object) -> str:
    r"""A value as plain words, also in a table.

    >>> text("a|b, 2 * 3, gradient_accumulation_steps, <pad>")
    'a\\|b, 2 \\* 3, gradient_accumulation_steps, \\<pad>'
    """
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "on" if value else "off"
    escaped = re.sub(r"([\\`*\[\]<|$~])", r"\\\1", " ".join(str(value).split()))
    # An underscore inside a word is only an underscore.
    return re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", escaped)


def code(value: object) -> str:
    """A name or a path; also in a table, where bars are escaped even in code."""
    if value is None:
        return MISSING
    return "`" + " ".join(str(value).split()).replace("`", "'").replace("|", r"\|") + "`"


def number(value: object, form: str = ",") -> str:
    """A number in a format of Python's, or that it is missing."""
    return format(value, form) if isinstance(value, int | float) and not isinstance(value, bool) else MISSING


def duration(seconds: object) -> str:
    """Seconds for a reader.

    >>> duration(3725), duration(61.4), duration(2.34)
    ('1 h 2 min 5 s', '1 min 1 s', '2.3 s')
    """
    if not isinstance(seconds, int | float):
        return MISSING
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return " ".join([*([f"{hours} h"] if hours else []), f"{minutes} min", f"{rest} s"])


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[int] = ()) -> list[str]:
    """The lines of a table.

    Args:
        head: Names of the columns.
        rows: Cells, escaped already.
        numbers: Columns that are aligned to the right.
    """
    right = set(numbers)
    rule = ["---:" if column in right else "---" for column in range(len(head))]
    return [f"| {' | '.join(cells)} |" for cells in (head, rule, *rows)]


def facts(rows: Mapping[str, str]) -> list[str]:
    """A table of names and values."""
    return table(["", ""], rows.items())
