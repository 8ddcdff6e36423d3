"""Rewrites a Jinja chat template in Go, which Ollama reads.

A Jinja template is a program and cannot be translated in general. So the template renders some conversations, and what it writes between
two messages must depend on their two roles alone, or it is refused. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

Message = dict[str, str]
Render = Callable[[Sequence[Message]], str]
"""Renders a conversation with the generation prompt. Raises ValueError if the template refuses it."""

_ROLES = {"s": "system", "u": "user", "a": "assistant"}
_CONVERSATIONS = ("u", "uau", "uauau", "su", "suau", "suauau")


def _turns(roles: str) -> list[Message]:
    """Messages by the first letters of their roles; each has words of its own, which no template may change."""
    return [{"role": _ROLES[role], "content": f'Say {number}: a "b" {{c}}'} for number, role in enumerate(roles)]


@dataclass(frozen=True)
class Markup:
    """What a chat template writes around the messages."""

    between: dict[tuple[str, str], str]
    """What stands between two messages, by their roles; "" precedes the first message, and "end" follows the last."""

    has_system: bool
    """Whether system messages are written at all. Ollama drops them otherwise."""

    def go(self) -> str:
        """The template in Go, without trim markers and line breaks: each of its own would be written."""
        roles = [role for role in _ROLES.values() if role != "system" or self.has_system]
        turns = [
            f'{{{{ if eq .Role "{role}" }}}}{self._before(role)}{{{{ .Content }}}}{{{{ $last = .Role }}}}{{{{ end }}}}'
            for role in roles
        ]
        return f'{{{{ $last := "" }}}}{{{{ range .Messages }}}}{"".join(turns)}{{{{ end }}}}{self._before("end")}'

    def _before(self, role: str) -> str:
        """What stands before a role, by the role that it follows; the last known one after a role that no conversation had before it."""
        known = {last: text for (last, following), text in self.between.items() if following == role}
        text = other = list(known.values())[-1] if known else ""
        text = literal(text)
        for last, before in known.items():
            if before != other:
                text = f'{{{{ if eq $last "{last}" }}}}{literal(before)}{{{{ else }}}}{text}{{{{ end }}}}'
        return text


def read_markup(render: Render) -> Markup:
    """What a template writes around the messages. Raises ValueError where that depends on more than their roles."""
    with_system, has_system = _turns("su"), False
    with suppress(ValueError):
        has_system = with_system[0]["content"] in render(with_system)
    between: dict[tuple[str, str], str] = {}
    for roles in _CONVERSATIONS:
        if has_system or "s" not in roles:
            _learn(between, render, roles)
    return Markup(between, has_system)


def _learn(between: dict[tuple[str, str], str], render: Render, roles: str) -> None:
    """Add what one more conversation shows. Raises ValueError where it contradicts the others."""
    messages = _turns(roles)
    rest, last = render(messages), ""
    for message in messages:
        before, found, rest = rest.partition(message["content"])
        if not found or message["content"] in rest:
            raise ValueError("it does not write each message as it is, once and in order")
        _note(between, last, message["role"], before)
        last = message["role"]
    _note(between, last, "end", rest)


def _note(between: dict[tuple[str, str], str], last: str, role: str, text: str) -> None:
    if between.setdefault((last, role), text) != text:
        raise ValueError(
            f"what it writes between {last or 'nothing'} and {role} differs from one conversation to another"
        )


def literal(text: str) -> str:
    r"""A text that Go's template, inside the quotes of a Modelfile, writes as it is.

    >>> literal("<|im_end|>\n"), literal("{x"), literal("a\u00a0b")
    ('<|im_end|>\n', '{{ "{x" }}', '{{ "a\\u00a0b" }}')
    """
    # Ollama leaves out of a Modelfile what cannot be seen; of white space it keeps blanks, tabs and line breaks.
    hidden = any(not character.isprintable() and character not in "\n\t" for character in text)
    if not hidden and "{" not in text and '"' not in text:
        return text
    quoted = json.dumps(text, ensure_ascii=False)
    return f"{{{{ {''.join(one if one.isprintable() else _escaped(ord(one)) for one in quoted)} }}}}"


def _escaped(code: int) -> str:
    return f"\\U{code:08x}" if code > 0xFFFF else f"\\u{code:04x}"
