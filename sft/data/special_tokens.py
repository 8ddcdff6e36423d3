"""Strings in a row that spell a special token: read as plain text, so that no row can write a turn of its own."""

from __future__ import annotations

import re
from typing import Any

# What answers end with in data made for another model. Not `</s>`: in other vocabularies it is a tag of HTML.
_FOREIGN_ENDS = ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|end|>", "<eos>", "<end_of_turn>")
_MARKS = [chr(code) for code in range(0xE000, 0xE010)]
"""Characters of the private-use area, of which a row's text lacks at least one."""


class ControlTokens:
    """The special tokens of one tokenizer, as strings that a row may contain.

    Args:
        tokenizer: A transformers tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        names = sorted(special | set(tokenizer.all_special_tokens), key=len, reverse=True)
        self.names = frozenset(names)
        self._any = re.compile("|".join(map(re.escape, names)) or "(?!)")
        # A foreign name that is another token here, such as Llama's image token, ends nothing.
        ends = sorted({tokenizer.eos_token, *_FOREIGN_ENDS} - {None, ""}, key=len, reverse=True)
        self._end = re.compile(rf"(?:(?:{'|'.join(map(re.escape, ends))})\s*)+\Z")
        # The last characters are looked at before the whole: most answers end in none of them.
        self._last = tuple({name[-1] for name in ends})

    def found_in(self, text: str) -> bool:
        """Whether the text spells a special token."""
        return self._any.search(text) is not None

    def without_end(self, answer: str) -> str:
        """An answer without the end tokens it closes with: the template, or the EOS, writes the right one."""
        return self._end.sub("", answer) if answer.rstrip().endswith(self._last) else answer

    def marked(self, text: str) -> str:
        """The text with a backslash before each string that spells a special token, to be told from the tokens themselves."""
        return self._any.sub(r"\\\g<0>", text)

    def broken_up(self, text: str, mark: str) -> str:
        """The text with `mark` after the first character of each special token, which makes it none."""
        return self._any.sub(lambda match: match[0][0] + mark + match[0][1:], text)


def break_up(value: Any, control: ControlTokens, mark: str) -> Any:
    """`broken_up` in every string of a message, tools or arguments, keys too."""
    if isinstance(value, str):
        return control.broken_up(value, mark)
    if isinstance(value, dict):
        return {control.broken_up(key, mark): break_up(inner, control, mark) for key, inner in value.items()}
    return [break_up(inner, control, mark) for inner in value] if isinstance(value, list) else value


def unused_mark(text: str) -> str:
    """A character that the text does not hold.

    Raises:
        ValueError: It holds all of sixteen private ones.
    """
    for mark in _MARKS:
        if mark not in text:
            return mark
    raise ValueError("it holds special tokens and the private-use characters U+E000 to U+E00F")
