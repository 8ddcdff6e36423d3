"""A decision with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Resolved(Generic[T]):
    """A decision and why it was taken."""

    value: T
    reason: str
