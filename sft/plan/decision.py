"""Holds a decision with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from pydantic import BaseModel

T = TypeVar("T")


@dataclass(frozen=True)
class Decision(Generic[T]):
    """A decision and why it was taken."""

    value: T
    reason: str


def stated(section: BaseModel, key: str) -> str:
    """The reason for a value that nothing changed: `the recipe`, or `the default` where the recipe does not state the key."""
    return "the recipe" if key in section.model_fields_set else "the default"


@dataclass(frozen=True)
class TuningResult:
    """What auto-tuning found for a job; sft/launch/auto_tune.py."""

    gradient_checkpointing: bool | int | str | None
    """None, like the micro-batch, where it found nothing."""

    micro_batch_size: int | None
    reason: str
