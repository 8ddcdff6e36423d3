"""Which tokens belong to a stretch of text, asked of the tokenizer's encoding."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import numpy as np


def token_range(encoding: Any, start: int, end: int, added: Container[int] = ()) -> tuple[int, int]:
    """The tokens that any of the characters start to end belong to, as a range with the end exclusive.

    One of the ids `added` that begins before `start` is not among them: some added tokens take the white space around them with
    them (`rstrip`), such as the header before an answer that begins with a space.

    Asks for single characters: all offsets at once are a Python object for every token.
    """
    first = next((token for at in range(start, end) if (token := encoding.char_to_token(at)) is not None), None)
    if first is not None and (place := encoding.token_to_chars(first))[0] < start and encoding.ids[first] in added:
        return token_range(encoding, place[1], end, added)
    if first is None:
        return 0, 0
    stop = next(token for at in range(end - 1, start - 1, -1) if (token := encoding.char_to_token(at)) is not None) + 1
    # A character may be several tokens.
    while (place := encoding.token_to_chars(stop) if stop < len(encoding) else None) and place[0] < min(end, place[1]):
        stop += 1
    return first, stop


def without_mark(encoding: Any, text: str, mark: str) -> np.ndarray:
    """Which tokens are left when those of the marks are taken out.

    Raises:
        ValueError: A mark has become part of another token.
    """
    kept = np.ones(len(encoding), bool)
    for index, (start, end) in enumerate(encoding.offsets):
        if mark in text[start:end]:
            if end - start > 1:
                raise ValueError("text that spells a special token cannot be kept apart by this tokenizer")
            kept[index] = False
    return kept
