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
_CONVERSATIONS = ("u", "su", "uau", "suau", "uauau", "suauau")
_RARE_ORDERS = ("sau", "uasu")


def _turns(roles: str, *contents: str) -> list[Message]:
    """Messages by the first letters of their roles; without contents, each has words of its own, which no template may change."""
    words = contents or [f'Say {number}: a "b" {{c}}' for number in range(len(roles))]
    return [{"role": _ROLES[role], "content": word} for role, word in zip(roles, words, strict=True)]


_RARE = {
    "a conversation that begins with the assistant, as when Ollama drops the oldest messages": _turns("sau"),
    "a system message in the middle": _turns("uasu"),
    "white space around a message, which it strips": _turns("uau", " x \n", "y", "z"),
    "reasoning (<think>) in earlier answers, which it removes": _turns("uau", "x", "<think>\nx\n</think>\n\ny", "z"),
}


@dataclass(frozen=True)
class Markup:
    """What a chat template writes around the messages."""

    between: dict[tuple[str, str], str]
    """What stands between two messages, by their roles; "" precedes the first message, and "end" follows the last."""

    has_system: bool
    """Whether system messages are written at all."""

    def _before(self, role: str) -> tuple[dict[str, str], str]:
        """What stands before a role, by the role that it follows; and what after a role that no conversation had before it."""
        known = {last: text for (last, following), text in self.between.items() if following == role}
        return known, list(known.values())[-1] if known else ""

    def render(self, messages: Sequence[Message]) -> str:
        """A conversation, with the generation prompt."""
        text = last = ""
        for message in [*messages, {"role": "end", "content": ""}]:
            known, other = self._before(message["role"])
            if message["role"] != "system" or self.has_system:
                text += known.get(last, other) + message["content"]
            last = message["role"]
        return text

    def go(self) -> str:
        """The template in Go, without trim markers and line breaks: each of its own would be written."""
        roles = [role for role in _ROLES.values() if role != "system" or self.has_system]
        turns = [f'{{{{ if eq .Role "{role}" }}}}{self._go(role)}{{{{ .Content }}}}{{{{ end }}}}' for role in roles]
        loop = f"{{{{ range .Messages }}}}{''.join(turns)}{{{{ $last = .Role }}}}{{{{ end }}}}"
        return f'{{{{ $last := "" }}}}{loop}{self._go("end")}'

    def _go(self, role: str) -> str:
        known, other = self._before(role)
        text = literal(other)
        for last, before in known.items():
            if before != other:
                text = f'{{{{ if eq $last "{last}" }}}}{literal(before)}{{{{ else }}}}{text}{{{{ end }}}}'
        return text


def read_markup(render: Render) -> Markup:
    """What a template writes around the messages. Raises ValueError where that depends on more than their roles."""
    with_system = _turns("su")
    try:
        has_system, refuses_system = with_system[0]["content"] in render(with_system), False
    except ValueError:
        has_system, refuses_system = False, True
    markup = Markup({}, has_system)
    for roles in _CONVERSATIONS:
        if not (refuses_system and "s" in roles):
            markup = _learned(markup, render, roles)
    for roles in _RARE_ORDERS:
        with suppress(ValueError):
            markup = _learned(markup, render, roles)
    if refuses_system:  # Ollama drops the system message, and the user's is the first
        markup.between["system", "user"] = markup.between["", "user"]
    return markup


def _learned(markup: Markup, render: Render, roles: str) -> Markup:
    """The markup with what one more conversation shows. Raises ValueError where it contradicts the others."""
    between, messages = dict(markup.between), _turns(roles)
    rest, last = render(messages), ""
    for message in messages:
        role, content = message["role"], message["content"]
        if role != "system" or markup.has_system:
            before, found, rest = rest.partition(content)
            if not found or content in rest:
                raise ValueError("it does not write each message as it is, once and in order")
            _note(between, last, role, before)
        last = role
    _note(between, last, "end", rest)
    return Markup(between, markup.has_system)


def _note(between: dict[tuple[str, str], str], last: str, role: str, text: str) -> None:
    if between.setdefault((last, role), text) != text:
        raise ValueError(
            f"what it writes between {last or 'nothing'} and {role} differs from one conversation to another"
        )


def differences(markup: Markup, render: Render) -> list[str]:
    """The rare conversations that come out otherwise than from the template itself, in words."""
    differs = [] if markup.has_system else ["system messages, which it has no place for and Ollama drops"]
    for name, messages in _RARE.items():
        with suppress(ValueError):  # it refuses what Ollama would render
            if render(messages) != markup.render(messages):
                differs.append(name)
    return differs


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
