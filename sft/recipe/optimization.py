"""Defines the keys of `train` that say how a step changes the weights: the schedule of the learning rate and the optimizer."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, ValidationError, model_validator

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


Optimizer = Literal["adamw", "adamw_8bit", "paged_adamw_8bit", "adafactor", "lion", "muon"]


class LionArguments(Section):
    """What `optim_args` may hold for lion."""

    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.99, ge=0, lt=1)


class AdafactorArguments(Section):
    """What `optim_args` may hold for adafactor."""

    decay_rate: float = Field(default=-0.8, lt=0, ge=-1)
    clip_threshold: float = Field(default=1.0, gt=0)
    scale_parameter: bool = False


class MuonArguments(Section):
    """What `optim_args` may hold for muon."""

    momentum: float = Field(default=0.95, ge=0, lt=1)
    nesterov: bool = True
    ns_steps: int = Field(default=5, gt=0, lt=100)
    adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw"


class NoArguments(Section):
    """For optimizers that have keys of their own."""


_ARGUMENTS: dict[str, type[Section]] = {"lion": LionArguments, "adafactor": AdafactorArguments, "muon": MuonArguments}
_ADAM = ("adam_beta1", "adam_beta2", "adam_epsilon")


class Optimization(Section):
    """How a step changes the weights; part of the section `train`."""

    # A new schedule is a name here, and transformers' name for it in SCHEDULES of sft/train/arguments.py.
    lr_scheduler_type: Annotated[Schedule, _SCHEDULE] = "cosine"
    """Shape of the learning rate after warmup; docs/optimizers.md describes each. `constant` is `constant_with_warmup`, and
    `cosine_with_min_lr` is `cosine` with a min_lr_ratio."""

    min_lr_ratio: Annotated[Fraction, _SCHEDULE] = 0.0
    """Final rate of cosine, cosine_with_min_lr, warmup_stable_decay and polynomial, as a fraction of learning_rate."""

    warmup_steps: Annotated[int, _SCHEDULE] = Field(default=0, ge=0)
    """Optimizer steps over which the learning rate rises from 0 (warmup_stable_decay: from min_lr_ratio)."""

    warmup_ratio: Annotated[float | None, _SCHEDULE] = Field(default=None, ge=0, lt=1)
    """The warmup as a fraction of all steps, rounded up. Set this or warmup_steps."""

    lr_decay_steps: Annotated[int | None, _SCHEDULE] = Field(default=None, gt=0)
    """Number of final optimizer steps over which warmup_stable_decay falls."""

    lr_decay_ratio: Annotated[float | None, _SCHEDULE] = Field(default=None, gt=0, le=1)
    """The decay as a fraction of all steps, rounded up. Set this or lr_decay_steps."""

    lr_decay_type: Annotated[Literal["linear", "cosine", "1-sqrt"], _SCHEDULE] = "cosine"
    """Shape of the decay of warmup_stable_decay."""

    lr_power: Annotated[float, _SCHEDULE] = Field(default=1.0, gt=0)
    """Power of the schedule polynomial: 1 is a line, 2 falls faster at first."""

    optim: Annotated[Optimizer, _OPTIMIZER] = "adamw"
    """The optimizer; docs/optimizers.md has the memory and engines of each. `muon` updates the matrices of the layers, AdamW the rest."""

    optim_args: Annotated[dict[str, JsonValue], _OPTIMIZER] = Field(default_factory=dict)
    """Arguments of lion (beta1, beta2), adafactor (decay_rate, clip_threshold, scale_parameter) and muon (momentum, nesterov, ns_steps,
    adjust_lr_fn)."""

    weight_decay: Annotated[float, _OPTIMIZER] = Field(default=0.0, ge=0)
    """Decoupled weight decay, on all weights except biases and norms."""

    adam_beta1: Annotated[float, _OPTIMIZER] = Field(default=0.9, ge=0, lt=1)
    """Decay of AdamW's first moment, also in its 8-bit variants and in muon's AdamW."""

    adam_beta2: Annotated[float, _OPTIMIZER] = Field(default=0.95, ge=0, lt=1)
    """Decay of AdamW's second moment."""

    adam_epsilon: Annotated[float, _OPTIMIZER] = Field(default=1e-8, gt=0, le=0.01)
    """Added to AdamW's denominator."""

    @property
    def optimizer_arguments(self) -> dict[str, Any]:
        """`optim_args` with the defaults of the optimizer."""
        return _ARGUMENTS.get(self.optim, NoArguments).model_validate(self.optim_args).model_dump()

    @model_validator(mode="after")
    def _one_optimizer(self) -> Optimization:
        known = _ARGUMENTS.get(self.optim, NoArguments)
        try:
            known.model_validate(self.optim_args)
        except ValidationError as error:
            first = error.errors()[0]
            name, what = ".".join(map(str, first["loc"])), f"{first['msg']}, got {first['input']!r}"
            if first["type"] == "extra_forbidden":
                what = f"unknown to optim={self.optim}, which takes {', '.join(known.model_fields) or 'none'}"
            raise ValueError(f"optim_args.{name}: {what}") from None
        unused = [key for key in _ADAM if key in self.model_fields_set] if self.optim in ("adafactor", "lion") else []
        if unused:
            takes = ", ".join(known.model_fields)
            raise ValueError(
                f"{' and '.join(unused)} has no effect with optim={self.optim}: remove it; optim_args takes {takes}"
            )
        return self

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
        decay = {"lr_decay_steps": self.lr_decay_steps, "lr_decay_ratio": self.lr_decay_ratio}
        given = [key for key, value in decay.items() if value is not None]
        if name == "warmup_stable_decay" and len(given) != 1:
            got = " and ".join(given) or "none"
            raise ValueError(f"lr_scheduler_type={name} needs one of lr_decay_steps and lr_decay_ratio, got {got}")
        given += ["lr_decay_type"] if self.lr_decay_type != "cosine" else []
        if name != "warmup_stable_decay" and given:
            raise ValueError(
                f"{' and '.join(given)} is for lr_scheduler_type=warmup_stable_decay, which is {name}: remove one of them"
            )
        return self
