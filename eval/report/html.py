"""Renders a report as one HTML file without scripts and without network access.

Names, prompts and answers were written by others: everything is escaped, and hidden characters are shown. Long texts are cut, and the page
says how much is missing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from eval.report.formats import Code
from sft.visible import name_of, visible

FOLDED_FROM = 600
"""Characters of an answer from which only its beginning is open."""

MOST_OF_AN_ANSWER = 4_000
"""Characters."""

MOST_OF_A_CELL = 2_000
"""Characters."""

LONG_NAME = 20
"""Characters of a word from which it may break after an underscore or a slash."""


def text(value: object) -> Markup:
    r"""A value in HTML: plain text, Code, or a list of both.

    >>> text(["<b>\x00", Code("a")])
    Markup('&lt;b&gt;<b class="u">⟨U+0000⟩</b>, <code>a</code>')
    """
    if isinstance(value, Markup):
        return value
    if isinstance(value, list):
        return Markup(", ").join(map(text, value))
    whole = str(value)
    inside = str(escape(whole[:MOST_OF_A_CELL]))
    if len(whole) > LONG_NAME and " " not in whole and not isinstance(value, Code):
        inside = re.sub(r"(?<=[_/])(?=\w)", "<wbr>", inside)
    inside = visible(inside, lambda character: f'<b class="u">{name_of(character)}</b>')
    if isinstance(value, Code):
        inside = f"<code>{inside}</code>"
    left = len(whole) - MOST_OF_A_CELL
    return Markup(inside + (f" … and {left:,} more characters" if left > 0 else ""))


def attribute(value: object) -> Markup:
    """A value inside an attribute."""
    return Markup(escape(visible(str(value))))


def said(value: str) -> dict[str, Any]:
    """A prompt or an answer: its beginning, the whole where that is longer, and a note on its length."""
    whole = value.replace("\r\n", "\n")
    kept = whole[:MOST_OF_AN_ANSWER]
    pieces = [text(kept[start : start + MOST_OF_A_CELL]) for start in range(0, len(kept), MOST_OF_A_CELL)]
    shown = Markup("").join(pieces)
    left = len(whole) - len(kept)
    note = f"{len(whole):,} characters" + (f", the last {left:,} are not shown" if left else "")
    if len(whole) <= FOLDED_FROM:
        return {"beginning": shown, "whole": None, "note": ""}
    return {"beginning": text(whole[: FOLDED_FROM // 2].rstrip() + " …"), "whole": shown, "note": note}


def anchor(title: str) -> str:
    """The id of a heading."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("eval.report"),
        autoescape=True,
        finalize=text,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {"attribute": attribute, "said": said, "anchor": anchor}
    return environment


def as_html(template: str, values: Mapping[str, Any]) -> str:
    """The text of a page, the same for the same values.

    Args:
        template: report.html.jinja or runs.html.jinja.
        values: What `collect_report` or `collect_runs` gives.
    """
    return _environment().get_template(template).render(values) + "\n"
