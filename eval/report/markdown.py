"""A report as Markdown that shows values as they are."""

from __future__ import annotations

import re
from collections.abc import Sequence

from eval.report.blocks import (
    Block,
    Bullets,
    Charts,
    Code,
    Commands,
    Exchanges,
    Fold,
    Inline,
    Key,
    Line,
    Link,
    Notice,
    Page,
    Paragraph,
    Scores,
    Strong,
    Table,
    Under,
)
from sft.visible import visible


def text(value: str) -> str:
    r"""Words that are only words, also in a table.

    >>> text("a|b, 2 * 3, gradient_accumulation_steps, <pad>")
    'a\\|b, 2 \\* 3, gradient_accumulation_steps, \\<pad>'
    """
    escaped = re.sub(r"([\\`*\[\]<|$~])", r"\\\1", visible(" ".join(value.split())))
    # Numbers in brackets are an interval, no link.
    escaped = re.sub(r"\\\[([-+0-9., ]+)\\\](?![(\[:])", r"[\1]", escaped)
    # An underscore inside a word is only an underscore.
    return re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", escaped)


def _code(value: str) -> str:
    """Also in a table, where bars are escaped even in code."""
    return "`" + visible(" ".join(value.split())).replace("`", "'").replace("|", r"\|") + "`"


def _inline(piece: Inline) -> str:
    match piece:
        case Code():
            return _code(piece.text)
        case Strong() | Key():
            return f"**{text(piece.text)}**"
        case Under():
            return f" ({text(piece.text)})"
        case Link():
            return f"[{text(piece.text)}]({piece.target})"
    # Between two pieces a space is a space.
    before, after = (" " if piece[end : end + 1].isspace() else "" for end in (0, len(piece) - 1))
    return before + text(piece) + after if piece.strip() else " " * bool(piece)


def line_of(line: Line) -> str:
    """A line, escaped."""
    return "".join(map(_inline, line)) if isinstance(line, tuple) else _inline(line)


def _table(head: Sequence[Line], rows: Sequence[Sequence[Line]], numbers: Sequence[int]) -> list[str]:
    rule = ["---:" if column in numbers else "---" for column in range(len(head))]
    shown = [[line_of(cell) for cell in row] for row in rows]
    return [f"| {' | '.join(cells)} |" for cells in ([line_of(name) for name in head], rule, *shown)]


def lines_of(block: Block) -> list[str]:
    """A block's lines; none where it is for the other format."""
    match block:
        case Paragraph():
            return [line_of(block.line)]
        case Bullets():
            return [f"- {line_of(line)}" for line in block.lines]
        case Table():
            return _table(block.head, block.rows, block.numbers)
        case Commands():
            return ["```bash", *(visible(line) for line in block.lines), "```"]
        case Notice():
            bullets = [f"- {line_of(line)}" for line in block.lines]
            return [f"**{text(block.title)}**", *([""] if bullets else []), *bullets]
        case Charts():
            return [f"!{_inline(block.image)}"] if block.image else []
        case Exchanges():
            return [line_of(block.elsewhere)] if block.elsewhere else []
        case Fold():
            return [f"### {text(block.title)}", "", *_blocks(block.blocks)]
        case Scores():
            return []


def _blocks(blocks: Sequence[Block]) -> list[str]:
    lines: list[str] = []
    for block in blocks:
        shown = lines_of(block)
        lines += [*([""] if lines and shown else []), *shown]
    return lines


def as_markdown(page: Page) -> str:
    """The text of report.md."""
    lines = [f"# {text(page.title)}"]
    for line in page.under:
        lines += ["", line_of(line)]
    lines += ["", *_blocks(page.head)] if page.head else []
    for section in page.sections:
        lines += ["", f"## {text(section.title)}", "", *_blocks(section.blocks)]
    return "\n".join(lines) + "\n"
