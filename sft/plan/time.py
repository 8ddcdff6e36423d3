"""Estimates how long a training takes, and what it costs, from the FLOPs of its tokens and the peak of the GPUs.

hours = FLOPs, with those of layers that are recomputed / (MFU x peak of all GPUs). Not counted: evaluation, checkpoints, padding, and
the start.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from sft.errors import PlanError
from sft.hub.data_facts import DataFacts
from sft.hub.flops import Matmuls, ModelFlops
from sft.plan.batch import sequences_per_epoch
from sft.plan.case import Case
from sft.plan.gpus import find_gpu
from sft.plan.pipeline import bubble
from sft.plan.plan import Decision

MFU = (0.3, 0.5)
"""A guess until benchmarks/README.md has a measurement: model FLOPs over the peak, without recomputed layers."""

_GUESS = f"at an MFU of {MFU[0]:.0%} to {MFU[1]:.0%} (a guess: none is measured yet)"


@dataclass(frozen=True)
class TimeEstimate:
    """How long a training takes on all GPUs of a job. Each range is the least and the most."""

    tokens: float
    target_tokens: float
    flops: float
    """Without what is recomputed."""
    hours: tuple[float, float]
    gpu_hours: tuple[float, float]
    kwh: tuple[float, float]
    """That the boards draw, at most; without the machine around them."""


def resolve_time(case: Case) -> Decision[str | None]:
    """How long the training takes, in words; None where that is not known."""
    found = estimate_time(case)
    if isinstance(found, str):
        return Decision(None, found)
    recomputed = ", and layers are recomputed" if case.plan.gradient_checkpointing.value else ""
    words = (
        f"{found.tokens:,.0f} tokens, {found.target_tokens:,.0f} of them targets, need {found.flops:.2g} FLOPs{recomputed}; {_GUESS}: "
        f"{_span(found.gpu_hours)} GPU-hours, at most {_span(found.kwh)} kWh. Evaluation is not counted"
    )
    return Decision(f"{_span(found.hours)} h", words)


def estimate_time(case: Case) -> TimeEstimate | str:
    """The time of the training; or why it is not known."""
    gpu, flops, data = case.hardware.gpu, _model_flops(case), case.data
    known = find_gpu(gpu.name) if gpu else None
    if gpu is None:
        return "on a CPU no time is planned"
    if known is None:
        return f"the peak FLOP/s of {gpu.name} is not known here; --on takes a name, such as 8xH100"
    if case.plan.precision.value == "fp32":
        return "the known peak FLOP/s are those of half precision, and the layers compute in fp32"
    if case.offloads:
        return "not known with offload, where the machine's memory and its links decide"
    if flops is None:
        return "the FLOPs of a token are not known for this model"
    if data is None:
        return "known when the data is prepared"
    passes = _passes(case, data)
    tokens, targets = passes * data.tokens, passes * data.trained_tokens
    # The length at which each token sees on average as many as it does: full attention's work is exact, a window's about right.
    length = (data.squared_lengths or data.tokens**2 / data.documents) / data.tokens
    once, again = _work(flops, tokens, targets, length, case.plan.gradient_checkpointing.value)
    ranks = case.hardware.ranks
    seconds = (once + again) / known.half_flops / ranks
    seconds /= 1 - bubble(case.recipe.train.pipeline_parallel_size, case.plan.gradient_accumulation_steps.value)
    low, high = seconds / MFU[1] / 3600, seconds / MFU[0] / 3600
    board = ranks * known.watts / 1000
    return TimeEstimate(tokens, targets, once, (low, high), (low * ranks, high * ranks), (low * board, high * board))


def _model_flops(case: Case) -> ModelFlops | None:
    """Of the weights as the recipe trains them. Weights that model.freeze names count as trained: at most."""
    flops, adapters = case.model.flops, case.adapter_parameters
    if flops is None or case.recipe.model.lora is None:
        return flops
    base = flops.matmuls
    return ModelFlops(Matmuls(adapters or 0, base.trained, head_frozen=base.head_trained), flops.attention)


def _passes(case: Case, data: DataFacts) -> float:
    """Over the data, in all of the training."""
    train = case.recipe.train
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
    every = checkpointing if isinstance(checkpointing, int) else 1
    return once, recomputed / every if checkpointing else 0.0


def check_price(price: float) -> None:
    """Raise PlanError for what is no price of a GPU-hour."""
    if not 0 < price < float("inf"):
        raise PlanError(f"--price {price:g}: the price of a GPU-hour is a number above 0, such as 2.5.")


def time_json(case: Case, price: float | None) -> dict[str, Any]:
    """The numbers, with `cost` where there is a price of a GPU-hour; `why` where they are not known."""
    found = estimate_time(case)
    if isinstance(found, str):
        return {"why": found}
    return asdict(found) | ({"cost": _cost(found, price)} if price is not None else {})


def cost_line(case: Case, price: float) -> str:
    """What the training costs at a price of a GPU-hour, as a line below the plan."""
    found = estimate_time(case)
    if isinstance(found, str):
        return f"Cost: not known. The time: {found}."
    return f"Cost: {_span(_cost(found, price))} at {price:g} a GPU-hour, {_GUESS}. Evaluation is not counted."


def _cost(found: TimeEstimate, price: float) -> tuple[float, float]:
    return found.gpu_hours[0] * price, found.gpu_hours[1] * price


def _span(ends: tuple[float, float]) -> str:
    """A range, to two digits.

    >>> _span((123.4, 205.7))
    '120 to 210'
    """
    low, high = (f"{float(f'{end:.2g}'):,.10g}" for end in ends)
    return f"{low} to {high}"
