"""Makes the text of others safe to show: characters that a terminal obeys, that are invisible, or that reverse the text around them.

What is printed, and what goes into Markdown, HTML or a script, passes through here.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

_KEPT = {"\n", "\t", "\u200c", "\u200d", "\u200e", "\u200f", "\u061c"}
"""Line breaks and tabs; the joiners of emoji, Persian and Indic scripts; direction marks that reverse no text."""

_DRAWN = {*map(chr, range(0x600, 0x606)), "\u06dd", "\u070f", "\u0890", "\u0891", "\u08e2", "\U000110bd", "\U000110cd"}
"""Format characters that a font draws."""

_NOT_PLAIN = re.compile(r"[^ -~\n\t]")


def is_hidden(character: str) -> bool:
    """Whether a character is a control character, overrides the direction, is invisible, or is half a surrogate pair."""
    seen = character in _KEPT or character in _DRAWN
    return not seen and unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")


def name_of(character: str) -> str:
    r"""The code point of a character that cannot be seen.

    >>> name_of("\u202e")
    '⟨U+202E⟩'
    """
    return f"⟨U+{ord(character):04X}⟩"


def visible(text: str, mark: Callable[[str], str] = name_of) -> str:
    r"""Show every character of a text.

    >>> visible("a\u202eb\x00"), visible("é 👩‍👩‍👧 سلام")
    ('a⟨U+202E⟩b⟨U+0000⟩', 'é 👩\u200d👩\u200d👧 سلام')
    """
    return _NOT_PLAIN.sub(lambda found: mark(found[0]) if is_hidden(found[0]) else found[0], text)


def visible_line(text: str) -> str:
    r"""Show a name or another short text on one line: after a line break it could imitate a line of ours.

    >>> visible_line("rows\n\x1b[2Jdone.jsonl")
    'rows⟨U+000A⟩⟨U+001B⟩[2Jdone.jsonl'
    """
    return visible(text).replace("\n", name_of("\n"))


def is_plain_name(name: str) -> bool:
    """Whether a name is that of one file or folder, in characters that can be seen."""
    return name not in ("", ".", "..") and "/" not in name and visible_line(name) == name and not name.startswith(".")
