"""Defines the section `model.lora`: which adapters are trained; the names are those of peft.LoraConfig."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field, field_validator, model_validator

from sft.recipe.section import Positive, Section, regular

_STARTS = ("gaussian", "orthogonal", "pissa", "olora")
TAKES_FROM_BASE = ("pissa", "olora")
"""Starts of adapters that take what they start as out of the base's weights."""


class Lora(Section):
    """Train low-rank adapters instead of all weights (peft.LoraConfig)."""

    r: int = Field(default=16, gt=0)
    """Rank of the adapters."""

    lora_alpha: int = Field(default=32, gt=0)
    """Scale: an adapter's output is multiplied by lora_alpha / r."""

    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on an adapter's input."""

    target_modules: str | tuple[str, ...] = "all-linear"
    """Names of the linear layers that get an adapter, or a regular expression for their full names; `all-linear` is every one except the
    output head. Each name must match."""

    use_dora: bool = False
    """Train the length of each row of a weight separately from its direction (DoRA). Not under ZeRO-3 and FSDP2."""

    use_rslora: bool = False
    """Scale by lora_alpha / sqrt(r) instead (rsLoRA), so that high ranks learn as fast as low ones."""

    init_lora_weights: bool | str = True
    """Initial adapters: `true` (no effect at first), `gaussian`, `orthogonal`; or part of the base's weights, which is removed from the
    base: `pissa`, `pissa_niter_16` (a fast approximation with 16 iterations) and `olora`."""

    modules_to_save: tuple[str, ...] = ()
    """Names of other layers to train in full, such as `lm_head` of a model whose embeddings are not tied."""

    layers_to_transform: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Indices, from 0, of the decoder layers that get adapters. Empty: all."""

    layers_pattern: str | None = None
    """Name of the list of decoder layers, if peft does not know it."""

    rank_pattern: dict[str, Positive] = Field(default_factory=dict)
    """Other ranks by name, or by a regular expression for the end of the full name: `{down_proj: 64}`. Each must match."""

    alpha_pattern: dict[str, Positive] = Field(default_factory=dict)
    """Other values of lora_alpha, in the same way."""

    @property
    def takes_from_base(self) -> bool:
        """Whether adapters start as a part of the base, which loses it."""
        return str(self.init_lora_weights).startswith(TAKES_FROM_BASE)

    @property
    def words(self) -> str:
        """The kind of adapters, such as `rank 16, alpha 32, DoRA`."""
        kinds = {
            "DoRA": self.use_dora,
            "rsLoRA": self.use_rslora,
            f"{self.init_lora_weights}": self.init_lora_weights is not True,
        }
        kinds |= {f"with {', '.join(self.modules_to_save)}": bool(self.modules_to_save)}
        kinds |= {"other ranks or scales by name": bool(self.rank_pattern or self.alpha_pattern)}
        return ", ".join(
            [f"rank {self.r}, alpha {self.lora_alpha}", *(name for name, is_set in kinds.items() if is_set)]
        )

    @field_validator("init_lora_weights")
    @classmethod
    def _is_known(cls, value: bool | str) -> bool | str:
        if value is not True and value not in _STARTS and not re.fullmatch(r"pissa_niter_[1-9]\d*", str(value)):
            what = ": it starts from activations on the data, which is not built" if value == "eva" else ""
            raise ValueError(f"must be true, {', '.join(_STARTS)} or pissa_niter_16, got {value!r}{what}")
        return value

    @field_validator("target_modules")
    @classmethod
    def _is_regular(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        return regular((value,))[0] if isinstance(value, str) else value

    @field_validator("rank_pattern", "alpha_pattern")
    @classmethod
    def _are_regular(cls, value: dict[str, int]) -> dict[str, int]:
        return regular(value)

    @model_validator(mode="after")
    def _layers_by_name(self) -> Lora:
        if self.layers_to_transform and isinstance(self.target_modules, str) and self.target_modules != "all-linear":
            raise ValueError(
                "layers_to_transform works with names in target_modules, not with a regular expression: name the layers in it"
            )
        if self.layers_pattern is not None and not self.layers_to_transform:
            raise ValueError(
                "layers_pattern says where the layers of layers_to_transform are; set that too, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _starts_apart(self) -> Lora:
        clash = {"use_dora": self.use_dora, "modules_to_save": bool(self.modules_to_save)}
        clash |= {
            "use_rslora with rank_pattern or alpha_pattern": self.use_rslora
            and bool(self.rank_pattern or self.alpha_pattern)
        }
        if self.takes_from_base and (found := " and ".join(name for name, is_set in clash.items() if is_set)):
            raise ValueError(
                f"init_lora_weights={self.init_lora_weights} does not work with {found}: peft cannot make adapters of the original base of "
                "them. Leave one out"
            )
        return self
