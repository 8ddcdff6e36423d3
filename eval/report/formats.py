"""Formats recorded values for a reader. A value that is missing or of another kind is "not recorded"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from eval.compare.tables import format_score, metric_name

MISSING = "not recorded"
KINDS = {"IMPROVED": "good", "REGRESSED": "bad"}


class Code(str):
    """A name, a path or a command: shown in a fixed-width font."""


class Link(str):
    """A file beside the page."""


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
