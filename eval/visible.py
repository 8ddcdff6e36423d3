"""Characters that a reader could not see, or that would turn the words around them about, made visible."""

from __future__ import annotations

import re
import unicodedata

_KEPT = {"\n", "\t", "\u200c", "\u200d", "\u200e", "\u200f", "\u061c"}
"""Line breaks and tabs; the joiners that emoji, Persian and Indic scripts are written with; marks that turn nothing about."""

_DRAWN = {*map(chr, range(0x600, 0x606)), "\u06dd", "\u070f", "\u0890", "\u0891", "\u08e2", "\U000110bd", "\U000110cd"}
"""Format characters that a font draws."""

_HIDDEN = {
    chr(point)
    for point in (*range(0x20000), *range(0xE0000, 0xE1000))  # Unicode has none of them elsewhere
    if unicodedata.category(chr(point)) in ("Cc", "Cf", "Cs", "Zl", "Zp")
} - (_KEPT | _DRAWN)
HIDDEN = re.compile("[" + "".join(f"\\U{ord(character):08x}" for character in sorted(_HIDDEN)) + "]")
"""Control characters, overrides of the direction, invisible characters, halves of surrogate pairs."""


def name_of(character: str) -> str:
    r"""A character that cannot be seen, as its number.

    >>> name_of("\u202e")
    '⟨U+202E⟩'
    """
    return f"⟨U+{ord(character):04X}⟩"


def visible(text: str) -> str:
    r"""A text that shows every character it has.

    >>> visible("a\u202eb\x00"), visible("é 👩‍👩‍👧 سلام")
    ('a⟨U+202E⟩b⟨U+0000⟩', 'é 👩\u200d👩\u200d👧 سلام')
    """
    return HIDDEN.sub(lambda found: name_of(found[0]), text)
