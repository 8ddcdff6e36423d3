"""Holds a recipe in the making: each key with the reason for its value; and writes it as YAML with the reasons as comments."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any

from sft.errors import RecipeError
from sft.plan.plan import Decision
from sft.recipe.load import parse_recipe
from sft.recipe.schema import SCHEMA_VERSION, Recipe

_WIDTH = 118
_SECTIONS = ("model", "data", "train", "eval", "tracking")


class Draft:
    """The keys that are set so far.

    Args:
        given: Overrides of the command line, `key=value`: they hold, and what follows from them follows.

    Raises:
        RecipeError: An override is wrong.
    """

    def __init__(self, given: Sequence[str] = ()) -> None:
        self.decisions: dict[str, Decision[Any]] = {
            "schema_version": Decision(SCHEMA_VERSION, ""),
            "version": Decision(1, "raise it with any change that could move a score"),
        }
        recipe = parse_recipe(_SMALLEST, given, origin="the command line")
        stated = recipe.model_dump(mode="json", exclude_unset=True)
        self.given = dict.fromkeys(word.partition("=")[0] for word in given)
        for key in self.given:
            value: Any = stated
            for part in key.split("."):
                value = value[part]
            self.decisions[key] = Decision(value, "as given")

    def put(self, key: str, value: Any, reason: str = "") -> None:
        """Set a key, unless the user has."""
        if not any(key == one or key.startswith(f"{one}.") or one.startswith(f"{key}.") for one in self.given):
            self.decisions[key] = Decision(value, reason)

    def remove(self, key: str) -> None:
        """Forget a key, unless the user has set it."""
        if key not in self.given:
            self.decisions.pop(key, None)

    def recipe(self, **more: Any) -> Recipe:
        """The recipe so far; for what has no value yet, one that works."""
        values = json.loads(json.dumps(_values(self.decisions)))
        for key, filler in {**_FILLERS, **more}.items():
            section, _, name = key.partition(".")
            values.setdefault(section, {}).setdefault(name, filler)
        if "global_batch_tokens" in values["train"]:
            values["train"].pop("global_batch_size", None)
        return parse_recipe(json.dumps(values), origin="the recipe")


_SMALLEST = "schema_version: 1\nversion: 1\nmodel: {name_or_path: x}\ndata: {train: x}\ntrain: {global_batch_size: 1}"
_FILLERS = {"model.name_or_path": "x", "data.train": "x", "train.global_batch_size": 1}


def _values(decisions: Mapping[str, Decision[Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, decision in decisions.items():
        *parents, leaf = key.split(".")
        section = values
        for parent in parents:
            section = section.setdefault(parent, {})
        section[leaf] = decision.value
    return values


def as_yaml(draft: Draft, title: Sequence[str]) -> str:
    """The recipe as a person would write it.

    Raises:
        RecipeError: It reads as something else than the draft; a bug.
    """
    lines = [f"# {line}".rstrip() for line in title]
    for name in ("schema_version", "version", "output_dir", "debug"):
        if name in draft.decisions:
            lines.append(_line(name, draft.decisions[name], 0))
    for section in _SECTIONS:
        whole = draft.decisions.get(section)
        keys = {key: one for key, one in draft.decisions.items() if key.startswith(f"{section}.")}
        if whole is None and not keys:
            continue
        lines += ["", f"{section}:" if whole is None else f"{section}: {_flow(whole.value)}"]
        for key, decision in _values_of_section(keys, section).items():
            lines += [f"  # {line}" for line in wrap(decision.reason, _WIDTH - 4)]
            lines.append(f"  {key}: {_flow(decision.value)}")
    text = "\n".join(lines) + "\n"
    if parse_recipe(text) != draft.recipe():
        raise RecipeError(f"what was written is not what was meant:\n{text}")
    return text


def _values_of_section(keys: Mapping[str, Decision[Any]], section: str) -> dict[str, Decision[Any]]:
    """The keys of a section; those of a section inside it as one."""
    inside = _values(keys)[section]
    reasons: dict[str, list[str]] = {}
    for key, decision in keys.items():
        reasons.setdefault(key.split(".")[1], []).append(decision.reason)
    return {name: Decision(value, " ".join(filter(None, reasons[name]))) for name, value in inside.items()}


def _line(name: str, decision: Decision[Any], indent: int) -> str:
    comment = f" # {decision.reason}" if decision.reason else ""
    return f"{' ' * indent}{name}: {_flow(decision.value)}{comment}"


def _flow(value: Any) -> str:
    """A value in YAML's flow style, on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_flow(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if isinstance(value, float) and 0 < abs(value) < 1e-2:
        mantissa, exponent = f"{value:e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    if isinstance(value, str) and _is_plain(value):
        return value
    return json.dumps(value, ensure_ascii=False)


def _is_plain(text: str) -> bool:
    import re

    words = re.fullmatch(r"[A-Za-z/][\w./-]*", text) is not None
    return words and text.lower() not in ("null", "true", "false", "yes", "no", "on", "off", "y", "n")
