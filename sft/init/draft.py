"""Holds a recipe in the making: each key with the reason for its value; and writes it as YAML with the reasons as comments."""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Any

from sft.plan.plan import Decision
from sft.recipe.json_schema import schema_line
from sft.recipe.load import parse_recipe
from sft.recipe.schema import SCHEMA_VERSION, Recipe
from sft.recipe.write import recipe_lines

_UNTIL_CHOSEN = {"model.name_or_path": "unnamed", "data.train": "unnamed", "train.global_batch_size": 1}
"""For the keys that a recipe must have."""

_BATCHES = ("train.global_batch_size", "train.global_batch_tokens")


class Draft:
    """The keys that are set so far.

    Args:
        given: Overrides of the command line, `key=value`: they hold, and what follows from them follows.

    Raises:
        RecipeError: An override is wrong.
    """

    def __init__(self, given: Sequence[str] = ()) -> None:
        self.given = dict.fromkeys(word.partition("=")[0] for word in given)
        self.decisions: dict[str, Decision[Any]] = {"version": Decision(1, "")}
        recipe = parse_recipe(self._text(), given, origin="the command line")
        stated = recipe.model_dump(mode="json", exclude_unset=True)
        for key in self.given:
            value: Any = stated
            for part in key.split("."):
                value = value[part]
            self.decisions[key] = Decision(value, "given on the command line")

    def has(self, *keys: str) -> bool:
        """Whether the user has set one of these keys, or a section that holds one or is in one."""
        return any(
            key == one or key.startswith(f"{one}.") or one.startswith(f"{key}.") for key in keys for one in self.given
        )

    def put(self, key: str, value: Any, reason: str = "") -> None:
        """Set a key, unless the user has."""
        if not self.has(key):
            self.decisions[key] = Decision(value, reason)

    def copy(self) -> Draft:
        """The same keys, to try further ones with."""
        other = copy(self)
        other.decisions = dict(self.decisions)
        return other

    def recipe(self) -> Recipe:
        """The recipe so far."""
        return parse_recipe(self._text(), origin="the recipe")

    def _text(self) -> str:
        values: dict[str, Any] = {"schema_version": SCHEMA_VERSION}
        fillers = {key: one for key, one in _UNTIL_CHOSEN.items() if not (key in _BATCHES and self.has(*_BATCHES))}
        for key, value in (fillers | {key: one.value for key, one in self.decisions.items()}).items():
            *parents, leaf = key.split(".")
            section = values
            for parent in parents:
                section = section.setdefault(parent, {})
            section[leaf] = value
        return json.dumps(values)


def as_yaml(draft: Draft, title: Sequence[str], folder: Path) -> str:
    """The recipe as a person would write it, with the reasons as comments.

    Args:
        draft: What it says.
        title: Its first lines.
        folder: Where it will lie.
    """
    lines = [*(f"# {line}" for line in title), *filter(None, [schema_line(folder)])]
    version = draft.decisions["version"].value
    lines += [
        f"schema_version: {SCHEMA_VERSION}",
        f"version: {version} # raise it with any change that could move a score",
    ]
    settings = {key: one.value for key, one in draft.decisions.items() if key != "version"}
    comments = {key: [one.reason] for key, one in draft.decisions.items() if one.reason and key != "version"}
    text = "\n".join([*lines, *recipe_lines(settings, comments)]) + "\n"
    assert parse_recipe(text) == draft.recipe(), text
    return text
