"""Text of others made safe to show: characters that a terminal would obey, that nobody sees, or that turn the words around them about.

What is printed, and what goes into Markdown, HTML or a script, passes through here. Imports nothing of ours.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

_KEPT = {"\n", "\t", "\u200c", "\u200d", "\u200e", "\u200f", "\u061c"}
"""Line breaks and tabs; the joiners that emoji, Persian and Indic scripts are written with; marks that turn nothing about."""

_DRAWN = {*map(chr, range(0x600, 0x606)), "\u06dd", "\u070f", "\u0890", "\u0891", "\u08e2", "\U000110bd", "\U000110cd"}
"""Format characters that a font draws."""

_NOT_PLAIN = re.compile(r"[^ -~\n\t]")


def is_hidden(character: str) -> bool:
    """Whether it is a control character, an override of the direction, invisible, or half a surrogate pair."""
    seen = character in _KEPT or character in _DRAWN
    return not seen and unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")


def name_of(character: str) -> str:
    r"""A character that cannot be seen, as its number.

    >>> name_of("\u202e")
    '⟨U+202E⟩'
    """
    return f"⟨U+{ord(character):04X}⟩"


def visible(text: str, mark: Callable[[str], str] = name_of) -> str:
    r"""A text that shows every character it has.

    Args:
        text: Of others.
        mark: How a hidden character is shown.

    >>> visible("a\u202eb\x00"), visible("é 👩‍👩‍👧 سلام")
    ('a⟨U+202E⟩b⟨U+0000⟩', 'é 👩\u200d👩\u200d👧 سلام')
    """
    return _NOT_PLAIN.sub(lambda found: mark(found[0]) if is_hidden(found[0]) else found[0], text)


def visible_line(text: str) -> str:
    r"""A name or another short text of others for one line: a line break would begin a line that looks like ours.

    >>> visible_line("rows\n\x1b[2Jdone.jsonl")
    'rows⟨U+000A⟩⟨U+001B⟩[2Jdone.jsonl'
    """
    return visible(text).replace("\n", name_of("\n"))


def is_plain_name(name: str) -> bool:
    """Whether a name is that of one file or folder, in characters that can be seen."""
    return name not in ("", ".", "..") and "/" not in name and visible_line(name) == name and not name.startswith(".")
