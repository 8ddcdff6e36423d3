"""Tokens and keys: refused where they are written into a recipe, and taken out of what is printed and recorded.

Known by their shape (those of Hugging Face, OpenAI, AWS, GitHub and others), by standing in an URL before the host, and by being the
value of an environment variable that is named like one. Imports nothing of ours and no torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

_SHAPES = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"(?:hf|api_org)_[A-Za-z0-9]{30,}"  # Hugging Face
    r"|sk-(?=[A-Za-z_-]*[0-9])[A-Za-z0-9_-]{20,}"  # OpenAI, Anthropic
    r"|(?:AKIA|ASIA)[0-9A-Z]{16}"  # AWS
    r"|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{40,}|glpat-[A-Za-z0-9_-]{20,}"
    r"|xox[abeprs]-[A-Za-z0-9-]{10,}"  # Slack
    r"|AIza[0-9A-Za-z_-]{35}"  # Google
    r"|wandb_v1_[A-Za-z0-9_-]{20,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----"
    r")"
)
_LOGIN = re.compile(r"(?<=://)(?:[^\s/@:'\"]+:[^\s/@'\"]+|[^\s/@:'\"]{16,})(?=@)")
"""`user:password` or a long token before the host of an URL; `ssh://git@host` has neither."""

_NAMED = re.compile(r"(?:^|_)(?:TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(?:_|$)")
_SHORTEST = 16
"""Characters of an environment variable's value below which it is not looked for: such words occur by themselves."""

HIDDEN = "[hidden]"


def _from_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Names of the variables that hold a secret, by its value; not those that say where a file with one is."""
    return {
        value: name
        for name, value in environment.items()
        if _NAMED.search(name) and len(value) >= _SHORTEST and "/" not in value[:1] and not value.startswith("~")
    }


def redact(text: str) -> str:
    """A text without the secrets in it.

    >>> redact("GET https://me:pass@host/x and AKIA0123456789ABCDEF")
    'GET https://[hidden]@host/x and [hidden]'
    """
    for value in _from_environment(os.environ):
        if value in text:
            text = text.replace(value, HIDDEN)
    return _LOGIN.sub(HIDDEN, _SHAPES.sub(HIDDEN, text))


def redacted(words: Sequence[str]) -> list[str]:
    """A command line without the secrets in it."""
    return [redact(word) for word in words]


def _told(text: str) -> str | None:
    """What kind of secret is in a text, without its value; None where there is none."""
    for value, name in _from_environment(os.environ).items():
        if value in text:
            return f"the value of the environment variable {name}"
    shape = _SHAPES.search(text)
    if shape:
        return f"{shape[0][:3]}..., {len(shape[0])} characters"
    return "a login in an URL, before its host" if _LOGIN.search(text) else None


def secrets_in(text: str, overrides: Sequence[str]) -> list[str]:
    """Where a recipe or its overrides hold what looks like a secret.

    Args:
        text: The recipe, its comments included: the run's folder holds a copy of all of it.
        overrides: `key=value`.

    Returns:
        One line for each place, without the secret.
    """
    found = [f"line {number}: {told}" for number, line in enumerate(text.splitlines(), 1) if (told := _told(line))]
    # Of a word that is no `key=value` nothing is shown: all of it may be the secret.
    return found + [f"override {redact(word.partition('=')[0])}: {told}" for word in overrides if (told := _told(word))]
