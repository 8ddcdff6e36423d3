"""Turns a GPU's lack of memory into one message: what was requested, the peak by category, and where the remedies are. docs/memory.md"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from shlex import join
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from sft.errors import OutOfMemory
from sft.parallel import process_group as distributed
from sft.plan.job import Job
from sft.train.speed import peak_memory_gib

_SIGNS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
"""In a RuntimeError: the driver's words, as NCCL repeats them too, and those of libraries that allocate past torch."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a GPU has run out of memory; for that of the machine, sft/program.py has the message."""
    text = str(error)
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(sign in text for sign in _SIGNS)
    )


@contextmanager
def reporting_out_of_memory(job: Job, doing: str | Callable[[], str], trainer: Any = None) -> Iterator[None]:
    """Turn a GPU's lack of memory into OutOfMemory, which no launcher restarts.

    Args:
        job: What runs.
        doing: What the ranks do meanwhile, as a phrase after "while".
        trainer: Whose tensors are counted, once there is one.

    Raises:
        OutOfMemory: A GPU has run out of memory.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(_message(job, str(error), doing if isinstance(doing, str) else doing(), trainer)) from error


def _message(job: Job, error: str, doing: str, trainer: Any) -> str:
    asked = re.search(r"Tried to allocate ([\d.]+ \wi?B)", error)
    requested = f"{asked[1]} more were requested" if asked else error.strip().splitlines()[0][:200]
    planned = f" Planned were {job.plan.memory.value} GiB." if job.plan.memory.value else ""
    words = join([str(job.recipe_path), *job.overrides])
    return (
        f"Rank {distributed.rank()} ran out of GPU memory while {doing}: {requested}. The peak was {_peak(trainer)}.{planned} The same "
        f"would happen again, so nothing restarts. `sft plan {words} --fit` lists the smallest changes that make it fit, such as a smaller "
        "train.micro_batch_size or train.gradient_checkpointing=true; docs/memory.md."
    )


def _peak(trainer: Any) -> str:
    peak, _ = peak_memory_gib()
    if trainer is None:
        return f"{peak:.1f} GiB"
    held = {name: _gib(tensors) for name, tensors in _held(trainer).items()}
    parts = "".join(f"{name} {size:.1f} + " for name, size in held.items() if size)
    return f"{peak:.1f} GiB ({parts}activations, buffers and the rest {max(0.0, peak - sum(held.values())):.1f})"


def _held(trainer: Any) -> dict[str, list[Any]]:
    """The tensors of this rank by category; gradients that DeepSpeed keeps in buffers of its own are not among them."""
    weights = list(trainer.model.parameters())
    optimizer = trainer.optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    stepped = [one for group in getattr(optimizer, "param_groups", ()) for one in group["params"]]
    states = [one for state in getattr(optimizer, "state", {}).values() for one in state.values()]
    own = {id(one) for one in weights}
    return {
        "weights": [getattr(one, "ds_tensor", one) for one in weights],  # ZeRO-3's shard
        "gradients": [one.grad for one in weights],
        "optimizer": [*states, *(one for one in stepped if id(one) not in own)],
    }


def _gib(tensors: Iterable[Any]) -> float:
    """GiB of what these hold on the device that computes, each storage once."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    local = (one.to_local() if isinstance(one, DTensor) else one for one in tensors if isinstance(one, torch.Tensor))
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in local if one.device.type == device}
    return sum(storage.nbytes() for storage in storages.values()) / 2**30
