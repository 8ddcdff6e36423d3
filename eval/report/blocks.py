"""What a report is made of, before it is Markdown or HTML: each fact is written once, and both formats show it.

A line is words, or a tuple of words, code, strong words and links. Words are as they were recorded: each format escapes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from eval.report.chart import Chart

MISSING = "not recorded"


@dataclass(frozen=True)
class Code:
    """A name, a path or a command inside a line."""

    text: str


@dataclass(frozen=True)
class Strong:
    """Words that must not be overlooked."""

    text: str


@dataclass(frozen=True)
class Link:
    """A file, relative to the report."""

    text: str
    target: str


@dataclass(frozen=True)
class Key:
    """A run's letter, in the colour of its curves."""

    text: str
    style: str


@dataclass(frozen=True)
class Under:
    """Words on a line of their own under the others of a cell."""

    text: str
    kind: str = "plain"
    """good, bad or plain."""


Inline: TypeAlias = str | Code | Strong | Link | Key | Under
Line: TypeAlias = Inline | tuple[Inline, ...]


@dataclass(frozen=True)
class Paragraph:
    """Words."""

    line: Line


@dataclass(frozen=True)
class Bullets:
    """A list."""

    lines: Sequence[Line]


@dataclass(frozen=True)
class Table:
    """Rows under a head; without names in the head, names and values."""

    head: Sequence[Line]
    rows: Sequence[Sequence[Line]]
    numbers: Sequence[int] = ()
    """Columns that are aligned to the right."""


@dataclass(frozen=True)
class Commands:
    """What is typed into a shell."""

    lines: Sequence[str]


@dataclass(frozen=True)
class Notice:
    """What a reader must see first."""

    kind: str
    """good, bad, warning or plain."""

    title: str
    lines: Sequence[Line] = ()


@dataclass(frozen=True)
class Score:
    """One metric of one task on both models, each as a share of the scale's length."""

    task: str
    metric: str
    verdict: str
    kind: str
    """good, bad or plain."""

    base: Bar
    tuned: Bar
    difference: str
    interval: str
    span: Bar | None
    """The difference and its interval on a scale from -1 to 1, in which 0 is no difference; None where it is not known."""


@dataclass(frozen=True)
class Bar:
    """A value and its 95% interval."""

    shown: str
    value: float | None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Scores:
    """Base against tuned, drawn. Markdown has the numbers in a table beside it and shows nothing here."""

    rows: Sequence[Score]
    widest: str
    """What the ends of the differences' scale stand for."""


@dataclass(frozen=True)
class Charts:
    """Curves. Markdown shows the image, where there is one."""

    charts: Sequence[Chart]
    note: str = ""
    image: Link | None = None


@dataclass(frozen=True)
class Answer:
    """What one model said."""

    name: str
    text: str
    marks: Sequence[str] = ()
    """What is wrong with it."""

    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Exchange:
    """A question and what was answered, side by side; folded away but for its title where it has one."""

    turns: Sequence[tuple[str, str]]
    """Who speaks, and the words."""

    answers: Sequence[Answer]
    title: str = ""
    hint: str = ""
    """Of what it is about, behind the title."""


@dataclass(frozen=True)
class Exchanges:
    """Questions and answers. Markdown says only where they are."""

    exchanges: Sequence[Exchange]
    elsewhere: Line = ""


@dataclass(frozen=True)
class Fold:
    """What few readers need: folded away in HTML, there in Markdown."""

    title: str
    blocks: Sequence[Block]


Block: TypeAlias = Paragraph | Bullets | Table | Commands | Notice | Scores | Charts | Exchanges | Fold


@dataclass(frozen=True)
class Section:
    """A part of a report."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Page:
    """A report."""

    title: str
    under: Sequence[Line]
    """What stands under the title."""

    head: Sequence[Block]
    sections: Sequence[Section] = field(default_factory=tuple)


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


def code(value: object) -> Inline:
    """A name or a path, or that it is missing."""
    return MISSING if value is None else Code(str(value))


def number(value: object, form: str = ",") -> str:
    """A number in a format of Python's, or that it is missing."""
    return format(value, form) if isinstance(value, int | float) and not isinstance(value, bool) else MISSING


def score(value: object, sign: str = "") -> str:
    """A score or a difference in about seven characters, or that it is missing.

    >>> score(0.5), score(0.125, "+"), score(123456.789), score(-24691.357, "+"), score(5e19)
    ('0.5000', '+0.1250', '123457', '-24691.4', '5.00e+19')
    """
    size = abs(value) if isinstance(value, int | float) else 0.0
    form = next(
        (form for limit, form in ((100, ".4f"), (1e4, ".2f"), (1e5, ".1f"), (1e7, ".0f")) if size < limit), ".2e"
    )
    return number(value, sign + form)


def duration(seconds: object) -> str:
    """Seconds for a reader.

    >>> duration(3725), duration(61.4), duration(2.34)
    ('1 h 2 min 5 s', '1 min 1 s', '2.3 s')
    """
    if not isinstance(seconds, int | float) or not 0 <= seconds < 1e12:
        return MISSING
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return " ".join([*([f"{hours} h"] if hours else []), f"{minutes} min", f"{rest} s"])


def facts(rows: Mapping[str, Line]) -> Table:
    """A table of names and values."""
    return Table(("", ""), tuple(rows.items()))


def joined(lines: Sequence[Line], between: str = ", ") -> Line:
    """Lines as one."""
    parts: list[Inline] = []
    for place, line in enumerate(lines):
        parts += [between] if place else []
        parts += line if isinstance(line, tuple) else (line,)
    return tuple(parts)
