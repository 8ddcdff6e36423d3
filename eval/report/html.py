"""A report as one HTML file: no script, no network, nothing beside it. Imports no torch.

Names, prompts and answers were written by others: each is escaped, and what cannot be seen in it is shown. A page has a limit on what
it shows of them, and says how much that leaves out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined, Template, pass_context
from jinja2.runtime import Context
from markupsafe import Markup, escape

from eval.report.blocks import Code, Inline, Key, Line, Link, Page, Strong, Under
from sft.visible import name_of, visible

FOLDED_FROM = 600
"""Characters of an answer from which it is folded to its beginning."""

MOST_OF_AN_ANSWER = 8_000
"""Characters."""

MOST_OF_ALL_ANSWERS = 900_000
"""Bytes on the page, so that it stays under 2 MB whatever was answered."""

MOST_OF_A_CELL = 2_000
"""Characters."""

LONG_NAME = 20
"""Characters of a word from which it may be broken behind an underscore or a slash."""

MOST_OF_ALL_CELLS = 500_000
"""Bytes on the page."""

MOST_ROWS = 300
"""Of a table."""


def shown(text: str) -> Markup:
    r"""A text in HTML, with what cannot be seen as marks.

    >>> str(shown("<b>\x00"))
    '&lt;b&gt;<b class="u">⟨U+0000⟩</b>'
    """
    # Escaping adds no character that is hidden.
    return Markup(visible(str(escape(text)), lambda character: f'<b class="u">{name_of(character)}</b>'))


@dataclass(frozen=True)
class Clipped:
    """A text as far as it is shown."""

    beginning: Markup
    whole: Markup | None
    """None where the beginning is all."""

    told: str
    """How long it is, and what is left out."""


@dataclass
class Budget:
    """What one page may still show of what others have written."""

    answers: int = MOST_OF_ALL_ANSWERS
    cells: int = MOST_OF_ALL_CELLS
    anchors: dict[str, int] = field(default_factory=dict)

    def clip(self, text: str) -> Clipped:
        """An answer: its beginning, and the rest to be unfolded."""
        text = text.replace("\r\n", "\n")
        whole, left = self._afford(text, MOST_OF_AN_ANSWER)
        told = f"{len(text):,} characters" + (f", the last {left:,} are not shown" if left else "")
        if len(text) <= FOLDED_FROM and not left:
            return Clipped(shown(whole), None, "")
        return Clipped(shown(whole[: FOLDED_FROM // 2].rstrip() + " …"), shown(whole), told)

    def _afford(self, text: str, most: int) -> tuple[str, int]:
        """As much of a text as there is room for, and the number of characters left out."""
        most = min(most, max(self.answers, 0))
        while (cost := len(shown(text[:most]).encode("utf-8", "replace"))) > self.answers and most > 64:
            most //= 2
        if cost > self.answers:
            return "", len(text)
        self.answers -= cost
        return text[:most], max(len(text) - most, 0)

    def line(self, line: Line) -> Markup:
        """A line with its code, links and strong words."""
        return Markup("").join(self._inline(piece) for piece in (line if isinstance(line, tuple) else (line,)))

    def _inline(self, piece: Inline) -> Markup:
        text = piece if isinstance(piece, str) else piece.text
        left = len(text) - MOST_OF_A_CELL
        beginning = text[:MOST_OF_A_CELL]
        is_name = isinstance(piece, str) and len(text) > LONG_NAME and " " not in text
        inside = (breakable(beginning) if is_name else shown(beginning)) + (
            f" … and {left:,} more characters" if left > 0 else ""
        )
        self.cells -= len(inside)
        if self.cells < 0:
            return Markup("…")
        match piece:
            case Code():
                return Markup("<code>{}</code>").format(inside)
            case Strong():
                return Markup("<strong>{}</strong>").format(inside)
            case Link():
                return Markup('<a href="{}">{}</a>').format(quote(piece.target), inside)
            case Key():
                return Markup('<b class="key {}">{}</b>').format(piece.style, inside)
            case Under():
                return Markup('<span class="below {}">{}</span>').format(piece.kind, inside)
        return inside

    def anchor(self, title: str) -> str:
        """The id of a heading."""
        name = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "part"
        self.anchors[name] = self.anchors.get(name, 0) + 1
        return name if self.anchors[name] == 1 else f"{name}-{self.anchors[name]}"


def breakable(text: str) -> Markup:
    """A name that may go on in the next line behind an underscore or a slash."""
    return Markup(re.sub(r"(?<=[_/])(?=\w)", "<wbr>", str(shown(text))))


def _kind(block: object) -> str:
    return type(block).__name__


def _rows(rows: Sequence[Sequence[Line]]) -> Sequence[Sequence[Line]]:
    return rows[:MOST_ROWS]


@pass_context
def _as_line(context: Context, line: Line) -> Markup:
    budget: Budget = context["budget"]
    return budget.line(line)


@pass_context
def _clipped(context: Context, text: str) -> Clipped:
    budget: Budget = context["budget"]
    return budget.clip(text)


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("eval.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {
        "shown": shown,
        "line": _as_line,
        "clip": _clipped,
        "kind": _kind,
        "rows": _rows,
        "breakable": breakable,
    }
    return environment.get_template("report.html.jinja")


def as_html(page: Page) -> str:
    """The text of report.html, the same for the same page."""
    budget = Budget()
    sections = [(budget.anchor(section.title), section) for section in page.sections]
    text = _template().render(page=page, sections=sections, budget=budget)
    return text if text.endswith("\n") else text + "\n"
