"""Compares two recipes key by key, and decides which changes a run may resume with. docs/resume.md lists them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from sft.errors import RecipeError, did_you_mean
from sft.recipe.schema import Recipe, Section
from sft.recipe.section import FREE, OnResume

MISSING = "(not there)"

_FREE_TRAINER_ARGS = ("dataloader_num_workers", "dataloader_pin_memory", "dataloader_prefetch_factor")


@dataclass(frozen=True)
class Change:
    """One key that differs."""

    key: str
    old: Any
    new: Any

    @property
    def kind(self) -> str:
        """`free`, `named` or `fixed`."""
        return on_resume(self.key).kind

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.old)} -> {_shown(self.new)}"


def _shown(value: Any) -> str:
    if value == MISSING:
        return MISSING
    text = value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 100 else text[:97] + "..."


def _keys_of(schema: type[Section], prefix: str = "") -> Iterator[tuple[str, OnResume | None]]:
    for name, field in schema.model_fields.items():
        yield prefix + name, next((one for one in field.metadata if isinstance(one, OnResume)), None)
        for option in (field.annotation, *get_args(field.annotation)):
            if isinstance(option, type) and issubclass(option, Section):
                yield from _keys_of(option, f"{prefix}{name}.")


_KEYS = dict(_keys_of(Recipe))
_ON_RESUME = _KEYS | {f"train.trainer_args.{name}": FREE for name in _FREE_TRAINER_ARGS}


def recipe_keys() -> list[str]:
    """Every key of a recipe, dotted, sections included."""
    return list(_KEYS)


def _said(key: str) -> OnResume | None:
    while key and _ON_RESUME.get(key) is None:
        key = key.rpartition(".")[0]
    return _ON_RESUME.get(key)


def on_resume(key: str) -> OnResume:
    """Whether a key may change when a run resumes, as it says itself or as the nearest section around it says."""
    said = _said(key)
    assert said, f"{key} does not say whether it may change on resume"
    return said


def is_same_training(key: str) -> bool:
    """Whether two runs that differ in this key are still the same training; False for a key that recipes do not have any more."""
    said = _said(key)
    return said is not None and said.same_training


def differences(old: Any, new: Any, key: str = "") -> list[Change]:
    """What differs between two trees of plain values, by dotted key.

    >>> [str(change) for change in differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}})]
    ['a.c: 2 -> 3']
    """
    if _are_lists_of_sections(old, new):
        old, new = ({str(index): one for index, one in enumerate(side)} for side in (old, new))
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        return [] if old == new and isinstance(old, bool) == isinstance(new, bool) else [Change(key, old, new)]
    names = dict.fromkeys([*old, *new])
    inner = [differences(old.get(one, MISSING), new.get(one, MISSING), f"{key}.{one}".lstrip(".")) for one in names]
    return [change for changes in inner for change in changes]


def _are_lists_of_sections(old: Any, new: Any) -> bool:
    lists = isinstance(old, list) and isinstance(new, list) and len(old) == len(new)
    return lists and all(isinstance(one, Mapping) for one in [*old, *new])


def recipe_differences(old: Recipe, new: Recipe) -> list[Change]:
    """What differs between two recipes with all defaults filled in; formatting does not matter."""
    return differences(old.model_dump(mode="json"), new.model_dump(mode="json"))


def not_allowed(changes: Sequence[Change], allowed: Sequence[str]) -> list[Change]:
    """The changes that a run cannot resume with, where train.resume_allow_changes has these keys."""

    def is_allowed(change: Change) -> bool:
        named = any(f"{change.key}.".startswith(f"{key}.") for key in allowed)
        return change.kind == "free" or (change.kind == "named" and named)

    return [change for change in changes if not is_allowed(change)]


def check_allowed_changes(allowed: Sequence[str]) -> None:
    """Refuse keys in train.resume_allow_changes that do not exist, or that may never change.

    Raises:
        RecipeError: All of them in one message.
    """
    lines = []
    for key in allowed:
        if key not in _KEYS and not key.startswith("train.trainer_args."):
            lines.append(f"  {key}: unknown key{did_you_mean(key, _KEYS)}")
        elif _said(key) is None:
            lines.append(f"  {key}: some keys of this section may change and others may not; name the keys")
        elif on_resume(key).kind == "fixed":
            lines.append(f"  {key}: cannot change when a run resumes: {on_resume(key).reason}")
    if lines:
        raise RecipeError("\n".join(["train.resume_allow_changes:", *lines]))
