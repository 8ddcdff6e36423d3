"""Defines the keys of `train` that say how a step changes the weights: the schedule of the learning rate and the optimizer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from sft.recipe.section import Fraction, Section, fixed, named

_OPTIMIZER = fixed("it is part of the optimizer's state in the checkpoint, which would win")
_SCHEDULE = named("the new schedule applies from the step that was reached")

Schedule = Literal[
    "cosine",
    "cosine_with_min_lr",
    "linear",
    "constant",
    "constant_with_warmup",
    "warmup_stable_decay",
    "inverse_sqrt",
    "polynomial",
]

ENDS_ABOVE_ZERO = ("cosine", "cosine_with_min_lr", "warmup_stable_decay", "polynomial")
"""Schedules that train.min_lr_ratio has an effect on."""


class Optimization(Section):
    """How a step changes the weights; part of the section `train`."""

    # A new schedule is a name here, and transformers' name for it in SCHEDULES of sft/train/arguments.py.
    lr_scheduler_type: Annotated[Schedule, _SCHEDULE] = "cosine"
    """Shape of the learning rate after warmup; docs/optimizers.md draws each. `constant` is `constant_with_warmup`, and
    `cosine_with_min_lr` is `cosine` with a min_lr_ratio."""

    min_lr_ratio: Annotated[Fraction, _SCHEDULE] = 0.0
    """Where the schedules cosine, cosine_with_min_lr, warmup_stable_decay and polynomial end, as a fraction of learning_rate."""

    warmup_steps: Annotated[int, _SCHEDULE] = Field(default=0, ge=0)
    """Optimizer steps over which the learning rate rises from 0 (warmup_stable_decay: from min_lr_ratio)."""

    warmup_ratio: Annotated[float | None, _SCHEDULE] = Field(default=None, ge=0, lt=1)
    """The warmup as a fraction of all steps, rounded up. Give one of the two."""

    lr_decay_steps: Annotated[int | None, _SCHEDULE] = Field(default=None, gt=0)
    """Last optimizer steps, over which warmup_stable_decay falls."""

    lr_decay_ratio: Annotated[float | None, _SCHEDULE] = Field(default=None, gt=0, le=1)
    """The decay as a fraction of all steps, rounded up. Give one of the two."""

    lr_decay_type: Annotated[Literal["linear", "cosine", "1-sqrt"], _SCHEDULE] = "cosine"
    """Shape of the decay of warmup_stable_decay."""

    lr_power: Annotated[float, _SCHEDULE] = Field(default=1.0, gt=0)
    """Power of the schedule polynomial: 1 is a line, 2 falls faster at first."""

    weight_decay: Annotated[float, _OPTIMIZER] = Field(default=0.0, ge=0)
    """Weight decay of AdamW, on all weights except biases and norms."""

    adam_beta1: Annotated[float, _OPTIMIZER] = Field(default=0.9, ge=0, lt=1)
    """Decay of AdamW's first moment."""

    adam_beta2: Annotated[float, _OPTIMIZER] = Field(default=0.95, ge=0, lt=1)
    """Decay of AdamW's second moment."""

    adam_epsilon: Annotated[float, _OPTIMIZER] = Field(default=1e-8, gt=0, le=0.01)
    """Added to AdamW's denominator."""

    @field_validator("warmup_steps", mode="before")
    @classmethod
    def _warmup_in_steps(cls, value: object) -> object:
        if isinstance(value, float) and 0 < value < 1:  # transformers 5 takes it for a ratio
            raise ValueError(
                f"{value:g} is no number of steps: for that fraction of all steps set warmup_ratio={value:g}"
            )
        return value

    @model_validator(mode="after")
    def _one_schedule(self) -> Optimization:
        name, ratio, power = self.lr_scheduler_type, self.min_lr_ratio, self.lr_power
        if self.warmup_steps and self.warmup_ratio is not None:
            raise ValueError(f"give one of warmup_steps ({self.warmup_steps}) and warmup_ratio ({self.warmup_ratio:g})")
        if name == "cosine_with_min_lr" and ratio == 0:
            raise ValueError("lr_scheduler_type=cosine_with_min_lr needs min_lr_ratio above 0; `cosine` ends at 0")
        if name == "polynomial" and ratio == 1:
            raise ValueError(
                "lr_scheduler_type=polynomial with min_lr_ratio=1 never falls: set lr_scheduler_type to constant"
            )
        if name != "polynomial" and power != 1:
            raise ValueError(
                f"lr_power={power:g} is for lr_scheduler_type=polynomial, which is {name}: remove one of them"
            )
        self._one_decay()
        return self

    def _one_decay(self) -> None:
        name, given = (
            self.lr_scheduler_type,
            {"lr_decay_steps": self.lr_decay_steps, "lr_decay_ratio": self.lr_decay_ratio},
        )
        stated = [f"{key}={value:g}" for key, value in given.items() if value is not None]
        if name == "warmup_stable_decay" and len(stated) != 1:
            got = " and ".join(stated) or "none"
            raise ValueError(f"lr_scheduler_type={name} needs one of lr_decay_steps and lr_decay_ratio, got {got}")
        if self.lr_decay_type != "cosine":
            stated.append(f"lr_decay_type={self.lr_decay_type}")
        if name != "warmup_stable_decay" and stated:
            raise ValueError(
                f"{' and '.join(stated)} is for lr_scheduler_type=warmup_stable_decay, which is {name}: remove one of them"
            )
