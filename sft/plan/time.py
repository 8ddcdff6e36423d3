"""Estimates how long a training takes, and what it costs, from the FLOPs of its tokens and the peak of the GPUs.

hours = FLOPs, with those of layers that are recomputed / (MFU x peak of all GPUs). The MFU is measured, or else a guess, which the plan
names as one. Not counted: evaluation, checkpoints, padding, and the start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sft.errors import PlanError
from sft.hub.flops import Matmuls, ModelFlops
from sft.plan.batch import sequences_per_epoch
from sft.plan.case import Case
from sft.plan.gpus import GpuModel, find_gpu
from sft.plan.hardware import UNNAMED
from sft.plan.pipeline import bubble
from sft.plan.plan import Decision

GUESSED_MFU = (0.3, 0.5)


@dataclass(frozen=True)
class MeasuredMfu:
    """A measurement: model FLOPs over the peak, without recomputed layers."""

    gpu: str
    """As in sft/plan/gpus.py."""
    trains: str
    """`all weights`, `adapters`, or `adapters beside a quantized base`."""
    mfu: float


MEASURED_MFU: tuple[MeasuredMfu, ...] = ()
"""Rows of benchmarks/README.md. There are none yet."""

_UNIT = 1e9  # tokens, where those of the training are not known


@dataclass(frozen=True)
class TimeEstimate:
    """How long so many tokens take on all GPUs of a job."""

    tokens: float
    target_tokens: float
    is_whole: bool
    """Whether it is all of the training; else the data is not known, and these are 1e9 tokens."""
    flops: float
    """Without what is recomputed."""
    hours: tuple[float, float]
    """The shortest and the longest."""
    ranks: int
    watts: int
    """The most that one board draws."""
    mfu: str
    """In words."""

    @property
    def gpu_hours(self) -> tuple[float, float]:
        """Of all GPUs."""
        return self.hours[0] * self.ranks, self.hours[1] * self.ranks

    @property
    def kwh(self) -> tuple[float, float]:
        """That the boards draw, at most; without the machine around them."""
        return self.gpu_hours[0] * self.watts / 1000, self.gpu_hours[1] * self.watts / 1000

    def cost(self, price: float) -> tuple[float, float]:
        """At a price of a GPU-hour."""
        return self.gpu_hours[0] * price, self.gpu_hours[1] * price

    def as_json(self, price: float | None = None) -> dict[str, Any]:
        """The numbers; each range is the least and the most."""
        numbers = {"tokens": self.tokens, "target_tokens": self.target_tokens, "is_whole": self.is_whole}
        ranges = {"hours": self.hours, "gpu_hours": self.gpu_hours, "kwh": self.kwh}
        ranges |= {"cost": self.cost(price)} if price is not None else {}
        return numbers | {"flops": self.flops, "mfu": self.mfu} | {name: list(ends) for name, ends in ranges.items()}


def resolve_time(case: Case) -> Decision[str | None]:
    """How long all of the training takes, in words; None where that is not known."""
    found = estimate_time(case)
    if isinstance(found, str):
        return Decision(None, found)
    what = f"{_count(found.tokens)} tokens, {_count(found.target_tokens)} of them targets," if found.is_whole else ""
    what = what or f"the data is not counted yet; {_UNIT:.0e} tokens in documents of {case.recipe.data.max_length}"
    recomputed = ", and layers are recomputed" if case.plan.gradient_checkpointing.value else ""
    words = (
        f"{what} need {found.flops:.2g} FLOPs{recomputed}; at {found.mfu}: {'' if found.is_whole else f'{hours(found.hours)}, '}"
        f"{span(found.gpu_hours)} GPU-hours, at most {span(found.kwh)} kWh ({found.watts} W a GPU). Evaluation is not counted"
    )
    return Decision(hours(found.hours) if found.is_whole else None, words)


def estimate_time(case: Case) -> TimeEstimate | str:
    """The time of the training, or of 1e9 tokens where the data is not known; or why neither is known."""
    gpu, flops = case.hardware.gpu, _model_flops(case)
    known = find_gpu(gpu.name) if gpu else None
    if gpu is None:
        return "on a CPU no time is planned"
    if known is None:
        return (
            "needs the GPU's name, such as --on 8xH100"
            if gpu.name == UNNAMED
            else f"the peak FLOP/s of {gpu.name} is not known here"
        )
    if case.plan.precision.value == "fp32":
        return "the known peak FLOP/s are those of half precision, and the layers compute in fp32"
    if case.offloads:
        return "not known with offload, where the machine's memory and its links decide"
    if flops is None:
        return "the FLOPs of a token are not known for this model"
    tokens = targets = _UNIT
    length, whole = float(case.recipe.data.max_length), False
    if case.data is not None:
        passes, whole = _passes(case), True
        tokens, targets = passes * case.data.tokens, passes * case.data.trained_tokens
        # The length at which each token sees on average as many as it does: full attention's work is exact, a window's about right.
        squares = case.data.squared_lengths or case.data.tokens**2 / case.data.documents
        length = squares / case.data.tokens
    once, again = _work(flops, tokens, targets, length, case.plan.gradient_checkpointing.value)
    low, high, words = _mfu(case, known)
    seconds = (once + again) / known.half_flops / case.hardware.ranks
    seconds /= 1 - bubble(case.recipe.train.pipeline_parallel_size, case.plan.gradient_accumulation_steps.value)
    ends = seconds / high / 3600, seconds / low / 3600
    return TimeEstimate(tokens, targets, whole, once, ends, case.hardware.ranks, known.watts, words)


def compute_per_token(case: Case) -> float | None:
    """FLOPs of a token of a full document, with what is recomputed; None where they are not known."""
    flops = _model_flops(case)
    if flops is None:
        return None
    return sum(_work(flops, 1.0, 1.0, float(case.recipe.data.max_length), case.plan.gradient_checkpointing.value))


def _model_flops(case: Case) -> ModelFlops | None:
    """Of the weights as the recipe trains them. Weights that model.freeze names count as trained: at most."""
    flops, adapters = case.model.flops, case.adapter_parameters
    if flops is None or case.recipe.model.lora is None:
        return flops
    base = flops.matmuls
    return ModelFlops(Matmuls(adapters or 0, base.trained, head_frozen=base.head_trained), flops.attention)


def _count(tokens: float) -> str:
    return f"{float(f'{tokens:.3g}'):,.0f}"


def _passes(case: Case) -> float:
    """Over the data, in all of the training."""
    train, data = case.recipe.train, case.data
    assert data is not None
    if train.max_steps is None:
        return train.num_train_epochs
    return train.max_steps * case.plan.global_batch_size.value / sequences_per_epoch(case.recipe, data)


def _work(
    flops: ModelFlops, tokens: float, targets: float, length: float, checkpointing: bool | int | str
) -> tuple[float, float]:
    """FLOPs of so many tokens in documents of one length: counted once, and those of layers that are recomputed."""
    length = max(1, round(length))
    documents, lengths = tokens / length, np.array([length])
    once = flops.of(lengths, round(targets / documents)) * documents
    attention = ModelFlops(Matmuls(), flops.attention).of(lengths, 0) * documents
    forward = 2 * (flops.matmuls.trained + flops.matmuls.frozen) * tokens
    # A third of attention's work is forward.
    recomputed = forward + (0 if checkpointing == "selective" else attention / 3)
    every = checkpointing if isinstance(checkpointing, int) and not isinstance(checkpointing, bool) else 1
    return once, recomputed / every if checkpointing else 0.0


def _mfu(case: Case, gpu: GpuModel) -> tuple[float, float, str]:
    """The lowest and the highest MFU that was measured, or a guess; and the words for it."""
    model = case.recipe.model
    trains = "adapters" if model.lora is not None else "all weights"
    trains += " beside a quantized base" if model.quantization else ""
    rows = [row.mfu for row in MEASURED_MFU if (row.gpu, row.trains) == (gpu.name, trains)]
    low, high = (min(rows), max(rows)) if rows else GUESSED_MFU
    ends = f"{low:.0%}" if low == high else f"{low:.0%} to {high:.0%}"
    source = "measured, benchmarks/README.md" if rows else "a guess: none is measured yet"
    return low, high, f"an MFU of {ends} ({source})"


def check_price(price: float) -> None:
    """Raise PlanError for what is no price of a GPU-hour."""
    if not 0 < price < float("inf"):
        raise PlanError(f"--price {price:g}: the price of a GPU-hour is a number above 0, such as 2.5.")


def cost_line(case: Case, price: float) -> str:
    """What the training costs at a price of a GPU-hour, as a line below the plan."""
    found = estimate_time(case)
    if isinstance(found, str):
        return f"Cost: not known. The time: {found}."
    of = "" if found.is_whole else f" for each {_UNIT:.0e} tokens"
    return f"Cost: {span(found.cost(price))}{of}, at {price:g} a GPU-hour and {found.mfu}. Evaluation is not counted."


def span(ends: tuple[float, float]) -> str:
    """A range, to two digits.

    >>> span((123.4, 205.7)), span((0.0312, 0.0312))
    ('120 to 210', '0.031')
    """
    low, high = (f"{float(f'{end:.2g}'):,.10g}" for end in ends)
    return low if low == high else f"{low} to {high}"


def hours(ends: tuple[float, float]) -> str:
    """A range of hours in a unit that suits it.

    >>> hours((3.14, 5.2)), hours((0.2, 0.31)), hours((0.001, 0.002))
    ('3.1 to 5.2 h', '12 to 19 min', '3.6 to 7.2 s')
    """
    factor, unit = (1, "h") if ends[1] >= 1 else (60, "min") if ends[1] >= 1 / 60 else (3600, "s")
    return f"{span((ends[0] * factor, ends[1] * factor))} {unit}"
