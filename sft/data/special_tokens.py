"""Escapes strings in a row that spell a special token: they are read as plain text, so no row can write a turn of its own.

A mark, a private-use character, is put into each such string before the chat template sees it, and the mark's own tokens are taken
out after tokenizing.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

# What answers end with in data made for another model. Not `</s>`, which is an HTML tag in other vocabularies.
_FOREIGN_ENDS = ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|end|>", "<eos>", "<end_of_turn>")
MARK = "\ue000"


class SpecialTokens:
    """The special tokens of one tokenizer, as strings that a row may contain."""

    def __init__(self, tokenizer: Any) -> None:
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        self._any = re.compile(_any_of(special | set(tokenizer.all_special_tokens)) or "(?!)")
        ends = {tokenizer.eos_token, *_FOREIGN_ENDS} - {None, ""}
        self._end = re.compile(rf"(?:(?:{_any_of(ends)})\s*)+\Z")
        # Compared before the regular expression runs: most answers end in none of these characters.
        self._last = tuple({name[-1] for name in ends})

    def found_in(self, text: str) -> bool:
        """Whether the text spells a special token."""
        return self._any.search(text) is not None

    def without_end(self, answer: str) -> str:
        """An answer without the end tokens it closes with: the template, or the EOS token, ends it."""
        return self._end.sub("", answer) if answer.rstrip().endswith(self._last) else answer

    def shown(self, text: str) -> str:
        """The text with a backslash before each string that spells a special token."""
        return self._any.sub(r"\\\g<0>", text)

    def escaped(self, value: Any) -> Any:
        """A value with a mark after the first character of each special token in its strings and keys.

        Raises ValueError where it holds the mark itself.
        """
        if isinstance(value, str):
            if MARK in value:
                raise ValueError("it holds special tokens and the private-use character U+E000")
            return self._any.sub(lambda match: match[0][0] + MARK + match[0][1:], value)
        if isinstance(value, dict):
            return {self.escaped(key): self.escaped(inner) for key, inner in value.items()}
        return list(map(self.escaped, value)) if isinstance(value, list) else value


def _any_of(names: set[str]) -> str:
    return "|".join(map(re.escape, sorted(names, key=lambda name: (-len(name), name))))


def tokens_without_mark(encoding: Any, text: str) -> np.ndarray:
    """Which tokens of an encoding are left when those of the mark are taken out.

    Raises ValueError where a mark has become part of another token.
    """
    marked = [MARK in text[start:end] for start, end in encoding.offsets]
    if any(end - start > 1 for (start, end), is_mark in zip(encoding.offsets, marked, strict=True) if is_mark):
        raise ValueError("text that spells a special token cannot be kept apart by this tokenizer")
    return ~np.array(marked, bool)
