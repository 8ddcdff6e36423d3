"""Finds tokens and keys, to refuse them in recipes and to hide them in what is printed and recorded.

It knows them by their shape (those of Hugging Face, OpenAI, AWS, GitHub and others), as a login in a URL, and as the value of an
environment variable whose name says so.
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
"""`user:password` or a long token before the host of a URL; `ssh://git@host` has neither."""

_QUERY = re.compile(r"(?i)(?<=[?&])([\w-]*(?:token|key|secret|password)=)[^\s&#'\"]{8,}")
"""In a URL's query, as in the address of a trackio server."""

_NAMED = re.compile(r"(?:^|_)(?:TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(?:_|$)")
_SHORTEST = 16
"""Shorter values of environment variables are not searched for: such words occur by themselves."""

HIDDEN = "[hidden]"


def _from_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Names of the variables that hold a secret, by its value; not those that name a file with one."""
    return {
        value: name
        for name, value in environment.items()
        if _NAMED.search(name) and len(value) >= _SHORTEST and "/" not in value[:1] and not value.startswith("~")
    }


def redact(text: str) -> str:
    """Hide the secrets in a text.

    >>> redact("GET https://me:pass@host/x and AKIA0123456789ABCDEF")
    'GET https://[hidden]@host/x and [hidden]'
    >>> redact("http://host:7860/?write_token=abcdefgh01234567&x=1")
    'http://host:7860/?write_token=[hidden]&x=1'
    """
    for value in _from_environment(os.environ):
        if value in text:
            text = text.replace(value, HIDDEN)
    return _QUERY.sub(rf"\1{HIDDEN}", _LOGIN.sub(HIDDEN, _SHAPES.sub(HIDDEN, text)))


def _describe(text: str) -> str | None:
    """What kind of secret is in a text, without its value; None if there is none."""
    for value, name in _from_environment(os.environ).items():
        if value in text:
            return f"the value of the environment variable {name}"
    kinds = {
        "the shape of a key": _SHAPES,
        "a login in a URL, before its host": _LOGIN,
        "a token in a URL, after its ?": _QUERY,
    }
    return next((kind for kind, pattern in kinds.items() if pattern.search(text)), None)


def secrets_in(text: str, overrides: Sequence[str]) -> list[str]:
    """A line for each place of a recipe or its overrides where something looks like a secret, without the secret."""
    found = [f"line {number}: {kind}" for number, line in enumerate(text.splitlines(), 1) if (kind := _describe(line))]
    # redact: a word that is no `key=value` may be a secret as a whole.
    return found + [
        f"override {redact(word.partition('=')[0])}: {kind}" for word in overrides if (kind := _describe(word))
    ]
