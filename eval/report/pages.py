"""Renders a page as one HTML file without scripts and without network access, or as Markdown.

Names, prompts and answers were written by others: everything is escaped, and hidden characters are shown. Long texts are cut, and the page
says how much is missing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from eval.report.blocks import Block, Section
from eval.report.formats import Code, Link
from sft.terminal import name_of, visible

MOST_OF_AN_ANSWER = 4_000
"""Characters."""

MOST_OF_A_CELL = 2_000
"""Characters."""

LONG_NAME = 20
"""Characters of a word from which it may break after an underscore or a slash."""


def html_text(value: object, most: int = MOST_OF_A_CELL) -> Markup:
    r"""A value in HTML, cut after `most` characters: text, Code or a Link; a tuple of them joined, a list of them with commas.

    >>> html_text(["<b>\x00", Code("a")])
    Markup('&lt;b&gt;<b class="u">⟨U+0000⟩</b>, <code>a</code>')
    """
    if isinstance(value, Markup):
        return value
    if isinstance(value, list | tuple):
        return Markup(", " if isinstance(value, list) else "").join(map(html_text, value))
    whole = str(value)
    inside = str(escape(whole[:most]))
    if len(whole) > LONG_NAME and " " not in whole and not isinstance(value, Code):
        inside = re.sub(r"(?<=[_/])(?=\w)", "<wbr>", inside)
    inside = visible(inside, lambda character: f'<b class="u">{name_of(character)}</b>')
    if isinstance(value, Code):
        inside = f"<code>{inside}</code>"
    if isinstance(value, Link):
        inside = f'<a href="{attribute(value)}">{inside}</a>'
    left = len(whole) - most
    return Markup(inside + (f" … and {left:,} more characters" if left > 0 else ""))


def attribute(value: object) -> Markup:
    """A value inside an attribute."""
    return Markup(escape(visible(str(value))))


def said(value: str) -> Markup:
    """A prompt or an answer."""
    return html_text(value.replace("\r\n", "\n"), MOST_OF_AN_ANSWER)


def anchor(title: str) -> str:
    """The id of a heading."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("eval.report"),
        autoescape=True,
        finalize=html_text,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {"attribute": attribute, "said": said, "anchor": anchor}
    return environment


def as_html(page: Mapping[str, Any]) -> str:
    """The text of a page that `collect_report` or `collect_runs` gives; the same for the same values."""
    return _environment().get_template("report.html.jinja").render(page) + "\n"


def markdown_text(value: object) -> str:
    r"""A value that stays text in Markdown, also in a table: text, Code or a Link; tuples and lists as in `html_text`.

    >>> markdown_text("a|b, 2 * 3, gradient_accumulation_steps, <pad>")
    'a\\|b, 2 \\* 3, gradient_accumulation_steps, \\<pad>'
    >>> markdown_text(["a", Code("b|c")])
    'a, `b\\|c`'
    """
    if isinstance(value, list | tuple):
        return (", " if isinstance(value, list) else "").join(map(markdown_text, value))
    # White space at the ends joins the pieces of a paragraph.
    line = visible(re.sub(r"\s+", " ", str(value)))
    if isinstance(value, Code):
        return "`" + line.replace("`", "'").replace("|", r"\|") + "`"
    if isinstance(value, Link):
        return f"[{line}]({line})"
    escaped = re.sub(r"([\\`*\[\]<|$~])", r"\\\1", line)
    # Numbers in brackets are an interval, not a link.
    escaped = re.sub(r"\\\[([-+0-9., ]+)\\\](?![(\[:])", r"[\1]", escaped)
    # An underscore inside a word is only an underscore.
    return re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", escaped)


def _markdown_table(one: Mapping[str, Any]) -> list[str]:
    """A table, line by line."""
    rule = ["---:" if column in one["numbers"] else "---" for column in range(len(one["head"]))]
    head, *rows = [[markdown_text(cell).strip() for cell in row] for row in (one["head"], *one["rows"])]
    return [f"| {' | '.join(cells)} |" for cells in (head, rule, *rows)]


def _markdown_notice(one: Mapping[str, Any]) -> list[str]:
    lines = [f"- {markdown_text(line)}" for line in one["lines"]]
    return [f"**{markdown_text(one['title'])}**", *(["", *lines] if lines else [])]


_MARKDOWN: dict[str, Callable[[Any], list[str]]] = {
    "text": lambda pieces: [markdown_text(pieces)],
    "facts": lambda rows: _markdown_table({"head": ("", ""), "rows": rows, "numbers": ()}),
    "table": _markdown_table,
    "notice": _markdown_notice,
    "commands": lambda lines: ["```bash", *map(visible, lines), "```"],
    "curve": lambda file: [f"![Training loss and learning rate over optimizer steps]({file})"],
    "exchanges": lambda one: ["The texts are in report.html."],
}


def as_markdown(page: Mapping[str, Any]) -> str:
    """The text of report.md."""
    parts = [[f"# {markdown_text(page['title'])}"], [" · ".join(map(markdown_text, page["subtitle"]))]]

    def draw(blocks: list[Block]) -> None:
        parts.extend(_MARKDOWN[block.kind](block.value) for block in blocks if block.kind in _MARKDOWN)

    draw(page["notices"])
    section: Section
    for section in page["sections"]:
        parts.append([f"## {section.title}"])
        draw(section.blocks)
    return "\n\n".join("\n".join(part).strip() for part in parts if part) + "\n"
