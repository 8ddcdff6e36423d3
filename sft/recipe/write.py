"""Writes a recipe as YAML, with comments above its keys."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any

import yaml

from sft.recipe.changes import recipe_keys
from sft.recipe.schema import Recipe
from sft.recipe.section import section_at
from sft.terminal import visible_line

_WIDTH = 118
_PLAIN = re.compile(r"[A-Za-z~./][\w./ +-]*")

_UNSET = object()
"""A key that the recipe does not set, and has a comment about."""

_ORDER = {key: place for place, key in enumerate(recipe_keys())}


def recipe_lines(settings: Mapping[str, Any], comments: Mapping[str, Sequence[str]]) -> list[str]:
    """The lines of a recipe, in the order of the schema.

    Args:
        settings: Values by key, such as `train.learning_rate`. A default is written only where there is a comment.
        comments: What to say above a key, a paragraph each; also about keys that are not set.
    """
    tree: dict[str, Any] = {}
    for key in sorted({*settings, *comments}, key=_place):
        value = settings.get(key, _UNSET)
        if key in comments or not _is_default(key, value):
            _put(tree, key, value)
    lines: list[str] = []
    for name in Recipe.model_fields:
        if name in tree:
            if isinstance(tree[name], dict):
                lines.append("")
            lines += _lines(name, tree[name], name, comments, 0)
    return lines


def _place(key: str) -> tuple[int, str]:
    """Where a key stands in the schema."""
    known = key
    while known and known not in _ORDER:
        known = known.rpartition(".")[0]
    return _ORDER.get(known, 0), key


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    *parents, name = key.split(".")
    for part in parents:
        tree = tree.setdefault(part, {})
    if not (value in ({}, _UNSET) and isinstance(tree.get(name), dict)):
        tree[name] = value


def _is_default(key: str, value: Any) -> bool:
    *parents, name = key.split(".")
    schema = section_at(Recipe, parents)
    if schema is None or name not in schema.model_fields:
        return False
    default = schema.model_fields[name].get_default(call_default_factory=True)
    return json.dumps(value) == json.dumps(default, default=str) or (value == default and not isinstance(value, bool))


def _lines(name: str, value: Any, key: str, comments: Mapping[str, Sequence[str]], indent: int) -> list[str]:
    space = "  " * indent
    # YAML ends a comment at more than \n, such as U+2028.
    texts = map(visible_line, comments.get(key, []))
    said = [f"{space}# {line}" for text in texts for line in wrap(text, _WIDTH - len(space) - 2)]
    if value is _UNSET:
        return said
    if isinstance(value, dict) and value:
        inner = [
            line for one, each in value.items() for line in _lines(one, each, f"{key}.{one}", comments, indent + 1)
        ]
        return [*said, f"{space}{_scalar(name)}:", *inner]
    if isinstance(value, list) and value and isinstance(value[0], dict):
        items = [f"{space}  - {_flow(one)}" for one in value]
        return [*said, f"{space}{_scalar(name)}:", *items]
    return [*said, f"{space}{_scalar(name)}: {_flow(value)}"]


def _flow(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_scalar(key)}: {_flow(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_flow, value)) + "]"
    return _scalar(value)


def _scalar(value: Any) -> str:
    """A value as our YAML reads it back, which takes `2e-5` for a number."""
    if isinstance(value, float):
        return re.sub(r"e([+-])0?", lambda match: "e" + match[1].strip("+"), repr(value))
    if not isinstance(value, str):
        return json.dumps(value)
    is_plain = _PLAIN.fullmatch(value) and not value.endswith(" ") and yaml.safe_load(value) == value
    return value if is_plain else json.dumps(value, ensure_ascii=False)
