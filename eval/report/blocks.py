"""Makes the blocks that a page consists of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


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
    return Block("facts", list(values.items()), fold)


def table(head: list[Any], rows: list[list[Any]], numbers: Iterable[int] = (), fold: str = "") -> Block:
    """A table of texts, Codes or lists of both; `numbers` are the columns that are aligned to the right."""
    return Block("table", {"head": head, "rows": rows, "numbers": list(numbers)}, fold)


def notice(kind: str, title: str, lines: list[Any]) -> Block:
    """A box: good, bad, warning or plain."""
    return Block("notice", {"kind": kind, "title": title, "lines": lines})
