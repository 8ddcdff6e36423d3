"""Rewrites a Jinja chat template in Go, which Ollama reads.

A Jinja template is a program and cannot be translated in general. So the template renders a few conversations, what it writes around the
messages is taken over, and the result is compared with the template's own, string for string. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

Message = dict[str, str]
Render = Callable[[Sequence[Message], bool], str]
"""Renders a conversation, with the generation prompt or without. Raises ValueError if the template refuses it."""

_ROLES = {"s": "system", "u": "user", "a": "assistant"}
_SYSTEM, _USER, _ANSWER, _AGAIN = "Sqaa", "Uqbb", "Aqcc", "Vqdd"
"""Words that no template writes by itself."""


def _turns(roles: str, *contents: str) -> list[Message]:
    """Messages by the first letters of their roles; without contents, each has words of its own.

    >>> [message["content"] for message in _turns("ua")]
    ['Say 0: a "b" {c}', 'Say 1: a "b" {c}']
    """
    words = contents or [f'Say {number}: a "b" {{c}}' for number in range(len(roles))]
    return [{"role": _ROLES[role], "content": word} for role, word in zip(roles, words, strict=True)]


_MUST_AGREE = [_turns(roles) for roles in ("u", "su", "uau", "suau", "uauau", "suauau")]
_MAY_DIFFER = {
    "a conversation that begins with the assistant, as when Ollama drops the oldest messages": _turns("sau"),
    "a system message in the middle": _turns("uasu"),
    "white space around a message, which it strips": _turns("uau", " x \n", "y", "z"),
    "reasoning (<think>) in earlier answers, which it removes": _turns("uau", "x", "<think>\nx\n</think>\n\ny", "z"),
}


@dataclass(frozen=True)
class Markup:
    """What a chat template writes around the messages."""

    first_user: str
    """Before a user's message that is the first of all: BOS and default system message included."""

    user: str
    user_close: str
    assistant: str
    assistant_close: str
    prompt: str
    """After the last message: the generation prompt."""

    after_system: str
    """Before the user's message that follows the first system message, also if that is dropped."""

    system: str | None = None
    """Before a system message; None: the template has no place for any."""

    system_close: str = ""

    def render(self, messages: Sequence[Message]) -> str:
        """A conversation, with the generation prompt."""
        text = ""
        for number, message in enumerate(messages):
            if message["role"] == "system":
                text += "" if self.system is None else self.system + message["content"] + self.system_close
            elif message["role"] == "assistant":
                text += self.assistant + message["content"] + self.assistant_close
            else:
                follows = number == 1 and messages[0]["role"] == "system"
                before = self.first_user if number == 0 else self.after_system if follows else self.user
                text += before + message["content"] + self.user_close
        return text + self.prompt

    def go(self) -> str:
        """The template in Go, without trim markers and line breaks: each of its own would be written."""
        has_system = '(eq (index $.Messages 0).Role "system")'
        before_user = (
            f"{{{{ if eq $i 0 }}}}{literal(self.first_user)}{{{{ else if and (eq $i 1) {has_system} }}}}{literal(self.after_system)}"
            f"{{{{ else }}}}{literal(self.user)}{{{{ end }}}}"
        )
        system = "" if self.system is None else f"{literal(self.system)}{{{{ .Content }}}}{literal(self.system_close)}"
        return (
            f'{{{{ range $i, $message := .Messages }}}}{{{{ if eq .Role "system" }}}}{system}'
            f'{{{{ else if eq .Role "user" }}}}{before_user}{{{{ .Content }}}}{literal(self.user_close)}'
            f'{{{{ else if eq .Role "assistant" }}}}{literal(self.assistant)}{{{{ .Content }}}}{literal(self.assistant_close)}'
            f"{{{{ end }}}}{{{{ end }}}}{literal(self.prompt)}"
        )


def read_markup(render: Render) -> Markup:
    """What a template writes around the messages.

    Raises:
        ValueError: It does not write each message as it is, once and in order.
    """
    user = _turns("u", _USER)
    first_user, to_answer, to_user, end = _between(
        render(_turns("uau", _USER, _ANSWER, _AGAIN), True), _USER, _ANSWER, _AGAIN
    )
    user_close = _closing(render, user, _USER, [to_answer, end])
    assistant_close = _closing(render, _turns("ua", _USER, _ANSWER), _ANSWER, [to_user])
    markup = Markup(
        first_user=first_user,
        user=to_user.removeprefix(assistant_close),
        user_close=user_close,
        assistant=to_answer.removeprefix(user_close),
        assistant_close=assistant_close,
        prompt=end.removeprefix(user_close),
        after_system=first_user,
    )
    try:
        both = render(_turns("su", _SYSTEM, _USER), True)
    except ValueError:
        return markup  # Ollama drops the system message, and the user's is the first
    if _SYSTEM not in both:
        return replace(markup, after_system=_between(both, _USER)[0])
    system, to_first_user, _ = _between(both, _SYSTEM, _USER)
    close = _closing(render, _turns("s", _SYSTEM), _SYSTEM, [to_first_user])
    return replace(markup, system=system, system_close=close, after_system=to_first_user.removeprefix(close))


def _between(text: str, *words: str) -> list[str]:
    """The pieces around words that stand in a text, each once and in order."""
    pieces = []
    for word in words:
        before, found, text = text.partition(word)
        if not found or word in text:
            raise ValueError("it does not write each message once, in the order of the conversation")
        pieces.append(before)
    return [*pieces, text]


def _closing(render: Render, messages: Sequence[Message], last: str, follow: Sequence[str]) -> str:
    """What closes the last of the messages, if the same opens whatever follows it; else nothing."""
    try:
        closing = render(messages, False).partition(last)[2]
    except ValueError:
        return ""
    return closing if all(text.startswith(closing) for text in follow) else ""


def compare(markup: Markup, render: Render) -> list[str]:
    """Compare with the template itself, string for string.

    Returns:
        Rare conversations that come out differently, in words.

    Raises:
        ValueError: A plain conversation comes out differently.
    """
    for messages in _MUST_AGREE:
        roles = [message["role"] for message in messages]
        try:
            expected = render(messages, True)
        except ValueError:
            if markup.system is None and "system" in roles:
                continue
            raise
        if markup.render(messages) != expected:
            raise ValueError(f"a conversation of {', '.join(roles)} comes out differently")
    differs = [] if markup.system is not None else ["system messages, which it has no place for and Ollama drops"]
    for name, messages in _MAY_DIFFER.items():
        try:
            if render(messages, True) != markup.render(messages):
                differs.append(name)
        except ValueError:
            continue  # it refuses what Ollama would render
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
