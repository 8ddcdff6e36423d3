"""Rewrites a Jinja chat template in Go, which Ollama reads.

A Jinja template is a program and cannot be translated in general. So the template renders a few conversations, and what it writes around
the messages is taken over. The result is compared with the template's own, string for string. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

Message = dict[str, str]
Render = Callable[[Sequence[Message], bool], str]
"""Renders a conversation, with the generation prompt or without. Raises ValueError where the template refuses it."""

_SYSTEM, _USER, _ANSWER, _AGAIN = "Sqaa", "Uqbb", "Aqcc", "Vqdd"
"""Words that no template writes by itself."""


def _turns(roles: str) -> list[Message]:
    """Messages by the first letters of their roles, `s`, `u`, `a`, each with its own words.

    >>> [message["content"] for message in _turns("ua")]
    ['Say 0: a "b" {c}', 'Say 1: a "b" {c}']
    """
    names = {"s": "system", "u": "user", "a": "assistant"}
    return [{"role": names[role], "content": f'Say {number}: a "b" {{c}}'} for number, role in enumerate(roles)]


_MUST_AGREE = ("u", "su", "uau", "suau", "uauau", "suauau")
_MAY_DIFFER = {
    "sau": "a conversation that begins with the assistant, as when Ollama drops the oldest messages of a long one",
    "uasu": "a system message in the middle",
}


@dataclass(frozen=True)
class Markup:
    """What a chat template writes around the messages."""

    first_user: str
    """Before a user's message that is the first of all: BOS and default system message included."""

    user_open: str
    user_close: str
    assistant_open: str
    assistant_close: str
    prompt: str
    """After the last message: the generation prompt."""

    first_system: str | None = None
    """Before a system message that is the first of all; None: the template has no place for any."""

    system_open: str = ""
    """Before one that is not."""

    system_close: str = ""
    after_system: str = ""
    """Before the user's message that follows the first system message, also where that is dropped."""

    def render(self, messages: Sequence[Message]) -> str:
        """A conversation, with the generation prompt."""
        text = ""
        for number, message in enumerate(messages):
            if message["role"] == "system" and self.first_system is None:
                continue
            before, after = self._of(number, message["role"], messages)
            text += before + message["content"] + after
        return text + self.prompt

    def _of(self, number: int, role: str, messages: Sequence[Message]) -> tuple[str, str]:
        if role == "system":
            return (self.first_system or "") if number == 0 else self.system_open, self.system_close
        if role == "assistant":
            return self.assistant_open, self.assistant_close
        if number == 0:
            return self.first_user, self.user_close
        follows = number == 1 and messages[0]["role"] == "system"
        return self.after_system if follows else self.user_open, self.user_close


def read_markup(render: Render, bos: str) -> Markup:
    """What a template writes around the messages.

    Args:
        render: Renders it.
        bos: The token at the beginning of a text; empty for none.

    Raises:
        ValueError: It does not write what is said as it is, each message once and in order.
    """
    user, answer = {"role": "user", "content": _USER}, {"role": "assistant", "content": _ANSWER}
    again, system = {"role": "user", "content": _AGAIN}, {"role": "system", "content": _SYSTEM}
    first_user, to_answer, to_user, end = _between(render([user, answer, again], True), _USER, _ANSWER, _AGAIN)
    user_close = _closing(render, [user], _USER, [to_answer, end])
    assistant_close = _closing(render, [user, answer], _ANSWER, [to_user])
    markup = Markup(
        first_user=first_user,
        user_open=to_user.removeprefix(assistant_close),
        user_close=user_close,
        assistant_open=to_answer.removeprefix(user_close),
        assistant_close=assistant_close,
        prompt=end.removeprefix(user_close),
    )
    try:
        both = render([system, user], True)
    except ValueError:
        return replace(markup, after_system=first_user)  # Ollama drops it, and the user's message is the first
    if _SYSTEM not in both:
        return replace(markup, after_system=_between(both, _USER)[0])
    first_system, to_first_user, _ = _between(both, _SYSTEM, _USER)
    system_close = _closing(render, [system], _SYSTEM, [to_first_user])
    return replace(
        markup,
        first_system=first_system,
        system_open=first_system.removeprefix(bos),
        system_close=system_close,
        after_system=to_first_user.removeprefix(system_close),
    )


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
    """What closes the last of the messages, where the same opens whatever follows it; else nothing."""
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
    differs = []
    for roles in (*_MUST_AGREE, *_MAY_DIFFER):
        messages = _turns(roles)
        try:
            expected = render(messages, True)
        except ValueError:
            if "s" in roles and (markup.first_system is None or roles in _MAY_DIFFER):
                continue
            raise
        if markup.render(messages) == expected:
            continue
        if roles not in _MAY_DIFFER:
            raise ValueError(f"a conversation of {', '.join(one['role'] for one in messages)} comes out differently")
        differs.append(_MAY_DIFFER[roles])
    if markup.first_system is None:
        differs.append("system messages, which it has no place for and Ollama drops")
    for number, content, name in (
        (0, " x \n", "white space around a message, which it strips"),
        (1, "<think>\nx\n</think>\n\ny", "reasoning (<think>) in earlier answers, which it removes"),
    ):
        messages = _turns("uau")
        messages[number]["content"] = content
        if render(messages, True) != markup.render(messages):
            differs.append(name)
    return differs


def write_go(markup: Markup) -> str:
    """The template of Go: without the trim markers and line breaks that would make it prettier, since it writes each of its own."""
    user = _branch(markup)
    system = ""
    if markup.first_system is not None:
        opening = _when("eq $i 0", markup.first_system, markup.system_open)
        system = f'{{{{ if eq .Role "system" }}}}{opening}{{{{ .Content }}}}{literal(markup.system_close)}{{{{ else if eq .Role "user" }}}}'
    else:
        system = '{{ if eq .Role "user" }}'
    return (
        f"{{{{ range $i, $message := .Messages }}}}{system}{user}{{{{ .Content }}}}{literal(markup.user_close)}"
        f'{{{{ else if eq .Role "assistant" }}}}{literal(markup.assistant_open)}{{{{ .Content }}}}{literal(markup.assistant_close)}'
        f"{{{{ end }}}}{{{{ end }}}}{literal(markup.prompt)}"
    )


def _branch(markup: Markup) -> str:
    later = literal(markup.user_open)
    if markup.after_system != markup.user_open:
        follows = 'and (eq $i 1) (eq (index $.Messages 0).Role "system")'
        later = f"{{{{ else if {follows} }}}}{literal(markup.after_system)}{{{{ else }}}}{later}"
        return f"{{{{ if eq $i 0 }}}}{literal(markup.first_user)}{later}{{{{ end }}}}"
    return _when("eq $i 0", markup.first_user, markup.user_open)


def _when(condition: str, one: str, other: str) -> str:
    if one == other:
        return literal(one)
    return f"{{{{ if {condition} }}}}{literal(one)}{{{{ else }}}}{literal(other)}{{{{ end }}}}"


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
    return (
        "{{ "
        + "".join(
            one if one.isprintable() else f"\\U{ord(one):08x}" if ord(one) > 0xFFFF else f"\\u{ord(one):04x}"
            for one in quoted
        )
        + " }}"
    )
