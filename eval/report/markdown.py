"""Renders a report as Markdown. Text that others wrote stays text: it is escaped, and hidden characters are shown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from eval.report.formats import Code
from sft.visible import visible


def text(value: object) -> Markup:
    r"""A value that stays text in Markdown, also in a table: plain text, Code, or a list of both.

    >>> text("a|b, 2 * 3, gradient_accumulation_steps, <pad>")
    Markup('a\\|b, 2 \\* 3, gradient_accumulation_steps, \\<pad>')
    >>> text(["a", Code("b|c")])
    Markup('a, `b\\|c`')
    """
    if isinstance(value, Markup):
        return value
    if isinstance(value, list):
        return Markup(", ").join(map(text, value))
    line = visible(" ".join(str(value).split()))
    if isinstance(value, Code):
        return Markup("`" + line.replace("`", "'").replace("|", r"\|") + "`")
    escaped = re.sub(r"([\\`*\[\]<|$~])", r"\\\1", line)
    # Numbers in brackets are an interval, not a link.
    escaped = re.sub(r"\\\[([-+0-9., ]+)\\\](?![(\[:])", r"[\1]", escaped)
    # An underscore inside a word is only an underscore.
    return Markup(re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", escaped))


def table_lines(head: Sequence[object], rows: Iterable[Sequence[object]], numbers: Iterable[int] = ()) -> list[str]:
    """A table, line by line.

    Args:
        head: Names of the columns.
        rows: Cells, not escaped.
        numbers: Columns that are aligned to the right.
    """
    right = set(numbers)
    rule = ["---:" if column in right else "---" for column in range(len(head))]
    shown = [[str(text(cell)) for cell in row] for row in (head, *rows)]
    return [f"| {' | '.join(cells)} |" for cells in (shown[0], rule, *shown[1:])]


def facts_lines(facts: Mapping[str, object]) -> list[str]:
    """A table of names and values, line by line."""
    return table_lines(("", ""), list(facts.items()))


def _table(one: Mapping[str, Any]) -> Markup:
    lines = table_lines(one["head"], one["rows"], one["numbers"])
    if one["more"]:
        lines += ["", f"{one['more']:,} more rows are not shown."]
    return Markup("\n".join(lines))


def _facts(facts: Mapping[str, object]) -> Markup:
    return Markup("\n".join(facts_lines(facts)))


def as_markdown(report: Mapping[str, Any]) -> str:
    """The text of report.md."""
    environment = Environment(
        loader=PackageLoader("eval.report"),
        autoescape=True,
        finalize=text,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {"table": _table, "facts": _facts, "visible": lambda line: Markup(visible(line))}
    rendered = environment.get_template("report.md.jinja").render(report)
    return re.sub(r"\n{3,}", "\n\n", rendered).strip() + "\n"
