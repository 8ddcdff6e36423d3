"""Defines what every section of a recipe is made of, and what may change when a run resumes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
Patterns = TypeVar("Patterns", bound=Iterable[str])
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """A closed, frozen group of keys: an unknown key is an error, and nothing changes after loading.

    The docstring under a field is its documentation. Each key says by metadata, its own or its section's, whether it may change when an
    unfinished run resumes.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def sections_in(annotation: Any) -> Iterator[type[Section]]:
    """The sections that a value of a type may be or hold."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for argument in get_args(annotation):
        yield from sections_in(argument)


def section_at(schema: type[Section], path: Sequence[str]) -> type[Section] | None:
    """The section inside another that a path of keys leads to; None where it leads to no section."""
    for name in path:
        found = next(sections_in(schema.model_fields[name].annotation), None) if name in schema.model_fields else None
        if found is None:
            return None
        schema = found
    return schema


def regular(patterns: Patterns) -> Patterns:
    """The patterns; ValueError where one is no regular expression."""
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
    return patterns


@dataclass(frozen=True)
class OnResume:
    """Whether a key may change when an unfinished run resumes."""

    kind: Literal["free", "named", "fixed"]
    """`free`: at any start. `named`: where train.resume_allow_changes names it. `fixed`: never."""

    reason: str = ""
    """What a change does (named), or why it is refused (fixed)."""

    same_training: bool = False
    """Two runs that differ in this key are still the same training: sft/run/diff.py."""


FREE = OnResume("free")
"""It does not affect what is trained, though it may affect rounding."""

UNRELATED = OnResume("free", same_training=True)
"""Names, places, trackers, evaluation, and how often something is written."""


def named(effect: str) -> OnResume:
    """It changes what is trained from here on, and takes effect."""
    return OnResume("named", effect)


def fixed(reason: str) -> OnResume:
    """A change would not take effect, or would make it another run."""
    return OnResume("fixed", reason)
