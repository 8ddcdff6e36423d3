"""Makes the blocks that a page consists of. Tables and lists have a cap, and say how many more there are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

MOST_ROWS, MOST_LINES = 300, 20
"""Rows of a table, lines of a notice."""


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
    """A table of texts, Codes or lists of both; `numbers` are the columns that are aligned to the right."""
    return Block("table", {"head": head, "numbers": list(numbers)} | _capped(rows), fold)


def _capped(rows: list[Any]) -> dict[str, Any]:
    return {"rows": rows[:MOST_ROWS], "more": max(len(rows) - MOST_ROWS, 0)}


def notice(kind: str, title: str, lines: list[Any]) -> Block:
    """A box: good, bad, warning or plain."""
    more = len(lines) - MOST_LINES
    shown = [*lines[:MOST_LINES], f"and {more:,} more"] if more > 0 else lines
    return Block("notice", {"kind": kind, "title": title, "lines": shown})
