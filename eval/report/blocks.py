"""Formats recorded values for a reader, and makes the blocks that a page consists of.

A value that is missing or of another kind is "not recorded". Lists and tables have a cap, and say how many more there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeGuard

from eval.compare.tables import format_score, metric_name

MISSING = "not recorded"
MOST_ROWS, MOST_LINES = 300, 20
"""Rows of a table, lines of a notice."""

KINDS = {"IMPROVED": "good", "REGRESSED": "bad"}


class Code(str):
    """A name, a path or a command: shown in a fixed-width font."""


class Link(str):
    """A file beside the page."""


class Block(NamedTuple):
    """A piece of a page; templates/report.html.jinja and eval/report/pages.py draw each kind."""

    kind: str
    """text, facts, table, notice, commands and curve; for the HTML page alone charts, scores and exchanges."""

    value: Any
    fold: str = ""
    """The HTML page folds the block under this title."""


class Section(NamedTuple):
    """A part of a page under a heading."""

    title: str
    blocks: list[Block]


def text(*pieces: object) -> Block:
    """A paragraph: texts, Code and Links, one after the other."""
    return Block("text", pieces)


def facts(values: Mapping[str, Any], fold: str = "") -> Block:
    """A table of names and values."""
    return Block("facts", _capped(list(values.items())), fold)


def table(head: list[Any], rows: list[list[Any]], numbers: Iterable[int] = (), fold: str = "") -> Block:
    """A table.

    Args:
        head: Names of the columns.
        rows: Cells: text, Code, or a list of both.
        numbers: Columns that are aligned to the right.
        fold: As of a Block.
    """
    return Block("table", {"head": head, "numbers": list(numbers)} | _capped(rows), fold)


def _capped(rows: list[Any]) -> dict[str, Any]:
    return {"rows": rows[:MOST_ROWS], "more": max(len(rows) - MOST_ROWS, 0)}


def notice(kind: str, title: str, lines: list[Any]) -> Block:
    """A box: good, bad, warning or plain."""
    more = len(lines) - MOST_LINES
    shown = [*lines[:MOST_LINES], f"and {more:,} more"] if more > 0 else lines
    return Block("notice", {"kind": kind, "title": title, "lines": shown})


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a number, not a boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def words(value: object) -> str:
    """A value as plain words.

    >>> words(None), words(True), words(0.5)
    ('not recorded', 'on', '0.5')
    """
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)


def code(value: object) -> str:
    """A name or a path, or "not recorded"."""
    return MISSING if value is None else Code(value)


def number(value: object, form: str = ",") -> str:
    """A number in one of Python's formats."""
    return format(value, form) if is_number(value) else MISSING


def score(value: object, sign: str = "") -> str:
    """A score or a difference in about seven characters."""
    return format_score(value, sign) if is_number(value) else MISSING


def interval(ends: object) -> str:
    """A confidence interval of a difference."""
    if not (isinstance(ends, list) and len(ends) == 2 and all(map(is_number, ends))):
        return MISSING
    return f"[{score(ends[0], '+')}, {score(ends[1], '+')}]"


def duration(seconds: object) -> str:
    """Seconds for a reader.

    >>> duration(3725), duration(61.4), duration(2.34)
    ('1 h 2 min 5 s', '1 min 1 s', '2.3 s')
    """
    if not is_number(seconds):
        return MISSING
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min {rest} s" if hours else f"{minutes} min {rest} s"


def counted(count: int, noun: str) -> str:
    """A number of things.

    >>> counted(1, "task"), counted(2000, "task")
    ('1 task', '2,000 tasks')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def verdict_of(entry: Mapping[str, Any]) -> str:
    """The verdict on a metric; one that does not decide has none."""
    return "does not decide" if entry.get("decides") is False else words(entry.get("verdict"))


def kind_of(verdict: object) -> str:
    """Color class of a verdict: good, bad or plain."""
    return KINDS.get(str(verdict), "plain")


def name_of(entry: Mapping[str, Any]) -> str:
    """A metric, its filter, and which way is better where lower is."""
    return metric_name(words(entry.get("metric")), entry.get("filter"), entry.get("higher_is_better"))
